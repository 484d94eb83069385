"""Query heads that share K and V share a tile of the forward kernel where that fills it.

With K and V repeated for every query head, no heads share them: the same call then has a tile for
each head, and must give the same results. `make test` has a case of each kind; every spec, and all
pairs of heads and lengths, are `slow`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.calls.runtime.block_layouts import with_layout
from flashgen.kernels.pipeline import build
from flashgen.kernels.planner import feasible
from flashgen.kernels.planner.search import obstacles_to_sharing
from flashgen.spec.language.signature import partial, signature_of, split
from tests.kernels.test_packed import ends, spec_of
from tests.support.examples import SPECS, spec_path, values_of
from tests.support.judged import Call, check_gates, dropping, example, sized
from tests.support.planted import planted
from tests.support.profiles import loaded
from tests.support.shapes import Case
from tests.support.sparse_layouts import random_layout
from tests.support.tiers import case_id, every_share, slow, take_turns

ARCH = "sm_90a"
ARCHS = ("sm_80", ARCH)
CAUSAL = fg.load(spec_path("causal"))
WIDE = CAUSAL.replace(head_dim=192)  # its tile has 128 rows, which heads can share
HOW: dict[str, Any] = {"backend": "emulator", "arch": ARCH}

# Of these specs the keys that a query keeps depend on its head.
BY_HEAD = ("per_head_window", "block_sparse")


def judged(call: Call, heads: int | None) -> None:
    """A call with so many heads per tile, or None: right, and the same bits as with one."""
    run = call.judged_forward(split_size=0)
    assert run.plan is not None
    assert heads is None or run.plan.heads_per_tile == heads
    check_gates(run.report.kernel)
    q, k, v = call.qkv
    repeated = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    alone = Call(call.spec, (q, *repeated), call.numbers, **call.how)
    other = alone.forward(tiles={"forward": run.plan.tile})
    assert other.plan is not None
    assert other.plan.heads_per_tile == 1
    # Where blocks are gathered, the bits of a row depend on the other rows of its tile.
    if not run.plan.gathers:
        assert torch.equal(run.lse, other.lse)
        assert torch.equal(run.out, other.out)


def of_file(
    name: str,
    case: Case,
    heads: int | None,
    dropout_p: float = 0.0,
    q_offset: int = 0,
    arch: str = ARCH,
) -> None:
    judged(example(spec_path(name), case, dropout_p, {"q_offset": q_offset}, arch=arch), heads)


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "heads", "dropout_p", "q_offset", "arch"),
    [
        # A few new queries behind a cache of keys.
        ("causal", Case(5, 300, 1, 8, 1), 8, 0.0, 295, "sm_90a"),
        ("causal", Case(5, 300, 1, 8, 1), 8, 0.0, 295, "sm_80"),
        # What reads the head: the score, random bits; the sink, where tiles of heads take turns.
        ("alibi", Case(9, 90, 2, 8, 1), 8, 0.17, 64, "sm_80"),
        (
            *("alibi", Case(64, 128, 1, 4, 2, "bfloat16", 16, None, "sequence_major")),
            *(2, 0.17, 0, "sm_90a"),
        ),
        ("alibi", Case(30, 128, 1, 8, 2, "bfloat16", 40, 96, "gaps"), 4, 0.17, 0, "sm_80"),
        *(
            ("sink", Case(70, 90, 1, 8, 2, "float16", 64, None, "gaps"), 4, 0.0, 0, arch)
            for arch in ARCHS
        ),
        ("sink", Case(7, 90, 2, 8, 1, "bfloat16"), 8, 0.0, 0, "sm_80"),
        ("relative_bias", Case(9, 90, 1, 8, 1), 8, 0.17, 64, "sm_80"),
        # The batch entry's own keys, skipped by tables; a layout that all heads have.
        *(
            ("document", Case(1, 239, 3, 4, 1, "float16", 64, 24), 4, 0.0, 0, arch)
            for arch in ARCHS
        ),
        *(("local_global", Case(20, 203, 1, 8, 1), 4, 0.0, 150, arch) for arch in ARCHS),
        # float32 has the kernels of sm_80 on every GPU.
        ("alibi", Case(9, 60, 1, 4, 1, "float32"), 4, 0.0, 50, "sm_80"),
        ("causal", Case(9, 60, 1, 8, 1, "float32", 16), 8, 0.1, 32, "sm_90a"),
    ],
)
def test_heads_that_share_a_tile_give_the_results_of_separate_tiles(
    name: str, case: Case, heads: int, dropout_p: float, q_offset: int, arch: str
) -> None:
    of_file(name, case, heads, dropout_p, q_offset, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_unaligned_tensors_are_shared_too(arch: str) -> None:
    call = example(spec_path("causal"), Case(5, 90, 1, 8, 1), offsets={"q_offset": 85}, arch=arch)
    flat = torch.zeros(call.qkv[0].numel() + 1, dtype=torch.float16)
    q = flat[1:].view_as(call.qkv[0])
    q.copy_(call.qkv[0])
    call.qkv = (q, *call.qkv[1:])
    judged(call, 8)
    run = call.forward()
    assert run.plan is not None
    assert run.plan.access_bytes == 2


SHORT, LONG = ([1, 3, 0, 20, 1, 2], [90, 30, 5, 150, 0, 2]), ([17, 140, 5, 1], [39, 40, 6, 7])


@pytest.mark.parametrize(
    ("mods", "lengths", "heads", "options", "arch"),
    [
        slow("bottom_right", SHORT, 4, {}, "sm_80"),
        slow("bottom_right", SHORT, 4, {}, "sm_90a"),
        *(slow("biased", LONG, 8, {"sink": True}, arch) for arch in ARCHS),
        *(slow("same_part", LONG, 2, {"dropout": True}, arch) for arch in ARCHS),
        slow("full", SHORT, 4, {"dtype": "float32", "sink": True}, "sm_90a"),
        slow("full", SHORT, 8, {"dtype": "bfloat16", "sink": True}, "sm_90a"),
    ],
)
def test_heads_share_the_tiles_of_each_packed_sequence(
    mods: str, lengths: tuple[list[int], list[int]], heads: int, options: Any, arch: str
) -> None:
    spec = spec_of(mods, **{"head_dim": 64} | options)
    of_q, of_k = lengths
    case = Case(sum(of_q), sum(of_k), 1, 2 * heads, 2, spec.dtype)
    values = torch.Generator().manual_seed(3)
    known = {
        "cu_seqlens_q": ends(of_q),
        "cu_seqlens_k": ends(of_k),
        "ids": torch.randint(3, (len(of_q), 160), generator=values, dtype=torch.int32).sort(1)[0],
        "gate": torch.rand(len(of_q), 2 * heads, generator=values) + 0.5,
        "bias": torch.randn(200, generator=values),
        "sink": torch.randn(2 * heads, generator=values),
    }
    numbers = {"tensors": {tensor.name: known[tensor.name] for tensor in spec.tensors}}
    if spec.dropout:
        numbers |= dropping(0.3)
    judged(Call(spec, case.tensors(), numbers, arch=arch), heads)


@pytest.mark.parametrize(
    ("old", "new", "after"),
    [
        ("+ head * head_step", "", ""),
        slow("score_head_values(p, row_head)", "score_head_values(p, head)", ""),
        slow("of_head.pair += g;", "", ""),
        slow("n * p.o_stride_h", "0", ""),
        slow("row_head = head + g", "row_head = head", "Divide by the row sums"),
        slow("head = h + warp_row / TILE_QUERIES", "head = h", "lane's elements"),
        slow("h = HEADS_PER_TILE *", "h =", ""),
    ],
)
def test_a_head_that_is_computed_as_another_one_is_seen(old: str, new: str, after: str) -> None:
    """Each is a place of the sm_80 kernel that reads the head of a row group."""
    call = example(spec_path("alibi"), Case(16, 90, 1, 16, 2), 0.17, {"q_offset": 64}, arch="sm_80")
    tile = fg.plan(call.spec, "sm_80").tile
    assert fg.plan(call.spec, "sm_80", tile=tile, heads_per_tile=8).heads_per_lane == 2
    with planted("forward", old, new, after), pytest.raises((AssertionError, fg.EmulatorError)):
        call.judged_forward(tiles={"forward": tile})


NAMES = [("causal", 0.0), ("alibi", 0.17), ("sink", 0.0), ("document", 0.0), ("bigbird", 0.1)]
NUMBERS = [(8, 1), (8, 4), (4, 2), (6, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "numbers", "seq_q", "arch"), take_turns(NAMES, NUMBERS, (1, 5, 17, 64, 130), ARCHS)
)
def test_shared_tiles_give_those_results_for_all_heads_and_lengths(
    named: tuple[str, float], numbers: tuple[int, int], seq_q: int, arch: str
) -> None:
    (name, dropout_p), (heads_q, heads_kv) = named, numbers
    turn = seq_q + heads_q
    dtype, layout = ("float16", "bfloat16")[turn % 2], ("sequence_major", "gaps")[turn // 2 % 2]
    case = Case(seq_q, 203, 2, heads_q, heads_kv, dtype, (64, 128, 256)[turn % 3], None, layout)
    heads = {1: 8, 5: 8, 17: 4, 64: 2, 130: 8}[seq_q] if heads_q == 8 * heads_kv else 2
    # Where a tile of one head has 192 rows, it holds 130 queries, and two heads need not share one.
    alone = fg.plan(example(spec_path(name), case, dropout_p).spec, arch)
    holds_all = seq_q == 130 and alone.block_q == 192 and heads == 2
    # A layout is gathered for the rows of a tile, whose number decides.
    some = None if holds_all or arch == "sm_80" or name == "bigbird" else heads
    of_file(name, case, some, dropout_p, (203 - seq_q) // 16 * 16, arch)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "seq_q", "arch"), take_turns(SPECS, (3, 50), ARCHS), ids=case_id)
def test_shared_tiles_give_those_results_for_every_spec(path: Path, seq_q: int, arch: str) -> None:
    case = Case(seq_q, 330, 2, 8, 2, "float16", (64, 96)[seq_q % 2])
    spec = sized(fg.load(path), case)
    heads = 1 if path.stem in BY_HEAD else {3: 4, 50: 2}[seq_q]
    if seq_q > 32 and fg.plan(spec, arch).block_q == 64:  # which holds 50 queries of one head
        heads = 1
    of_file(path.stem, case, None if spec.packed else heads, arch=arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [8, 40, 104, 192, 248])
@pytest.mark.parametrize("seq_q", [16, 30])
def test_shared_tiles_give_those_results_at_padded_head_dims(
    head_dim: int, seq_q: int, arch: str
) -> None:
    case = Case(seq_q, 150, 1, 8, 1, "float16", head_dim, None, "gaps")
    heads = 8 if seq_q == 16 else 4
    of_file("causal", case, heads if arch == ARCH else None, q_offset=100, arch=arch)


@every_share
@pytest.mark.slow
def test_calls_with_as_many_heads_per_tile_share_a_kernel() -> None:
    runs = [run_forward(CAUSAL, *Case(n, 40, 1, 4, 1).tensors(), **HOW) for n in (1, 9, 130)]
    made = [run.report.kernel for run in runs]
    assert made[0] is made[1]
    # 130 queries of four heads: ceil(130 / 32) = 5 tiles of 128 rows, or 4 of 192.
    assert made[2] is made[0]
    assert "5 tiles of 128 rows instead of 4 of 192" in runs[2].report.heads_reason


@every_share
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "arch"), [(64, ARCH), (128, ARCH), (64, "sm_80"), (256, "sm_80")]
)
def test_the_bits_do_not_depend_on_the_order_of_warps_and_copies(head_dim: int, arch: str) -> None:
    spec, how = CAUSAL.replace(head_dim=head_dim, head_dim_v=head_dim), HOW | {"arch": arch}
    q, k, v = Case(20, 500, 1, 4, 1, "float16", head_dim).tensors(seed=1)
    plain = run_forward(spec, q, k, v, q_offset=400, **how)
    shuffled = run_forward(spec, q, k, v, q_offset=400, order_seed=3, **how)
    assert plain.plan is not None
    assert plain.plan.heads_per_tile == 4
    assert torch.equal(plain.out, shuffled.out)
    assert torch.equal(plain.lse, shuffled.lse)


# ---- where heads do not share a tile, and why ---------------------------------------------------


@every_share
@pytest.mark.slow
def test_a_mask_that_depends_on_the_head_has_a_tile_for_each_head_and_the_reason() -> None:
    path, case = spec_path("per_head_window"), Case(5, 90, 1, 4, 1)
    run = run_forward(fg.load(path), *case.tensors(), **values_of(path, case), **HOW)
    assert run.plan is not None
    assert run.plan.heads_per_tile == 1
    assert run.report.heads_reason == "of 4 that share K and V: the mask depends on the head"


@every_share
@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 4])
def test_a_layout_is_shared_where_it_is_the_same_for_all_heads(lines: int) -> None:
    spec, case = loaded("block_sparse"), Case(40, 150, 1, 4, 1)
    live = random_layout(spec, (1, lines), (40, 150), 0.5, seed=1)
    tensors = dict(with_layout(signature_of(spec), {"layout": live}))
    if lines == 1:
        judged(
            Call(spec, case.tensors(), {"tensors": tensors}, arch=ARCH),
            4 if ARCH == "sm_90a" else 2,
        )
        return
    run = run_forward(spec, *case.tensors(), tensors=tensors, **HOW)
    assert run.plan is not None
    assert run.plan.heads_per_tile == 1
    assert "the block layout depends on the head" in run.report.heads_reason


@every_share
@pytest.mark.slow
def test_a_layout_by_head_that_is_a_function_is_not_shared() -> None:
    sparse = fg.BlockSparse(lambda b, h, i, j: (i + j + h) % 2 == 0)
    spec = fg.AttentionSpec(block_sparse=sparse, head_dim=16, name="by_head")
    run = run_forward(spec, *Case(5, 150, 1, 4, 1, head_dim=16).tensors(), **HOW)
    assert run.plan is not None
    assert run.plan.heads_per_tile == 1
    assert "the block layout depends on the head" in run.report.heads_reason


# ---- what is emitted ----------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_emitted_file_has_its_arguments_and_lines_within_100_columns(
    arch: str, heads: int
) -> None:
    spec = fg.AttentionSpec(
        lambda b, h, q, k: k <= q,
        lambda score, b, h, q, k: score + h * (k - q),
        head_dim=64,
        sink=True,
        dropout=True,
        name="all_that_reads_the_head",
    )
    source = fg.emit(spec, arch, heads_per_tile=heads).forward
    assert source.name == f"all_that_reads_the_head_forward_fp16_d64_heads{heads}"
    for text in (source.text, fg.emit(partial(spec), arch, heads_per_tile=heads).forward.text):
        assert max(map(len, text.splitlines())) <= 100
    again = f'flashgen.emit(spec, arch="{arch}", heads_per_tile={heads})'
    assert again in source.text
    assert eval(again, {"flashgen": fg, "spec": spec}).forward.text == source.text
    launch = "tiles    " if arch == ARCH else "launch    grid"
    assert f"{launch} (ceil(seq_q / {128 // heads}), heads_q / {heads}, batch)" in source.text
    # What computes takes the head of its rows: h is that of the block's first rows.
    computing = source.text.partition("This lane's elements")[2].splitlines()
    read = [line.split("//")[0].strip() for line in computing if re.search(r"\bh\b", line)]
    first_row = "first_row" if arch == ARCH else "warp_row"
    again_by_row = [
        "const int head = h + (thread / 32 * 16 * ROW_GROUPS + thread % 32 / 4) / TILE_QUERIES;",
        "const int first_head = h + warp_row / TILE_QUERIES;",
    ]
    by_row = arch == "sm_80" and heads == 8
    assert read == [f"const int head = h + {first_row} / TILE_QUERIES;", *(again_by_row * by_row)]


def shared_tiles(axis: Iterable[Any], *numbers: int) -> list[Any]:
    """Name of a spec, head dim, architecture, a value of the axis and, in turns, heads per tile."""
    names = ("causal", "full", "alibi", "sink", "document", "softcap", "bigbird")
    return [slow(*each) for each in take_turns(names, (64, 128, 256), ARCHS, axis, numbers)]


@pytest.mark.parametrize(
    ("name", "head_dim", "arch", "dropout", "heads"),
    [
        *shared_tiles((False, True), 2, 4, 8),
        *(
            slow(name, head_dim, "sm_80", dropout, 8)
            for name in ("relative_bias", "t5_bias")
            for head_dim, dropout in ((64, False), (64, True), (128, False), (128, True))
        ),
    ],
)
def test_no_kernel_spills(name: str, head_dim: int, arch: str, dropout: bool, heads: int) -> None:
    spec = loaded(name).replace(head_dim=head_dim, head_dim_v=head_dim, dropout=dropout)
    built = fg.build(spec, arch, heads_per_tile=heads)
    assert built.plan.heads_per_tile == heads
    # Nor does finding the head of a row cost much, such as a tile that avoids spills, beside the
    # tile of one head, or the best one whose number of rows these heads can share.
    alone = next(
        plan
        for plan in feasible(spec, arch)
        if not any(obstacles_to_sharing(plan.code_path, plan.block_q, heads, dropout=dropout))
    )
    assert built.plan.cost <= 1.15 * max(alone.cost, fg.build(spec, arch).plan.cost)
    assert built.binary.resources.clean
    assert built.binary.warnings == ()


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim"),
    [
        *(
            slow(name, dtype, head_dim)
            for name in ("causal", "alibi", "relative_bias", "softcap", "document")
            for dtype in ("float16", "float32")
            for head_dim in (64, 128, 256)
        ),
    ],
)
@pytest.mark.parametrize("access_bytes", [16, None])
def test_the_tile_of_split_keys_spills_for_no_number_of_heads(
    name: str, dtype: str, head_dim: int, access_bytes: int | None
) -> None:
    spec = split(loaded(name).replace(head_dim=head_dim, head_dim_v=head_dim, dtype=dtype))
    access_bytes = access_bytes or {"float16": 2, "float32": 4}[dtype]
    one = build(spec, "sm_80", access_bytes=access_bytes)
    for heads in (2, 4, 8):
        if one.plan.block_q % (16 * heads) == 0:
            made = build(
                spec,
                "sm_80",
                access_bytes=access_bytes,
                tile=one.plan.tile,
                heads_per_tile=heads,
            )
            assert made.binary.resources.clean
            assert made.binary.warnings == ()
