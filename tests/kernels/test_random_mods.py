"""Random mods over the whole language, to depth 40: emitted kernels against the oracle.

The slow tier has 500 of them, on the two code paths in turn, forward and backward, with gradients
of captured tensors. The end of a run prints how long their kernels took to build.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashgen as fg
from flashgen.shared.paths import PATHS
from tests.support.costs import BUILD
from tests.support.judged import Call, normal
from tests.support.random_mods import captures, random_mask, random_score

BATCH, HEADS, SEQ_Q, SEQ_K = 2, 2, 70, 90


def call_of(seed: int, arch: str) -> Call:
    """The call of a seed; a third of the seeds have no mask, another third no score."""
    dtypes = ("float16", "bfloat16", "float32")[: 3 if arch == "sm_80" else 2]
    spec = fg.AttentionSpec(
        random_mask(seed) if seed % 3 != 1 else None,
        random_score(seed) if seed % 3 != 2 else None,
        head_dim=(16, 64, 40)[seed % 3 if seed % 5 else 1],
        dtype=dtypes[seed // 3 % len(dtypes)],
        name=f"random_{seed}",
    )
    d = spec.head_dim
    dtype = getattr(torch, spec.dtype)
    shapes = [(BATCH, HEADS, seq, d) for seq in (SEQ_Q, SEQ_K, SEQ_K)]
    q, k, v = (normal(shape, dtype, seed + i) for i, shape in enumerate(shapes))
    numbers = captures(seed, BATCH, HEADS, SEQ_Q, SEQ_K)
    numbers["tensors"] = {t.name: numbers["tensors"][t.name] for t in spec.tensors}
    numbers["scalars"] = {s.name: numbers["scalars"][s.name] for s in spec.scalars}
    return Call(spec, (q, k, v), numbers, arch=arch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500))
def test_any_mods_meet_the_error_rule(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    call = call_of(seed, tuple(PATHS)[seed % 2])
    forward = call.judged_forward()
    backward = call.backward(forward)
    call.check(backward)
    built = [report.build_seconds for report in (forward.report, *backward.reports)]
    record_property(BUILD, sum(built))
