"""On a GPU: copies whose box is larger than the tensor, on every code path that the GPU has.

A tile has more rows than there are keys, or more columns than a row has: the copy fills the rest
with zeros. Operands lie between rows of NaN, so that an element from outside shows.
"""

from __future__ import annotations

import pytest

from flashgen.calls import launch
from flashgen.shared.arch import paths_of
from tests.support import gpu_device as gpu
from tests.support.gpu_problems import Mode, path_of, problem
from tests.support.shapes import Case

DRY_ARCHS = ("sm_90a",)
ARCHS = DRY_ARCHS if gpu.DRY or gpu.MISSING else paths_of(launch.device_arch(0))

LENGTHS = gpu.pick(((1, 1), (70, 1), (5, 3), (200, 3), (1, 300), (130, 2)), ((5, 3),))
KINDS = gpu.pick(
    (("float16", 40), ("bfloat16", 40), ("bfloat16", 64), ("float16", 128), ("bfloat16", 200)),
    (("float16", 40),),
)
MODES = gpu.pick((Mode(), Mode(0.0, True)), (Mode(),))


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda pair: f"{pair[0]}x{pair[1]}")
@pytest.mark.parametrize(("dtype", "head_dim"), KINDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_boxes_larger_than_the_tensor_are_right(
    arch: str, dtype: str, head_dim: int, lengths: tuple[int, int]
) -> None:
    case = Case(*lengths, 2, 4, 2, dtype, head_dim, None, "gaps")
    failures = gpu.Failures()
    for mode in MODES:
        with failures.case(str(mode)):
            one = problem(path_of("full"), case, mode)
            failures.add(str(mode), one.wrong(one.results(arch=arch)))
    failures.tell()
