"""Tiles for which the producer of Hopper's forward kernel alone searches: the error rule, rows
that reach no tile, and planted bugs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import ForwardRun, run_forward
from flashgen.kernels.planner import Tile, plan
from flashgen.spec.language.signature import split
from flashgen.spec.language.spec import AttentionSpec
from tests.support.examples import spec_path
from tests.support.judged import Call
from tests.support.paged_calls import Paged, Sequences
from tests.support.planted import planted
from tests.support.shapes import Case
from tests.support.tiers import slow

ARCH = "sm_90a"
TILE = Tile(step=64, warps=8, row_groups=1, blocks=1)

ids = fg.Tensor("ids", ("batch", "tokens"), "int32")


def same(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ids[b, q] == ids[b, k]


def other(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ids[b, q] == ids[b, k] + 7


def spec_of(mask: Any, **changes: Any) -> AttentionSpec:
    return AttentionSpec(mask_mod=mask, head_dim=64, dtype="float16", **changes)


def call_of(mask: Any, case: Case, document: int = 90, split_size: int = 0) -> Call:
    tokens = max(case.seq_q, case.seq_k)
    tensors = {"ids": (torch.arange(tokens) // document).int().expand(case.batch, -1).contiguous()}
    how: dict[str, Any] = {"split_size": split_size, "tiles": {"forward": TILE}}
    return Call(spec_of(mask), case.tensors(), {"tensors": tensors}, arch=ARCH, **how)


def run(mask: Any, case: Case, document: int = 90, split_size: int = 0) -> ForwardRun:
    return call_of(mask, case, document, split_size).judged_forward()


def test_the_producer_tells_tiles_where_it_searches_in_served_calls_too() -> None:
    for spec in (spec_of(same), split(spec_of(same)), spec_of(same, paged=True)):
        found = plan(spec, ARCH)
        assert found.box_k == found.block_k
        assert plan(spec, "sm_80").box_k == 0
    assert plan(split(fg.load(spec_path("causal"))), ARCH).box_k == 0


@pytest.mark.parametrize(
    ("seq_k", "split_size"), [(1, 0), (333, 208), slow(333, 0), slow(2300, 0), slow(2300, 400)]
)
def test_searched_tiles_meet_the_error_rule(seq_k: int, split_size: int) -> None:
    run(same, Case(150, seq_k, 1, 2, 1), split_size=split_size)


@pytest.mark.parametrize("split_size", [0, slow(80)])
def test_rows_that_reach_no_tile_are_rows_without_keys(split_size: int) -> None:
    found = run(other, Case(150, 200), split_size=split_size)
    assert torch.all(found.out == 0)
    assert torch.all(found.lse == -torch.inf)


def test_a_split_with_tiles_that_is_taken_for_one_without_is_caught() -> None:
    bug = planted("forward", "unsigned(boxes == 0)", "unsigned(boxes == 1)")
    with bug, pytest.raises((AssertionError, fg.EmulatorError)):
        run(same, Case(150, 333, 1, 2, 1), split_size=208)


@pytest.mark.slow
def test_decoding_has_the_bits_of_a_prefill_with_and_without_pages() -> None:
    how: dict[str, Any] = {"backend": "emulator", "arch": ARCH, "split_size": 208}
    of = Sequences.of((300,), (300,), heads=(2, 1))
    numbers: dict[str, Any] = {"tensors": {"ids": (torch.arange(300) // 90).int()[None]}}
    q, k, v = (each[0][None] for each in (of.q, of.k, of.v))
    prefill = run_forward(spec_of(same), q, k, v, **numbers, **how)
    few = Sequences((of.q[0][:, 290:],), of.k, of.v)
    for rows in (of, few):
        start = 300 - rows.q[0].shape[1]
        call = Paged(spec_of(same, paged=True), rows, numbers=numbers, how=how)
        contiguous = run_forward(
            spec_of(same), q[:, :, start:], k, v, q_offset=start, **numbers, **how
        )
        for found in (call.run(), contiguous):
            assert torch.equal(found.out, prefill.out[:, :, start:])
            assert torch.equal(found.lse, prefill.lse[:, :, start:])


@pytest.mark.parametrize("split_size", [0, slow(32)])
def test_paged_sequences_without_keys_read_captured_tensors_inside(split_size: int) -> None:
    numbers: dict[str, Any] = {"tensors": {"ids": torch.zeros(2, 37, dtype=torch.int32)}}
    how: dict[str, Any] = {"arch": ARCH, "split_size": split_size}
    call = Paged(spec_of(same, paged=True), Sequences.of((1, 1), (0, 37)), numbers=numbers, how=how)
    assert torch.all(call.judged().out[0] == 0)


def test_a_packed_sequence_without_a_live_tile_reads_nothing_of_the_next() -> None:
    starts = [torch.tensor(each).int() for each in ([0, 40, 100], [0, 60, 130])]
    q, k, v = Case(100, 130).tensors()
    k[:, :, 60:], v[:, :, 60:] = torch.nan, torch.nan
    tensors = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    tensors["ids"] = torch.zeros(2, 70, dtype=torch.int32)
    call = Call(spec_of(other, packed=True), (q, k, v), {"tensors": tensors}, arch=ARCH)
    assert torch.all(call.forward().out[:, :, :40] == 0)


# What is wrong, and how.
BUGS = {
    "a record of the other parity": ("records + (k.parity *", "records + ((k.parity ^ 1) *"),
    "a record that is overwritten while some warps read it": (
        "if (lane == 0) barrier_arrive(k_empty[k.index]);\n      const",
        "if (lane == 0) {\n        barrier_arrive(k_empty[k.index]);\n"
        "        barrier_arrive(k_empty[k.index]);\n      }\n      const",
    ),
    "a count of one arrival per warpgroup": (
        "barrier_init(k_empty[i], 4 * CONSUMERS);",
        "barrier_init(k_empty[i], CONSUMERS);",
    ),
    "a tile of the words before": ("known.first = tile;", "known.first = tile - 1;"),
    "a full tile of another place": (
        "full >> (tile - first) & 1",
        "full >> max(tile - first - 1, 0) & 1",
    ),
    "a search that never ends its work tile": ("last = tile >= tile_end;", "last = false;"),
}


@pytest.mark.parametrize(
    ("bug", "split_size"),
    [
        (bug, split_size)
        if (number, split_size) in ((0, 0), (2, 0), (4, 320))
        else slow(bug, split_size)
        for number, bug in enumerate(BUGS)
        for split_size in (0, 320)
    ],
)
def test_planted_bugs_are_caught(bug: str, split_size: int) -> None:
    old, new = BUGS[bug]
    with planted("forward", old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        run(same, Case(300, 700), document=400, split_size=split_size)
