"""Masks of q - k that divide it: lanes evaluate them once for each distance of a warp's scores.

The same masks beside a condition of the key that is never true are evaluated for each score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.kernels.pipeline import Build, build, build_backward
from flashgen.kernels.planner import Tile
from flashgen.kernels.planner.requests import TILED_BACKWARD_KERNELS as TILED
from flashgen.shared.paths import PATHS
from flashgen.spec.analysis.diagonals import is_of_distance
from tests.support.judged import Call, check_gates, equal
from tests.support.shapes import Case

Mask = Callable[[Any, Any, Any, Any], Any]

STEP, SHARE = fg.Scalar("step", "int32", minimum=1), fg.Scalar("share", "int32", minimum=1)
NEVER = fg.Scalar("never", "int32")


def strided(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & ((q - k < STEP) | ((q - k) % STEP == 0))


def either_side(b: Any, h: Any, q: Any, k: Any) -> Any:
    distance = fg.abs(q - k)
    return (distance <= 9 * SHARE) & (distance % STEP == 0)


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q - k) // STEP) % 3 <= h


TABLE = fg.Tensor("table", ("heads",), "int32")


def by_table(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k) % STEP < TABLE[h]


MASKS = (strided, either_side, by_head)


def call_of(mask: Mask, arch: str, scalars: dict[str, int], **changed: Any) -> Call:
    case = Case(**{"seq_q": 150, "seq_k": 203, "heads_q": 2, "heads_kv": 1} | changed)
    spec = fg.AttentionSpec(mask, head_dim=64, dtype=case.dtype, name=mask.__name__)
    own = {scalar.name: scalars[scalar.name] for scalar in spec.scalars}
    numbers = {"scalars": own, "q_offset": 61, "k_offset": 7}
    return Call(spec, case.tensors(), numbers, arch=arch)


def spelled_by_scores(mask: Mask) -> Mask:
    def other(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mask(b, h, q, k) | (k < NEVER)

    other.__name__ = mask.__name__
    return other


def tiles_of(*built: Build) -> dict[str, Tile]:
    return {each.plan.kernel: each.plan.tile for each in built}


def test_conditions_of_distances_alone_are_evaluated_so() -> None:
    for mask in MASKS:
        assert is_of_distance(fg.AttentionSpec(mask, head_dim=64).mask)
        assert not is_of_distance(fg.AttentionSpec(spelled_by_scores(mask), head_dim=64).mask)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("mask", MASKS)
def test_bits_are_those_of_a_mask_that_is_evaluated_for_each_score(mask: Mask, arch: str) -> None:
    scalars = {"step": 12, "share": 7}
    call = call_of(mask, arch, scalars)
    other = call_of(spelled_by_scores(mask), arch, scalars | {"never": -1})
    tiles = tiles_of(build(other.spec, arch))
    found, expected = call.judged_forward(tiles=tiles), other.forward(tiles=tiles)
    by_distance = ["distances[" in run.source.text for run in (found, expected) if run.source]
    assert by_distance == [True, False]
    assert equal(found, expected)
    tiles = tiles_of(*(b for b in build_backward(other.spec, arch) if b.plan.kernel in TILED))
    back, again = call.judged_backward(found, tiles=tiles), other.backward(expected, tiles=tiles)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(back, name), getattr(again, name)), name


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("mask", [strided, either_side, by_table])
def test_what_changes_between_calls_changes_the_mask(mask: Mask, arch: str) -> None:
    """Scalars, lengths, offsets and a captured tensor, in calls of the same kernels."""
    for place, (step, lengths, offsets) in enumerate(
        ((5, (150, 203), (61, 7)), (64, (90, 203), (61, 7)), (64, (150, 170), (0, 30)))
    ):
        shape = dict(zip(("seq_q", "seq_k"), lengths, strict=True))
        call = call_of(mask, arch, {"step": step, "share": 2 + place}, **shape)
        call.numbers.update(zip(("q_offset", "k_offset"), offsets, strict=True))
        if mask is by_table:
            call.numbers["tensors"] = {"table": torch.tensor([3 + place, 8], dtype=torch.int32)}
        call.judged_backward(call.judged_forward())


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("heads", [8, 6])
def test_few_queries_of_many_heads_in_a_tile_have_the_same_mask(arch: str, heads: int) -> None:
    for seq_q in (1, 5, 20):
        call = call_of(strided, arch, {"step": 12}, seq_q=seq_q, heads_q=heads)
        call.judged_backward(call.judged_forward())


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_and_tangents_meet_the_error_rule(mask: Mask, dtype: str) -> None:
    for arch in PATHS if dtype != "float32" else ("sm_80",):
        call = call_of(mask, arch, {"step": 12, "share": 7}, dtype=dtype)
        forward = call.judged_forward()
        call.judged_backward(forward)
        call.judged_backward(forward, deterministic=True)
        # In float32 the tangent of LSE is at the limit of the rule with either form of the mask.
        if dtype != "float32":
            call.judged_tangent(forward)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", PATHS)
def test_nothing_spills(arch: str, head_dim: int) -> None:
    for mask in MASKS:
        spec = fg.AttentionSpec(mask, head_dim=head_dim, dtype="bfloat16", name=mask.__name__)
        for built in (build(spec, arch), *build_backward(spec, arch)):
            check_gates(built)
