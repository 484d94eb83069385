"""Plans whose heads share a tile: the choice, the traffic that it saves, what commands print."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import flashgen as fg
from flashgen.kernels.planner import Plan, choose_heads, feasible, forward_traffic
from flashgen.kernels.planner.duration import clocks_of_step
from flashgen.kernels.planner.models.spec_terms import mask_instructions
from flashgen.kernels.planner.traffic import StepKind
from flashgen.shared.errors import PlanError
from flashgen.shared.launch_facts import head_places
from flashgen.spec.language.signature import split
from flashgen.tools.cli import app
from flashgen.tools.profile.run import profile_forward
from tests.kernels.test_heads_per_tile import ARCH, ARCHS, CAUSAL, WIDE
from tests.support.profiles import forward, loaded, random_operands
from tests.support.tiers import every_share

# ---- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 7, 8, 12, 16, 71, 128, 256])
def test_the_fewest_heads_with_nearly_the_fewest_tiles_are_chosen(group: int, arch: str) -> None:
    plan = fg.plan(WIDE, arch)
    most_rows = plan.block_q  # a power of two
    taken = set()
    for seq_q in (*range(1, 300, 7), 512, 1000, 4097):
        most = min(group, most_rows)
        powers = (1 << n for n in range(most_rows.bit_length()))
        able = sorted({most, *(heads for heads in powers if group % heads == 0)})
        rows = {n: most_rows // (1 << math.ceil(math.log2(n))) for n in able}  # of each head
        tiles = {n: 3 * 2 * group // n * -(-seq_q // rows[n]) for n in able}
        fewest = min(tiles.values())
        want = next(heads for heads in able if 10 * tiles[heads] <= 11 * fewest)
        got = choose_heads(WIDE, plan, 3, 2 * group, 2, seq_q)
        assert got.heads == want, seq_q
        if want > 1:
            saved = f"of {group} that share K and V: {tiles[want]:,} tiles instead of {tiles[1]:,}"
            assert got.reason == saved
        else:
            assert got.reason == ""
        taken.add(want)
    # Queries of all lengths are in some tile of few rows of many heads.
    assert taken >= {1, most}
    assert taken == set(able) or group in (12, 256)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_group_of_more_heads_than_a_tile_has_rows_has_the_largest_part_that_can_share_it(
    arch: str,
) -> None:
    plan = fg.plan(WIDE, arch)
    for group, heads in ((144, 72), (190, 95), (131, 1), (200, 100)):
        got = choose_heads(WIDE, plan, 1, group, 1, 1)
        assert got.heads == heads
    assert (
        "no number of heads that divides 131 can share"
        in choose_heads(WIDE, plan, 1, 131, 1, 1).reason
    )


def test_with_dropout_each_head_of_a_tile_has_16_rows() -> None:
    spec = CAUSAL.replace(head_dim=128, dropout=True)
    plan = fg.plan(spec, "sm_80")
    got = {group: choose_heads(spec, plan, 1, group, 1, 1).heads for group in (7, 12, 16, 71)}
    most = plan.block_q // 16
    assert got == {
        group: max(n for n in range(1, group + 1) if group % n == 0 and head_places(16, n) <= most)
        for group in got
    }
    for heads in (12, 16):
        assert fg.plan(spec, "sm_80", heads_per_tile=heads).queries_per_tile >= 16


def test_packed_sequences_count_as_equally_long() -> None:
    spec = CAUSAL.replace(packed=True)
    got = choose_heads(spec, fg.plan(spec, "sm_80"), 3, 8, 1, 50)
    assert got.heads == 4
    why = "for 3 sequences of about 17 queries: 6 tiles instead of 24"
    assert got.reason == f"of 8 that share K and V, {why}"
    plan = fg.plan(spec, "sm_80", heads_per_tile=4)
    assert plan.grid(3, 8, 1, 50, 90, packed=True) == (50 // plan.queries_per_tile + 3, 2, 1)


def test_a_given_tile_that_heads_cannot_share_has_one_head_and_a_derived_one_is_replaced() -> None:
    plan = next(plan for plan in feasible(CAUSAL, ARCH) if plan.block_q == 192)
    assert plan.policy == "given"
    got = choose_heads(CAUSAL, plan, 1, 8, 1, 1)
    assert got.heads == 1
    assert "no number of heads that divides 8 can share a tile of 192 rows" in got.reason
    got = choose_heads(CAUSAL, replace(plan, policy="derived"), 1, 8, 1, 1)
    assert got.heads == 8
    assert got.reason.endswith("1 tile of 128 rows instead of 8 of 192")
    assert 64 % fg.plan(CAUSAL, ARCH, heads_per_tile=8).queries_per_tile == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_the_plan_prints_the_heads_and_rows_of_a_tile(arch: str) -> None:
    plan = fg.plan(WIDE, arch, heads_per_tile=4)
    alone = fg.plan(WIDE, arch)
    assert plan.tile == alone.tile
    rows, queries = plan.block_q, plan.block_q // 4
    assert plan.queries_per_tile == queries
    assert plan.grid(3, 8, 2, 2 * queries + 1, 70) == (3, 2, 3)
    assert str(plan).startswith(f"plan      block_q {rows}  heads_per_tile 4  block_k")
    assert f"query heads that share K and V, {queries} queries of each = {rows} rows" in str(plan)
    assert "heads_per_tile" not in str(alone)


def test_heads_that_share_a_tile_count_once_among_interleaved_heads() -> None:
    one, four = (fg.plan(CAUSAL, ARCH, heads_per_tile=n) for n in (1, 4))
    # K and V of all 16 heads fit in L2, of 8, and of 2; four query heads read each of them.
    for seq_k, bits in ((1024, 6), (1 << 14, 5), (1 << 16, 3)):
        sizes = 64, 16, 1 << 15, seq_k
        assert one.head_bits(*sizes) == bits
        assert four.head_bits(*sizes) == bits - 2
        tiles = (1 << 15) // four.queries_per_tile
        assert four.grid(2, *sizes, head_bits=bits - 2) == (tiles << bits - 2, 16 >> bits - 2, 2)


def test_a_larger_tile_that_the_heads_cannot_share_is_refused_with_that_reason() -> None:
    # 192 rows would be 48 queries of each: three of them in a box of 64 rows are no whole number.
    spec = CAUSAL.replace(head_dim=32, head_dim_v=32)
    wide = next(plan for plan in feasible(spec, ARCH) if plan.block_q == 192)
    assert fg.plan(spec, ARCH, tile=wide.tile).block_q == 192
    with pytest.raises(PlanError, match="boxes of Q per warpgroup: 4 against 1"):
        fg.plan(spec, ARCH, tile=wide.tile, heads_per_tile=4)
    with pytest.raises(PlanError, match="heads per row group: 2 against 1"):
        fg.plan(spec, ARCH, tile=wide.tile, heads_per_tile=8)
    shared = fg.plan(spec, ARCH, tile=wide.tile, heads_per_tile=6)
    assert shared.queries_per_tile == 32


@pytest.mark.parametrize(
    ("changes", "arch", "heads", "why"),
    [
        ({}, "sm_80", 300, "no tile has 1, 2, 4, 8, or a multiple of 16 rows"),
        ({"dropout": True}, "sm_80", 24, "no tile has a multiple of 16 rows"),
        ({"head_dim": 256, "head_dim_v": 256}, "sm_80", 200, "no tile that fits has 1, 2, 4, 8"),
        ({}, ARCH, 193, "no tile has 1, 2, 4, 8, 16, 32 or a multiple of 64 rows"),
        ({"dropout": True}, ARCH, 16, "no tile has 16, 32 or a multiple of 64 rows"),
        ({}, ARCH, 0, "it is a number of query heads"),
        ({}, ARCH, 2.0, "it is a number of query heads"),
        ({}, ARCH, True, "it is a number of query heads"),
        ({"mask_mod": lambda b, h, q, k: k < h}, ARCH, 2, "the mask depends on the head"),
    ],
)
def test_heads_that_cannot_share_a_tile_are_refused(
    changes: dict[str, Any], arch: str, heads: Any, why: str
) -> None:
    with pytest.raises(PlanError, match=why):
        fg.plan(CAUSAL.replace(**changes), arch, heads_per_tile=heads)


def test_one_tile_of_split_keys_is_shared_by_as_many_heads_as_it_has_rows() -> None:
    spec = split(CAUSAL)
    tile = fg.plan(spec, "sm_80").tile
    for heads in (2, 4, 7, 8, 12, 16, 71, 128):
        assert fg.plan(spec, "sm_80", heads_per_tile=heads).tile == tile
    with pytest.raises(PlanError, match="heads per tile: 256 against 128"):
        fg.plan(spec, "sm_80", heads_per_tile=129)


def test_traffic_of_heads_that_do_not_share_k_and_v_is_refused() -> None:
    plan = fg.plan(CAUSAL, ARCH, heads_per_tile=4)
    with pytest.raises(ValueError, match="6 heads, 2 of K and V"):
        forward_traffic(plan, 1, 6, 2, 10, 10)


# ---- what is moved ------------------------------------------------------------------------------

SIZES = (1, 4, 1, 17, 300)


def bytes_of(
    spec: fg.AttentionSpec, arch: str = ARCH, *, sizes: Any = SIZES, **options: Any
) -> tuple[Plan, dict[str, int]]:
    """Counted, where they are as the plan predicts them."""
    how = {"arch": arch, "split_size": 0, **options}
    _, (profile,) = profile_forward(spec, *random_operands(spec, sizes), **how)
    for tensor in profile.tensors:
        if "_row_" not in tensor.name:  # the lists of a layout, of which Hopper's plan says nothing
            assert tensor.issued.counted == tensor.issued.predicted, tensor.name
    assert all(each.ratio == 1 for each in profile.work if each.name == "multiply-adds")
    return profile.plan, {tensor.name: tensor.issued.counted for tensor in profile.tensors}


@every_share
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_k_and_v_are_loaded_once_for_all_heads_of_a_tile_as_the_plan_predicts(arch: str) -> None:
    spec = loaded("full")
    plan, moved = bytes_of(spec, arch)
    assert plan.heads_per_tile == 4
    batch, heads_q, heads_kv, seq_q, seq_k = SIZES
    once = batch * heads_kv * seq_k * spec.head_dim * 2
    assert moved["k"] == moved["v"] == once
    alone = forward(spec, (batch, heads_q, heads_q, seq_q, seq_k), arch)
    assert alone.plan.heads_per_tile == 1
    of_alone = {tensor.name: tensor.issued.counted for tensor in alone.tensors}
    assert of_alone["k"] == of_alone["v"] == 4 * once
    for name in ("q", "o", "lse"):
        assert moved[name] == of_alone[name], name


@every_share
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("causal", {"q_offset": 250}),
        ("causal", {"q_offset": 256, "dropout_p": 0.1, "rng": torch.tensor([7, 3])}),
        ("sliding_window", {"q_offset": 200, "scalars": {"window": 70}}),
        ("sink", {"tensors": {"sink": torch.linspace(-1, 1, 4)}}),
        ("local_global", {}),
    ],
)
def test_predicted_bytes_are_exact_for_specs_that_read_the_head_or_skip_tiles(
    name: str, options: dict[str, Any], arch: str
) -> None:
    spec = loaded(name).replace(dropout="dropout_p" in options)
    plan, _ = bytes_of(spec, arch, **options)
    # With dropout a tile of the sm_80 path has 64 rows: 17 queries of two heads, but not of four.
    two = arch == "sm_80" and spec.dropout
    assert plan.heads_per_tile == (2 if two else 4)


# ---- commands -----------------------------------------------------------------------------------


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@every_share
@pytest.mark.slow
def test_run_prints_how_many_heads_share_a_tile() -> None:
    where = ("--arch", ARCH, "--backend", "emulator", "--no-check")
    shared = said("run", "specs/causal.py", "--shape", "1,8,2,5,40", *where)
    assert (
        "heads 4 per tile, of 4 that share K and V: 2 tiles of 128 rows instead of 8 of 192"
        in shared
    )
    assert " heads " not in said("run", "specs/causal.py", "--shape", "1,2,2,5,40", *where).replace(
        "heads 2,", ""
    )


def test_plan_predicts_the_launch_that_a_call_has() -> None:
    shape = ("--shape", "2,8,2,5,300")
    text = said("plan", "specs/causal.py", "--arch", ARCH, *shape)
    causal = loaded("causal")
    alone, shared = fg.plan(causal, ARCH), fg.plan(causal, ARCH, heads_per_tile=4)
    rows = f" of {shared.block_q} rows" if shared.block_q != alone.block_q else ""
    before = f" of {alone.block_q}" if rows else ""
    assert f"4 of 4 that share K and V: 4 tiles{rows} instead of 16{before}" in text
    assert f"plan block_q {shared.block_q} heads_per_tile 4 block_k" in text
    assert "tiles 4 for 4 blocks" in text
    steps = 2 * 2 * -(-3 // shared.block_k)  # tiles of the keys up to the queries
    masked = clocks_of_step(shared, StepKind(shared.block_q, mask_instructions(causal, "forward")))
    slots = 132 * shared.blocks_per_sm
    found = re.search(rf"begun\*work_tiles\) = [\d.]+\*{slots}/\(([\d.]+) \+ [\d.]+\*4\)", text)
    assert found
    assert float(found[1]) == pytest.approx(steps * masked, rel=1e-3)
    text = said("plan", "specs/causal.py", *shape)
    assert "heads_per_tile 4 of 4 that share K and V: 4 tiles instead of 16" in text
    assert "heads_per_tile" not in said("plan", "specs/causal.py", "--shape", "2,8,8,5,200")
