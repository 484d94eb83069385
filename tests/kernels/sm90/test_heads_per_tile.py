"""Query heads that share K and V share a tile of Hopper's forward kernel where that fills it.

With K and V repeated for every query head, no heads share them: the same call then has a tile for
each head, and must give the same results. `make test` has a case of each kind; every spec, and all
pairs of heads and lengths, are `slow`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.language.signature import signature_of
from flashgen.ops import run_forward
from flashgen.runtime.block_layouts import with_layout
from tests.support.examples import SPEC_IDS, SPECS, spec_path, values_of
from tests.support.judged import Call, check_gates, example
from tests.support.profiles import loaded
from tests.support.shapes import Case
from tests.support.sparse_layouts import random_layout

ARCH = "sm_90a"
CAUSAL = fg.load(spec_path("causal"))
WIDE = CAUSAL.replace(head_dim=128)  # its tile has 128 rows, which heads can share
HOW: dict[str, Any] = {"backend": "emulator", "arch": ARCH}

# Of these specs the keys that a query keeps depend on its head.
BY_HEAD = ("per_head_window", "block_sparse")


def judged(call: Call, heads: int | None) -> None:
    """A call with so many heads per tile, or None: right, and the same bits as with one."""
    run = call.judged_forward()
    assert run.plan is not None
    assert heads is None or run.plan.heads_per_tile == heads
    check_gates(run.report.kernel)
    q, k, v = call.qkv
    repeated = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    alone = Call(call.spec, (q, *repeated), call.numbers, arch=ARCH)
    other = alone.forward(tiles={"forward": run.plan.tile})
    assert other.plan is not None
    assert other.plan.heads_per_tile == 1
    assert torch.equal(run.lse, other.lse)
    assert torch.equal(run.out, other.out)


def of_file(
    name: str, case: Case, heads: int | None, dropout_p: float = 0.0, q_offset: int = 0
) -> None:
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
    # Where a tile of one head has 192 rows, it holds 130 queries, and two heads need not share one.
    holds_all = seq_q == 130 and case.head_dim == 64 and heads == 2
    of_file(name, case, None if holds_all else heads, dropout_p, q_offset=(203 - seq_q) // 16 * 16)


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


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 4])
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


@pytest.mark.slow
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
    assert read == ["const int head = h + first_row / TILE_QUERIES;"]


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
