"""Query heads that share K and V share a tile of Hopper's forward kernel where that fills it.

With K and V repeated for every query head, no heads share them: the same call then has a tile for
each head, and must give the same results. `make test` has a case of each kind; every spec, and all
pairs of heads and lengths, are `slow`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import flashgen as fg
from flashgen.cli import app
from flashgen.errors import PlanError
from flashgen.language.signature import signature_of
from flashgen.ops import run_forward
from flashgen.planner import Plan, choose_heads, feasible, forward_traffic
from flashgen.planner.schedule import head_bits
from flashgen.profile import profile_forward
from flashgen.runtime.block_layouts import with_layout
from tests.support.examples import SPEC_IDS, SPECS, spec_path, values_of
from tests.support.judged import Call, check_gates, example
from tests.support.profiles import forward, loaded, random_operands
from tests.support.shapes import Case
from tests.support.sparse_layouts import random_layout

ARCH = "sm_90a"
CAUSAL = fg.load(spec_path("causal"))
WIDE = CAUSAL.replace(head_dim=128)  # its tile has 128 rows, which heads can share
HOW: dict[str, Any] = {"backend": "emulator", "arch": ARCH}

# Of these specs the keys that a query keeps depend on its head.
BY_HEAD = ("per_head_window", "block_sparse")


def judged(call: Call, heads: int) -> None:
    """A call with so many heads per tile: right, and the same bits as with one."""
    run = call.judged_forward()
    assert run.plan is not None
    assert run.plan.heads_per_tile == heads
    check_gates(run.report.kernel)
    q, k, v = call.qkv
    repeated = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    alone = Call(call.spec, (q, *repeated), call.numbers, arch=ARCH)
    other = alone.forward(tiles={"forward": run.plan.tile})
    assert other.plan is not None
    assert other.plan.heads_per_tile == 1
    assert torch.equal(run.lse, other.lse)
    assert torch.equal(run.out, other.out)


def of_file(name: str, case: Case, heads: int, dropout_p: float = 0.0, q_offset: int = 0) -> None:
    judged(example(spec_path(name), case, dropout_p, {"q_offset": q_offset}, arch=ARCH), heads)


# ---- results ------------------------------------------------------------------------------------


def shared(name: str, *rest: object, slow: bool = False) -> Any:
    """An example by name, with a case, heads per tile, dropout and the offset of queries."""
    return pytest.param(name, *rest, id=name, marks=pytest.mark.slow if slow else [])


@pytest.mark.parametrize(
    ("name", "case", "heads", "dropout_p", "q_offset"),
    [
        # A few new queries behind a cache of keys.
        shared("causal", Case(5, 300, 1, 8, 1), 8, 0.0, 295),
        # What reads the head: the score, random bits; the sink, where tiles of heads take turns.
        shared(
            "alibi",
            Case(64, 128, 1, 4, 2, "bfloat16", 16, None, "sequence_major"),
            2,
            0.17,
            0,
            slow=True,
        ),
        shared("sink", Case(70, 90, 1, 8, 2, "float16", 64, None, "gaps"), 4, 0.0, 0, slow=True),
        # The batch entry's own keys, skipped by tables; a layout that all heads have.
        shared("document", Case(1, 239, 3, 4, 1, "float16", 64, 24), 4, 0.0, 0, slow=True),
        shared("local_global", Case(20, 203, 1, 8, 1), 4, 0.0, 150, slow=True),
    ],
)
def test_heads_that_share_a_tile_give_the_results_of_separate_tiles(
    name: str, case: Case, heads: int, dropout_p: float, q_offset: int
) -> None:
    of_file(name, case, heads, dropout_p, q_offset)


@pytest.mark.slow
@pytest.mark.parametrize("seq_q", [1, 5, 17, 64, 130])
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(8, 1), (8, 4), (4, 2), (6, 3)])
@pytest.mark.parametrize(
    ("name", "dropout_p"),
    [("causal", 0.0), ("alibi", 0.17), ("sink", 0.0), ("document", 0.0), ("bigbird", 0.1)],
)
def test_shared_tiles_give_those_results_for_all_heads_and_lengths(
    name: str, dropout_p: float, heads_q: int, heads_kv: int, seq_q: int
) -> None:
    turn = seq_q + heads_q
    dtype, layout = ("float16", "bfloat16")[turn % 2], ("sequence_major", "gaps")[turn // 2 % 2]
    case = Case(seq_q, 203, 2, heads_q, heads_kv, dtype, (64, 128, 256)[turn % 3], None, layout)
    heads = {1: 8, 5: 8, 17: 4, 64: 2, 130: 8}[seq_q] if heads_q == 8 * heads_kv else 2
    of_file(name, case, heads, dropout_p, q_offset=203 - seq_q)


@pytest.mark.slow
@pytest.mark.parametrize("seq_q", [3, 50])
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_shared_tiles_give_those_results_for_every_spec(path: Path, seq_q: int) -> None:
    spec = fg.load(path)
    if not spec.packed:
        heads = 1 if path.stem in BY_HEAD else {3: 4, 50: 2}[seq_q]
        of_file(path.stem, Case(seq_q, 330, 2, 8, 2, "float16", (64, 96)[seq_q % 2]), heads)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [8, 40, 104, 192, 248])
@pytest.mark.parametrize("seq_q", [16, 30])
def test_shared_tiles_give_those_results_at_padded_head_dims(head_dim: int, seq_q: int) -> None:
    case = Case(seq_q, 150, 1, 8, 1, "float16", head_dim, None, "gaps")
    of_file("causal", case, 8 if seq_q == 16 else 4, q_offset=100)


def test_groups_that_no_power_of_two_divides_have_a_tile_for_each_head() -> None:
    q, k, v = Case(5, 40, 1, 6, 2).tensors(seed=1)
    run = run_forward(CAUSAL, q, k, v, **HOW)
    assert run.plan is not None
    assert run.plan.heads_per_tile == 1
    assert "no power of two that divides 3 can share" in run.report.heads_reason


def test_calls_with_as_many_heads_per_tile_share_a_kernel() -> None:
    runs = [run_forward(CAUSAL, *Case(n, 40, 1, 4, 1).tensors(), **HOW) for n in (1, 9, 130)]
    made = [run.report.kernel for run in runs]
    assert made[0] is made[1]
    # 130 queries of four heads: ceil(130 / 32) = 5 tiles of 128 rows, or 4 of 192.
    assert made[2] is made[0]
    assert "5 tiles of 128 rows instead of 4 of 192" in runs[2].report.heads_reason


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_the_bits_do_not_depend_on_the_order_of_warps_and_copies(head_dim: int) -> None:
    spec = CAUSAL.replace(head_dim=head_dim, head_dim_v=head_dim)
    q, k, v = Case(20, 500, 1, 4, 1, "float16", head_dim).tensors(seed=1)
    plain = run_forward(spec, q, k, v, q_offset=400, **HOW)
    shuffled = run_forward(spec, q, k, v, q_offset=400, order_seed=3, **HOW)
    assert plain.plan is not None
    assert plain.plan.heads_per_tile == 4
    assert torch.equal(plain.out, shuffled.out)
    assert torch.equal(plain.lse, shuffled.lse)


# ---- where heads do not share a tile, and why ---------------------------------------------------


def test_a_mask_that_depends_on_the_head_has_a_tile_for_each_head_and_the_reason() -> None:
    path, case = spec_path("per_head_window"), Case(5, 90, 1, 4, 1)
    run = run_forward(fg.load(path), *case.tensors(), **values_of(path, case), **HOW)
    assert run.plan is not None
    assert run.plan.heads_per_tile == 1
    assert run.report.heads_reason == "of 4 that share K and V: the mask depends on the head"


@pytest.mark.parametrize("lines", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_layout_is_shared_where_it_is_the_same_for_all_heads(lines: int) -> None:
    spec, case = loaded("block_sparse"), Case(40, 150, 1, 4, 1)
    live = random_layout(spec, (1, lines), (40, 150), 0.5, seed=1)
    tensors = dict(with_layout(signature_of(spec), {"layout": live}))
    if lines == 1:
        judged(Call(spec, case.tensors(), {"tensors": tensors}, arch=ARCH), 2)
        return
    run = run_forward(spec, *case.tensors(), tensors=tensors, **HOW)
    assert run.plan is not None
    assert run.plan.heads_per_tile == 1
    assert "the block layout depends on the head" in run.report.heads_reason


def test_a_layout_by_head_that_is_a_function_is_not_shared() -> None:
    sparse = fg.BlockSparse(lambda b, h, i, j: (i + j + h) % 2 == 0)
    spec = fg.AttentionSpec(block_sparse=sparse, head_dim=16, name="by_head")
    run = run_forward(spec, *Case(5, 150, 1, 4, 1, head_dim=16).tensors(), **HOW)
    assert run.plan is not None
    assert run.plan.heads_per_tile == 1
    assert "the block layout depends on the head" in run.report.heads_reason


def test_the_sm80_path_has_one_head_per_tile_and_reports_no_reason() -> None:
    run = run_forward(CAUSAL, *Case(5, 40, 1, 4, 1).tensors(), backend="emulator", arch="sm_80")
    assert run.plan is not None
    assert run.plan.heads_per_tile == 1
    assert run.report.heads_reason == ""


# ---- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 7, 8, 16])
def test_the_fewest_heads_with_nearly_the_fewest_tiles_are_chosen(group: int) -> None:
    plan = fg.plan(WIDE, ARCH)
    taken = set()
    for seq_q in (*range(1, 300, 7), 512, 1000, 4097):
        able = [heads for heads in (1, 2, 4, 8) if group % heads == 0]
        tiles = {n: 3 * 2 * group // n * -(-seq_q * n // plan.block_q) for n in able}
        fewest = min(tiles.values())
        want = next(heads for heads in able if 10 * tiles[heads] <= 11 * fewest)
        got = choose_heads(WIDE, plan, 3, 2 * group, 2, seq_q)
        assert got.heads == want, seq_q
        if want > 1:
            saved = f"of {group} that share K and V: {tiles[want]:,} tiles instead of {tiles[1]:,}"
            assert got.reason == saved
        elif able == [1] and group > 1:
            assert f"no power of two that divides {group} can share" in got.reason
        else:
            assert got.reason == ""
        taken.add(want)
    assert taken == set(able)


def test_a_given_tile_that_heads_cannot_share_has_one_head_and_a_derived_one_is_replaced() -> None:
    plan = fg.plan(CAUSAL, ARCH)
    assert plan.block_q == 192
    got = choose_heads(CAUSAL, replace(plan, policy="given"), 1, 8, 1, 1)
    assert got.heads == 1
    assert "divides 8 can share a tile of 192 rows" in got.reason
    got = choose_heads(CAUSAL, plan, 1, 8, 1, 1)
    assert got.heads == 8
    assert got.reason.endswith("1 tile of 128 rows instead of 8 of 192")
    assert fg.plan(CAUSAL, ARCH, heads_per_tile=8).block_q == 128


def test_the_plan_prints_the_heads_and_rows_of_a_tile() -> None:
    plan = fg.plan(WIDE, ARCH, heads_per_tile=4)
    alone = fg.plan(WIDE, ARCH)
    assert plan.tile == alone.tile
    assert plan.queries_per_tile == 32
    assert plan.grid(3, 8, 2, 65, 70) == (3, 2, 3)
    assert str(plan).startswith("plan      block_q 128  heads_per_tile 4  block_k")
    assert "query heads that share K and V, 32 queries of each = 128 rows" in str(plan)
    assert "heads_per_tile" not in str(alone)


def test_heads_that_share_a_tile_count_once_among_interleaved_heads() -> None:
    one, four = (fg.plan(CAUSAL, ARCH, heads_per_tile=n) for n in (1, 4))
    # K and V of all 16 heads fit in L2, of 8, and of 2; four query heads read each of them.
    for seq_k, bits in ((1024, 6), (1 << 14, 5), (1 << 16, 3)):
        sizes = 64, 16, 64, seq_k
        assert head_bits(one, *sizes) == bits
        assert head_bits(four, *sizes) == bits - 2
        assert four.grid(2, *sizes, head_bits=bits - 2) == (2 << bits - 2, 16 >> bits - 2, 2)


def test_a_larger_tile_that_the_heads_cannot_share_is_refused_with_that_reason() -> None:
    # 192 rows would be 48 queries of each: three of them in a box of 64 rows are no whole number.
    spec = CAUSAL.replace(head_dim=32, head_dim_v=32)
    wide = next(plan for plan in feasible(spec, ARCH) if plan.block_q == 192)
    assert fg.plan(spec, ARCH, tile=wide.tile).block_q == 192
    with pytest.raises(PlanError, match="boxes of Q per warpgroup: 4 against 1"):
        fg.plan(spec, ARCH, tile=wide.tile, heads_per_tile=4)
    with pytest.raises(PlanError, match="heads per warp: 2 against 1"):
        fg.plan(spec, ARCH, tile=wide.tile, heads_per_tile=8)
    shared = fg.plan(spec, ARCH, tile=wide.tile, heads_per_tile=6)
    assert shared.queries_per_tile == 32


@pytest.mark.parametrize(
    ("changes", "arch", "heads", "why"),
    [
        ({}, "sm_80", 2, "path sm_80 have tiles of one head"),
        ({"dtype": "float32"}, ARCH, 2, "path sm_80 have tiles of one head"),
        ({}, ARCH, 16, "no tile has 16, 32 or a multiple of 64 rows"),
        ({}, ARCH, 5, "no tile has 16, 32 or a multiple of 64 rows"),
        ({}, ARCH, 0, "it is a number of query heads"),
        ({}, ARCH, 2.0, "it is a number of query heads"),
        ({}, ARCH, True, "it is a number of query heads"),
        ({"packed": True}, ARCH, 2, "each packed sequence starts a new tile"),
        ({"mask_mod": lambda b, h, q, k: k < h}, ARCH, 2, "the mask depends on the head"),
    ],
)
def test_heads_that_cannot_share_a_tile_are_refused(
    changes: dict[str, Any], arch: str, heads: Any, why: str
) -> None:
    with pytest.raises(PlanError, match=why):
        fg.plan(CAUSAL.replace(**changes), arch, heads_per_tile=heads)


def test_traffic_of_heads_that_do_not_share_k_and_v_is_refused() -> None:
    plan = fg.plan(CAUSAL, ARCH, heads_per_tile=4)
    with pytest.raises(ValueError, match="6 heads, 2 of K and V"):
        forward_traffic(plan, 1, 6, 2, 10, 10)


# ---- what is emitted ----------------------------------------------------------------------------


def test_the_emitted_file_has_its_arguments_and_lines_within_100_columns() -> None:
    spec = fg.AttentionSpec(
        lambda b, h, q, k: k <= q,
        lambda score, b, h, q, k: score + h * (k - q),
        head_dim=64,
        sink=True,
        dropout=True,
        name="all_that_reads_the_head",
    )
    source = fg.emit(spec, ARCH, heads_per_tile=8).forward
    assert source.name == "all_that_reads_the_head_forward_fp16_d64_heads8"
    assert max(map(len, source.text.splitlines())) <= 100
    again = 'flashgen.emit(spec, arch="sm_90a", heads_per_tile=8)'
    assert again in source.text
    assert eval(again, {"flashgen": fg, "spec": spec}).forward.text == source.text
    assert "tiles     (ceil(seq_q / 16), heads_q / 8, batch)" in source.text
    # What computes takes the head of its rows: h is that of the block's first rows.
    computing = source.text.partition("  // 5. This lane's elements")[2].splitlines()
    read = [line.split("//")[0].strip() for line in computing if re.search(r"\bh\b", line)]
    assert read == [
        "h + 64 * group / TILE_QUERIES, b);",
        "const int head = h + first_row / TILE_QUERIES;",
        "h + 64 * group / TILE_QUERIES, b);",
    ]


@pytest.mark.parametrize(
    ("name", "head_dim", "heads"),
    [
        ("causal", 64, 8),
        *(
            pytest.param(name, head_dim, heads, marks=pytest.mark.slow)
            for name in ("causal", "full", "alibi", "sink", "document", "softcap", "bigbird")
            for head_dim in (64, 128, 256)
            for heads in (2, 4, 8)
        ),
    ],
)
@pytest.mark.parametrize("dropout", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_kernel_spills(name: str, head_dim: int, heads: int, dropout: bool) -> None:
    spec = loaded(name).replace(head_dim=head_dim, head_dim_v=head_dim, dropout=dropout)
    built = fg.build(spec, ARCH, heads_per_tile=heads)
    assert built.plan.heads_per_tile == heads
    # Nor does finding the head of a row cost the tile much. Beside dropout the first plan spills a
    # few bytes, and the one that does not has as little as half of the keys: see NOTES.md.
    share = 0.5 if dropout else 0.8
    assert built.plan.block_k >= share * fg.build(spec, ARCH).plan.block_k
    assert built.binary.resources.clean
    assert built.binary.warnings == ()


# ---- what is moved ------------------------------------------------------------------------------

SIZES = (1, 4, 1, 17, 300)


def bytes_of(spec: fg.AttentionSpec, **options: Any) -> tuple[Plan, dict[str, int]]:
    """Counted, where they are as the plan predicts them."""
    _, (profile,) = profile_forward(spec, *random_operands(spec, SIZES), arch=ARCH, **options)
    for tensor in profile.tensors:
        if "_row_" not in tensor.name:  # the lists of a layout, of which Hopper's plan says nothing
            assert tensor.issued.counted == tensor.issued.predicted, tensor.name
    assert all(each.ratio == 1 for each in profile.work if each.name == "multiply-adds")
    return profile.plan, {tensor.name: tensor.issued.counted for tensor in profile.tensors}


def test_k_and_v_are_loaded_once_for_all_heads_of_a_tile_as_the_plan_predicts() -> None:
    spec = loaded("full")
    plan, moved = bytes_of(spec)
    assert plan.heads_per_tile == 4
    batch, heads_q, heads_kv, seq_q, seq_k = SIZES
    once = batch * heads_kv * seq_k * spec.head_dim * 2
    assert moved["k"] == moved["v"] == once
    alone = forward(spec, (batch, heads_q, heads_q, seq_q, seq_k), ARCH)
    assert alone.plan.heads_per_tile == 1
    of_alone = {tensor.name: tensor.issued.counted for tensor in alone.tensors}
    assert of_alone["k"] == of_alone["v"] == 4 * once
    for name in ("q", "o", "lse"):
        assert moved[name] == of_alone[name], name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("causal", {"q_offset": 250}),
        ("causal", {"q_offset": 250, "dropout_p": 0.1, "rng": torch.tensor([7, 3])}),
        ("sliding_window", {"q_offset": 200, "scalars": {"window": 70}}),
        ("sink", {"tensors": {"sink": torch.linspace(-1, 1, 4)}}),
        ("local_global", {}),
    ],
)
def test_predicted_bytes_are_exact_for_specs_that_read_the_head_or_skip_tiles(
    name: str, options: dict[str, Any]
) -> None:
    spec = loaded(name).replace(dropout="dropout_p" in options)
    plan, _ = bytes_of(spec, **options)
    assert plan.heads_per_tile == 4


# ---- commands -----------------------------------------------------------------------------------


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


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
    shape = ("--shape", "2,8,2,5,1000")
    text = said("plan", "specs/causal.py", "--arch", ARCH, *shape)
    assert (
        "heads_per_tile 4 of 4 that share K and V: 4 tiles of 128 rows instead of 16 of 192" in text
    )
    assert "plan block_q 128 heads_per_tile 4 block_k" in text
    assert "tiles 4 for 4 blocks" in text
    assert "makespan*slots/(steps + begun*work_tiles) = 2.253*132/(4 + 1.253*4)" in text
    assert "heads_per_tile" not in said("plan", "specs/causal.py", *shape)
