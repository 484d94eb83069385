"""Tiles that Hopper's backward kernels gather from live blocks of a layout: the error rule, the
scores that are computed, and planted bugs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.kernels.planner import Tile
from tests.kernels.sm90.test_gathered import BLOCKS, MODS, shaped
from tests.support.judged import Call
from tests.support.masks import causal
from tests.support.planted import planted
from tests.support.shapes import Case
from tests.support.sparse_layouts import random_layout, sparse_spec
from tests.support.tiers import one_in, slow
from tests.support.tiles_visited import visited

ARCH = "sm_90a"

FAST = ("48, rows that differ in a box", "boxes across blocks")


def judged(
    spec: fg.AttentionSpec, case: Case, offsets: tuple[int, int] = (0, 0), **how: Any
) -> None:
    lines = how.pop("lines", (1, 1))
    live = random_layout(spec, lines, (case.seq_q + offsets[0], case.seq_k + offsets[1]), 0.4, 3)
    at = dict(zip(("q_offset", "k_offset"), offsets, strict=True))
    tensors = {"layout": live, **how.pop("tensors", {})}
    fixed = how.pop("deterministic", False)
    tile: Tile | None = how.pop("tile", None)
    tiles: dict[str, Any] = {} if tile is None else {"tiles": {"fused": tile}}
    call = Call(spec, case.tensors(), {"tensors": tensors, **at, **how}, arch=ARCH)
    run = call.judged_backward(deterministic=fixed, **tiles)
    plans = [each.kernel.plan for each in run.reports if each.kernel is not None]
    assert all(plan.gathers for plan in plans if not plan.streams)


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in BLOCKS])
def test_gradients_through_a_layout_meet_the_error_rule(name: str) -> None:
    block, mask, lines, offsets, _ = BLOCKS[name]
    spec = sparse_spec(*block, mask, dtype="float16", head_dim=64)
    fixed = list(BLOCKS).index(name) % 2 == 0
    case = Case(150, 200, lines[0], 2, 1)
    judged(spec, case, offsets, lines=(lines[0], lines[1]), deterministic=fixed)


@pytest.mark.parametrize("fixed", [False, slow(True)])
@pytest.mark.parametrize("name", [name if name == "dropout" else slow(name) for name in MODS])
def test_layouts_combine_with_what_reads_positions(name: str, fixed: bool) -> None:
    mask, score, numbers = MODS[name]
    drops = "dropout_p" in numbers
    spec = sparse_spec(
        *(32, 32, mask), score_mod=score, dtype="float16", head_dim=64, dropout=drops
    )
    judged(spec, Case(100, 333, 1, 2, 1), deterministic=fixed, **shaped(numbers))


@pytest.mark.parametrize("head_dim", [128, slow(40), slow(96), slow(160)])
def test_warpgroups_divide_the_sums_of_boxes(head_dim: int) -> None:
    spec = sparse_spec(32, 32, causal, dtype="float16", head_dim=head_dim)
    judged(spec, Case(150, 200, 1, 4, 2, head_dim=head_dim))


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True])
def test_packed_sequences_have_gathered_tiles(fixed: bool) -> None:
    spec = sparse_spec(16, 32, causal, dtype="float16", head_dim=64, packed=True)
    lengths = [40, 0, 130, 7], [60, 30, 130, 90]
    starts = [torch.tensor([0, *each]).cumsum(0).int() for each in lengths]
    live = random_layout(spec, (1, 1), (130, 130), 0.5, 2)
    tensors = {"layout": live, "cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    operands = Case(177, 310, 1, 2, 1).tensors()
    Call(spec, operands, {"tensors": tensors}, arch=ARCH).judged_backward(deterministic=fixed)


def test_a_tile_has_live_boxes_alone() -> None:
    spec = sparse_spec(32, 64, None, dtype="float16", head_dim=64)
    live = random_layout(spec, (1, 1), (2048, 128), 0.2, 1)
    call = Call(spec, Case(2048, 128).tensors(), {"tensors": {"layout": live}}, arch=ARCH)
    run = call.backward()
    fused = next(each for each in run.reports if each.kernel.plan.kernel == "fused")
    plan = fused.kernel.plan
    boxes = int(live[0, 0].any(-1).sum()) * 32 // plan.box_q
    assert visited(fused) == -(-boxes // plan.boxes_per_tile)


# The same of the kernel whose blocks own queries.
BUGS_OF_DQ = {
    "a live word of other rows": ("RECORD_LIVE + thread_index() / 32", "RECORD_LIVE"),
    "a box of the wrong base": ("exists ? own * BOX_K", "exists ? (own + 1) * BOX_K"),
    "V of another box": ("v_here, k_start, h_kv", "v_here, k_start ^ BOX_K, h_kv"),
    "a mask that is left out": ("int(masked)", "int(masked & 1)"),
}


@pytest.mark.parametrize("bug", one_in(4, BUGS_OF_DQ))
def test_planted_bugs_of_dq_are_caught(bug: str) -> None:
    spec = sparse_spec(32, 32, causal, dtype="float16", head_dim=64)
    with (
        planted("dq", *BUGS_OF_DQ[bug]),
        pytest.raises((AssertionError, fg.EmulatorError)),
    ):
        judged(spec, Case(150, 200), deterministic=True)


# A layout of some columns that all queries keep, blocks, numbers of the call.
STRIDED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "every 4th of 32": (32, 4, {}),
    "every 8th of 16": (16, 8, {"q_offset": 300, "k_offset": 37}),
    "every 2nd of 64, dropout": (64, 2, {"dropout_p": 0.3, "rng": torch.tensor([11, 3])}),
}


def strided_spec(block: int, period: int, **options: Any) -> fg.AttentionSpec:
    def columns(i: int, j: int) -> bool:
        return abs(i - j) < 2 or j % period == 1

    return sparse_spec(block, block, causal, columns, dtype="float16", head_dim=64, **options)


@pytest.mark.parametrize("name", [name if "32" in name else slow(name) for name in STRIDED])
def test_a_block_owns_keys_of_columns_that_are_alike(name: str) -> None:
    block, period, numbers = STRIDED[name]
    spec = strided_spec(block, period, dropout="dropout_p" in numbers)
    call = Call(spec, Case(100, 1075, 1, 2, 1).tensors(), {"q_offset": 976, **numbers}, arch=ARCH)
    run = call.judged_backward(deterministic="offset" in str(numbers))
    plans = [each.kernel.plan for each in run.reports if each.kernel is not None]
    assert [plan.key_stride for plan in plans if plan.box_q] == [period]


# The same of keys that do not follow each other.
BUGS_OF_KEYS = {
    "keys of neighbouring boxes": ("k_start + lane * key_step", "k_start + lane * KEY_BOX"),
    "gradients of neighbouring boxes": (
        "key = key_of_row(p, k_start, box * KEY_BOX)",
        "key = k_start + box * KEY_BOX",
    ),
    "lists of the first box alone": ("place / 2 * key_step", "0 * key_step"),
    "a mask of neighbouring boxes": (
        "row = key_of_row(p, k_start, thread / 32 * 16)",
        "row = k_start + thread / 32 * 16",
    ),
}


@pytest.mark.parametrize("bug", one_in(4, BUGS_OF_KEYS))
def test_planted_bugs_of_strided_keys_are_caught(bug: str) -> None:
    spec = strided_spec(32, 4)
    call = Call(spec, Case(100, 1075).tensors(), {"q_offset": 975}, arch=ARCH)
    with (
        planted("fused", *BUGS_OF_KEYS[bug]),
        pytest.raises((AssertionError, fg.EmulatorError)),
    ):
        call.judged_backward()


@pytest.mark.slow
def test_packed_sequences_own_keys_of_columns_that_are_alike() -> None:
    spec = strided_spec(32, 4, packed=True)
    lengths = [40, 0, 130, 7], [660, 30, 530, 90]
    starts = [torch.tensor([0, *each]).cumsum(0).int() for each in lengths]
    tensors = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    operands = Case(177, 1310, 1, 2, 1).tensors()
    Call(spec, operands, {"tensors": tensors}, arch=ARCH).judged_backward()


# What is wrong, and how.
BUGS = {
    "a live word of another tile": (
        "record[RECORD_LIVE + thread_index() / 32]",
        "((const int*)(smem + SMEM_ROWS + 8 * BLOCK_Q))[RECORD_LIVE + thread_index() / 32]",
    ),
    "a live word of other keys": ("RECORD_LIVE + thread_index() / 32", "RECORD_LIVE"),
    "blocks of other keys": ("rows_lo = k_lo + 16 * g;", "rows_lo = k_lo + 16 * (g ^ 1);"),
    "a box of the wrong base": ("BOX_Q) : own) * BOX_Q;", "BOX_Q) : own + 1) * BOX_Q;"),
    "sums of another box": ("q_start, box) + column", "q_start, box ^ 1) + column"),
    "rows that differ are taken for live": ("if (live >> 31)", "if (live >> 31 && false)"),
    "a mask that is left out": ("next_h, masked);", "next_h, masked & 1);"),
}


@pytest.mark.parametrize("bug", one_in(4, BUGS))
def test_planted_bugs_are_caught(bug: str) -> None:
    old, new = BUGS[bug]
    spec = sparse_spec(12, 12, causal, dtype="float16", head_dim=64)
    tile = Tile(step=32, warps=8, row_groups=1, blocks=1)
    with planted("fused", old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        judged(spec, Case(150, 200), tile=tile)


@pytest.mark.parametrize("fixed", [False, slow(True)])
def test_rows_and_keys_without_a_live_block_have_no_gradients(fixed: bool) -> None:
    spec = sparse_spec(32, 64, None, dtype="float16", head_dim=64)
    live = torch.zeros(1, 1, 6, 4, dtype=torch.bool)
    live[..., 4:, 2] = True
    call = Call(spec, Case(190, 250).tensors(), {"tensors": {"layout": live}}, arch=ARCH)
    run = call.judged_backward(deterministic=fixed)
    assert torch.all(run.dq[:, :, :128] == 0)
    assert torch.all(run.dk[:, :, :128] == 0)
    assert torch.all(run.dv[:, :, 192:] == 0)


@pytest.mark.parametrize("fixed", [slow(False), True])
def test_a_box_ends_with_the_queries_for_a_key_that_is_infinite(fixed: bool) -> None:
    """Queries past the end, which are zeros, would be kept by the mask: 0 * inf is NaN."""
    spec = sparse_spec(32, 32, causal, dtype="float16", head_dim=64)
    q, k, *others = Case(75, 200).tensors()
    k[:, :, 77] = torch.inf  # behind the last query, in the same box
    live = torch.ones(1, 1, 3, 7, dtype=torch.bool)
    call = Call(spec, (q, k, *others), {"tensors": {"layout": live}}, arch=ARCH)
    run = call.backward(deterministic=fixed)
    assert torch.all(run.dk[:, :, 77] == 0)
    assert torch.all(run.dv[:, :, 77] == 0)
