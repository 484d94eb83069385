"""Kernels whose blocks have runs of splits of their rows, or all: the bits of single splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.calls.runtime.programs import SpecProgram
from flashgen.kernels.planner import plan, run_of_splits
from flashgen.shared.call import CheckedCall
from flashgen.shared.paths import PATHS
from flashgen.shared.signature import SPLIT
from flashgen.shared.split_choice import ALL_SPLITS, RUNS
from flashgen.spec.language.signature import folded, in_runs, returning_maxima, split
from tests.support.masks import causal
from tests.support.planted import planted
from tests.support.tiers import one_in, slow

Tensor = torch.Tensor

SIZE = 16  # keys of a split
INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def window(b, h, q, k):  # type: ignore[no-untyped-def]
    return (k <= q) & (q - k < 40)


def outside(b, h, q, k):  # type: ignore[no-untyped-def]
    return (k > q + 10) & (q % 7 != 0)


def capped(s, b, h, q, k):  # type: ignore[no-untyped-def]
    return 20 * fg.tanh(s / 20) + 0.5


def alibi(s, b, h, q, k):  # type: ignore[no-untyped-def]
    return s - (q - k) * 0.125 + fg.maximum(h - 1, 0) * 0.5


def squares(s, b, h, q, k):  # type: ignore[no-untyped-def]
    return s * s


ROW_SINK = fg.Tensor("aside", ("batch", "heads", "seq_q"), dtype="float32")
BLOCKS = fg.BlockSparse(lambda row, column: (row + column) % 3 != 1, 32, 32)


def spec(*mods: Any, **options: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(*mods, name="of_fold", **({"head_dim": 32} | options))


CASES = {
    "causal": (spec(causal), {}),
    "window": (spec(window, dtype="bfloat16"), {}),
    "full": (spec(), {"k_offset": 13}),
    "rows without keys": (spec(outside), {}),
    "softcap, sink": (spec(window, capped, sink=True), {}),
    "sinks of rows": (spec(causal, sink=ROW_SINK), {"q_offset": 5}),
    "alibi": (spec(causal, alibi, dtype="bfloat16"), {}),
    "dropout": (spec(causal, dropout=True), {"dropout_p": 0.25}),
    "sums": (spec(causal, weight_mod=squares, normalize="sum"), {}),
    "not divided": (spec(window, weight_mod=squares, normalize="none"), {}),
    "layout": (spec(block_sparse=BLOCKS), {}),
    "wide v": (spec(causal, head_dim=16, head_dim_v=80), {}),
    "float32": (spec(causal, capped, dtype="float32", sink=True), {}),
    "float32, dropout": (spec(causal, dtype="float32", dropout=True), {"dropout_p": 0.25}),
    "maxima": (returning_maxima(spec(outside, alibi)), {}),
    "few rows": (spec(causal), {"q_offset": 140, "rows": 3}),
}
SHAPES = [(2, 4, 2, 150, 143), (1, 2, 2, 65, 97)]
FAST = [(*case, (1, 2, 1, 33, 97)) for case in (("causal", "sm_80"), ("softcap, sink", "sm_90a"))]


def compared(
    given: fg.AttentionSpec,
    qkv: tuple[Tensor, ...],
    monkeypatch: pytest.MonkeyPatch,
    runs: Sequence[int] = (*RUNS, ALL_SPLITS),
    **how: Any,
) -> tuple[Any, ...]:
    """The results of a call whose blocks have one run or another of splits, which are compared."""
    found = []
    for run in runs:
        monkeypatch.setattr(SpecProgram, "run_of", lambda *_, run=run: run)
        found.append(run_forward(given, *qkv, split_size=SIZE, backend="emulator", **how))
    first = found[0]
    assert not first.out.isnan().any()
    for run, each in zip(runs, found, strict=True):
        assert (each.report.merge is None) == (run == ALL_SPLITS)
        kind = "split" if run == 1 else "runs" if run else "folded"
        assert f"_{kind}_" in each.report.kernel.source.name
        assert torch.equal(each.lse, first.lse)
        bits = INTEGERS[each.out.dtype]
        assert torch.equal(each.out.view(bits), first.out.view(bits))
    return tuple(found)


def drawn(of: fg.AttentionSpec, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that grow along the keys, so that later splits rescale earlier ones."""
    batch, heads, heads_kv, rows, keys = shape
    generator = torch.Generator().manual_seed(rows)
    sizes = [
        (heads, rows, of.head_dim),
        (heads_kv, keys, of.head_dim),
        (heads_kv, keys, of.head_dim_v),
    ]
    q, k, v = (torch.randn(batch, *each, generator=generator) for each in sizes)
    k[..., 0] = torch.linspace(0, 30, keys)
    q[:, :, ::2, 0] = 8
    if of.shared_kv:
        v = k[..., : of.head_dim_v]
    return tuple(x.to(getattr(torch, of.dtype)) for x in (q, k, v))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "arch", "shape"),
    [*FAST, *(slow(*case) for case in product(CASES, PATHS, SHAPES))],
)
def test_runs_of_splits_have_the_bits_of_parts_of_one(
    name: str, arch: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, how = CASES[name]
    how = dict(how)
    batch, heads, heads_kv, rows, keys = shape
    rows = how.pop("rows", rows)
    tensors = {}
    if of.sink is not None:
        sinks = torch.linspace(-1, 3, batch * heads * rows)
        by_row = of.sink.name == "aside"
        tensors[of.sink.name] = sinks.reshape(batch, heads, rows) if by_row else sinks[:heads]
    if of.dropout:
        how["rng"] = torch.tensor([3, 5])
    qkv = drawn(of, (batch, heads, heads_kv, rows, keys))
    if of.sink is not None and of.sink.name == "aside":
        how["q_offset"] = 0  # of the rows that the sinks have
    compared(of, qkv, monkeypatch, arch=arch, tensors=tensors, **how)


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ((64, 64), (1, 2, 1, 65, 97)),
        slow((576, 512), (1, 16, 1, 2, 97)),
        slow((576, 512), (2, 3, 1, 30, 70)),
    ],
)
@pytest.mark.parametrize("arch", one_in(2, PATHS))
def test_values_inside_keys_have_these_bits_whatever_warps_share_their_columns(
    arch: str, dims: tuple[int, int], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = spec(causal, head_dim=dims[0], head_dim_v=dims[1], shared_kv=True, dtype="bfloat16")
    how = {"arch": arch, "q_offset": shape[4] - shape[3]}
    parts, *_ = compared(of, drawn(of, shape), monkeypatch, **how)
    assert (parts.report.kernel.plan.column_warps > 1) == (dims[1] == 512)


@pytest.mark.parametrize(("arch", "paged"), one_in(4, product(PATHS, (True, False))))
def test_packed_rows_over_sequences_and_pages_have_these_bits(
    arch: str, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, counts = (70, 5, 101), (40, 5, 101)
    base = spec(window, capped, sink=True)
    q, k, v = drawn(base, (1, 4, 2, sum(counts), sum(lengths)))
    ends = [torch.tensor([0, *each]).cumsum(0).int() for each in (counts, lengths)]
    tensors = {"sink": torch.linspace(-1, 2, 4), "cu_seqlens_q": ends[0]}
    if not paged:
        tensors["cu_seqlens_k"] = ends[1]
        compared(base.replace(packed=True), (q, k, v), monkeypatch, arch=arch, tensors=tensors)
        return
    table = torch.full((3, 8), -1, dtype=torch.int32)
    caches = [torch.full((20, 2, 16, 32), math.nan, dtype=q.dtype) for _ in "kv"]
    order = iter(torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist())
    for b, (first, last) in enumerate(zip(ends[1], ends[1][1:], strict=False)):
        for page in range(-(-int(last - first) // 16)):
            number = table[b, page] = next(order)
            for cache, x in zip(caches, (k, v), strict=True):
                part = x[0, :, int(first) + 16 * page : min(int(first) + 16 * page + 16, int(last))]
                cache[number, :, : part.shape[1]] = part
    tensors |= {"page_table": table, "cache_seqlens": torch.tensor(lengths).int()}
    compared(base.replace(paged=True), (q, *caches), monkeypatch, arch=arch, tensors=tensors)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("entries |= 1u << number;", ""),
        ("lse = top;", ""),
        ("fmaf(before[2 * r + 1], factor[r], weight[r])", "before[2 * r + 1] + weight[r]"),
        ("x = join(left[e],", "join(left[e],"),
        ("place & ~(place + 1)", "place"),
        ("stored = entries >> number & 1;", "stored = true;"),
        ("    ++number;", "    number += 2;"),
    ],
)
def test_bugs_of_joining_are_seen(
    old: str, new: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten split, an earlier maximum, sums with another scale, a result that is lost, pairs
    of splits that are no neighbours, memory that is read before it is written, a level left out."""
    of = CASES["causal"][0]
    monkeypatch.setattr(SpecProgram, "run_of", lambda *_: ALL_SPLITS)
    qkv = drawn(of, SHAPES[0])
    how = {"split_size": SIZE, "backend": "emulator", "arch": arch}
    expected = run_forward(of, *qkv, **how)
    try:
        with planted("forward", old, new):
            found = run_forward(of, *qkv, **how)
    except fg.EmulatorError:  # memory that nothing has written
        return
    assert not (torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse))


@pytest.mark.parametrize("arch", PATHS)
def test_the_tile_is_that_of_parts(arch: str) -> None:
    """The bits of a row depend on the keys of a tile."""
    for of, _ in CASES.values():
        if of.dtype != "float32" or arch == "sm_80":
            assert plan(folded(of), arch).tile == plan(split(of), arch).tile
            assert plan(in_runs(of), arch).tile == plan(split(of), arch).tile


@pytest.mark.parametrize("arch", PATHS)
def test_calls_with_many_rows_write_no_parts(arch: str) -> None:
    of = split(spec(causal, head_dim=128, dtype="bfloat16"))

    def folds(batch: int, heads: int, rows: int, keys: int) -> bool:
        sizes = batch, heads, max(heads // 4, 1), rows, keys
        splits = -(-keys // 1120)
        call = CheckedCall(*sizes, 128, 128, keys - rows, 0, 1.0, {SPLIT: 1120}, splits=splits)
        return run_of_splits(of, arch, call) == ALL_SPLITS

    assert folds(1, 32, 8192, 8192)  # training
    assert folds(16, 4, 2048, 2048)  # of a rank
    assert not folds(1, 32, 1, 131_072)  # decoding
    assert not folds(8, 32, 1, 4096)
    assert not folds(1, 4, 2048, 131_072)  # a chunk whose blocks would be 64


def test_decoding_writes_no_parts_where_tiles_full_of_heads_keep_the_gpu_busy() -> None:
    of = spec(causal, head_dim=576, head_dim_v=512, shared_kv=True, dtype="bfloat16")

    def folds(batch: int, heads: int) -> bool:
        sizes = batch, heads, 1, 1, 4096
        call = CheckedCall(*sizes, 576, 512, 4095, 0, 1.0, {SPLIT: 512}, splits=8)
        return run_of_splits(split(of), "sm_90a", call) == ALL_SPLITS

    assert folds(128, 64)  # 128 blocks, each of 64 rows, on 132 SMs
    assert folds(64, 128)
    assert not folds(32, 64)
    assert folds(128, 16)  # the keys take longer through global memory than all joins do
    assert not folds(64, 16)  # 64 blocks would leave half of the SMs idle
