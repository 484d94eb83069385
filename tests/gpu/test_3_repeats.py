"""On a GPU: the same bits in every run while the GPU is busy, and buffers that held NaN before.

A dry run repeats twice, with no neighbour at work.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support import gpu_device as gpu
from tests.support.gpu_problems import (
    NAMES,
    Mode,
    Problem,
    bits,
    kernels_ahead,
    path_of,
    problem,
    roundoff,
    same_bits,
)
from tests.support.shapes import Case

Tensor = torch.Tensor


REPEATS = gpu.pick(250, 2)

PROBLEMS = gpu.pick(
    [
        ("causal", Case(1023, 1024, 2, 4, 2, "float16", 64), 0.17),
        ("causal", Case(257, 257, 4, 6, 1, "bfloat16", 128), 0.0),
        ("sliding_window", Case(1024, 1024, 2, 4, 4, "bfloat16", 64), 0.17),
        ("softcap", Case(512, 256, 2, 4, 2, "float16", 96), 0.0),
        ("alibi", Case(239, 1, 4, 4, 4, "float16", 40), 0.0),
        ("causal", Case(3, 799, 4, 4, 2, "bfloat16", 256), 0.17),
        ("causal", Case(799, 3, 4, 4, 2, "float16", 64), 0.17),
        ("full", Case(97, 97, 4, 4, 2, "float32", 64), 0.17),
    ],
    [("causal", Case(100, 150, 1, 4, 2, "float16", 64), 0.17)],
)
compiled_ahead = kernels_ahead(
    [
        (path_of(name), case, Mode(p, deterministic))
        for deterministic, some in ((True, PROBLEMS), (False, PROBLEMS[:4]))
        for name, case, p in some
    ]
)
IDS = [f"{name}-{case.id}-p={p}" for name, case, p in PROBLEMS]


def repeated(one: Problem) -> tuple[tuple[Tensor, ...], float, dict[str, int]]:
    """Runs a problem `REPEATS` times beside other work; nothing waits for the GPU in between.

    Returns:
        The first results, the largest distance of another dq from the first, and in how many
        repeats each result had other bits.
    """
    first = one.results()
    differs = torch.zeros(REPEATS, 5, dtype=torch.bool, device=gpu.DEVICE)
    distance = torch.zeros(REPEATS, device=gpu.DEVICE)
    neighbour = gpu.Neighbour()
    call = one.operator()
    for turn in range(REPEATS):
        neighbour.feed()
        again = call()
        for place, (before, now) in enumerate(zip(first, again, strict=True)):
            differs[turn, place] = (bits(before) != bits(now)).any()
        distance[turn] = (first[2].float() - again[2].float()).abs().max()
    neighbour.feed()
    found = dict(zip(NAMES, differs.sum(dim=0).tolist(), strict=True))
    share = neighbour.met / neighbour.fed
    assert share > 0.5, f"the neighbour was at work in {share:.0%} of the repeats only"
    return first, float(distance.max()), found


@pytest.mark.parametrize(("name", "case", "p"), PROBLEMS, ids=IDS)
def test_deterministic_results_are_the_same_bits_every_time(
    name: str, case: Case, p: float
) -> None:
    one = problem(path_of(name), case, Mode(p, True))
    _, _, found = repeated(one)
    assert not any(found.values()), f"repeats of {REPEATS} that differ: {found}"


@pytest.mark.parametrize(("name", "case", "p"), PROBLEMS[:4], ids=IDS[:4])
def test_with_atomics_only_dq_differs_and_by_rounding_only(name: str, case: Case, p: float) -> None:
    """Sums in another order: in half precision one last step of dq, in float32 one per tile."""
    one = problem(path_of(name), case, Mode(p, False))
    first, distance, found = repeated(one)
    del found["dq"]
    assert not any(found.values()), f"repeats of {REPEATS} that differ: {found}"
    steps = 4 if first[2].dtype != torch.float32 else 4 + case.seq_k / 16
    assert distance <= steps * roundoff(first[2].dtype) * float(first[2].abs().max())


# ---- buffers -------------------------------------------------------------------------------------

GUARD = 1024  # elements before and after each buffer, whose alignment it keeps


@dataclass
class Buffers:
    """What torch allocated while `filled_with_nan` was active.

    Attributes:
        whole: each buffer with its guards, by the address of the part that was handed out.
    """

    whole: dict[int, Tensor] = field(default_factory=dict)

    def make(self, plain: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
        """As ``plain`` would, with NaN inside and around it; zeros stay zeros."""
        made = plain(*given, **options)
        if not made.is_floating_point() or made.numel() == 0:
            return made
        size = made.numel()
        whole = self.empty((size + 2 * GUARD,), dtype=made.dtype, device=made.device)
        whole.fill_(math.nan)
        part = whole[GUARD : GUARD + size].view(made.shape)
        if plain is self.zeros:
            part.zero_()
        self.whole[part.data_ptr()] = whole
        return part

    empty = staticmethod(torch.empty)
    zeros = staticmethod(torch.zeros)

    def broken(self) -> int:
        """How many elements of guards are NaN no more."""
        outside = [part for w in self.whole.values() for part in (w[:GUARD], w[-GUARD:])]
        return sum(int((~part.isnan()).sum()) for part in outside)


@contextlib.contextmanager
def filled_with_nan() -> Iterator[Buffers]:
    """Buffers that torch hands out are full of NaN, and lie between NaN."""
    buffers = Buffers()
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    with pytest.MonkeyPatch.context() as patch:
        for plain, name in ((torch.empty, "empty"), (torch.zeros, "zeros")):
            patch.setattr(torch, name, lambda *a, _p=plain, **o: buffers.make(_p, *a, **o))
        patch.setattr(torch, "empty_like", lambda *a, **o: buffers.make(empty_like, *a, **o))
        patch.setattr(
            torch.Tensor, "new_empty", lambda t, *a, **o: buffers.make(new_empty, t, *a, **o)
        )
        yield buffers


MASKED = [
    ("float16", 64, Case(50, 60, 2, 4, 2)),
    ("bfloat16", 128, Case(130, 140, 2, 4, 2, layout="sequence_major")),
    ("float16", 40, Case(300, 350, 1, 2, 1, layout="gaps")),
    ("float32", 64, Case(70, 80, 1, 2, 2)),
    ("bfloat16", 256, Case(70, 180, 1, 2, 2)),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim", "sizes"), gpu.pick(MASKED, MASKED[:1]))
def test_buffers_of_nan_are_written_whole_and_nothing_around_them(
    dtype: str, head_dim: int, sizes: Case, deterministic: bool
) -> None:
    """With fully masked rows and keys, which get exact zeros."""
    case = Case(**{**vars(sizes), "dtype": dtype, "head_dim": head_dim})
    # The first 32 queries come before every key; keys from seq_q - 32 on come after every query.
    one = problem(path_of("causal"), case, Mode(0.17, deterministic), k_offset=32)
    plain = one.results()
    with filled_with_nan() as buffers:
        results = one.results()
    assert buffers.broken() == 0, "a kernel wrote outside its buffers"
    for name, result, before in zip(NAMES, results, plain, strict=True):
        assert result.data_ptr() in buffers.whole, f"{name} was not allocated as this test expects"
        assert not result.isnan().any(), f"{name} has elements that no kernel wrote"
        if name != "dq" or deterministic:
            assert same_bits(result, before), f"{name} depends on what its buffer held"
    out, lse, dq, dk, dv = results
    assert (out[:, :, :32] == 0).all()
    assert (lse[:, :, :32] == -math.inf).all()
    assert (dq[:, :, :32] == 0).all()
    after = case.seq_q - 32
    assert (dk[:, :, after:] == 0).all()
    assert (dv[:, :, after:] == 0).all()
    assert all((gradient != 0).any() for gradient in (dq, dk, dv))
