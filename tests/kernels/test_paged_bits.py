"""Calls with keys and values in pages: the bits of a row depend on its keys alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import ForwardRun, run_forward
from flashgen.kernels.pipeline import build
from flashgen.kernels.planner import columns_of_launch
from flashgen.shared.paths import PATHS
from flashgen.spec.language.signature import packed_queries, split, with_columns
from flashgen.spec.language.symbols import SEQ_K, SEQ_Q
from tests.support.examples import SPECS, spec_path
from tests.support.judged import check_few_spills, check_gates, equal, example
from tests.support.paged_calls import Paged, Sequences
from tests.support.paged_specs import CAUSAL, DECODING, MIXED, paged
from tests.support.shapes import Case
from tests.support.tiers import case_id, slow, take_turns

Tensor = torch.Tensor

ARCHS = tuple(PATHS)


def contiguous(call: Paged, b: int) -> ForwardRun:
    """One sequence with contiguous keys, in a call with the same split_size."""
    q, k, v = (each[b][None] for each in (call.of.q, call.of.k, call.of.v))
    first = k.shape[2] - q.shape[2]
    given = {"backend": "emulator", **call.how, **call.numbers}
    return run_forward(call.spec.replace(paged=False), q, k, v, q_offset=first, **given)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 128, 256])
def test_any_permutation_of_pages_of_any_size_equals_contiguous_keys(
    arch: str, page_size: int
) -> None:
    call = paged("causal", DECODING, arch, page_size, split_size=128)
    run = call.run()
    if page_size == 16:
        assert equal(run, call.run(seed=1))
    for b, (out, lse) in enumerate(call.parts(run)):
        expected = contiguous(call, b)
        assert torch.equal(out, expected.out)
        assert torch.equal(lse, expected.lse)


def is_served(spec: fg.AttentionSpec) -> bool:
    """Whether a spec may have paged=True, and positions that only the device knows."""
    layout = spec.block_sparse
    return not spec.packed and (layout is None or not layout.is_static)


SERVED_PATHS = [path for path in SPECS if is_served(fg.load(path))]


def shuffled(k: Tensor, v: Tensor) -> tuple[list[Tensor], Tensor]:
    """Caches with pages of 16 keys of a batch in a random order, and their table."""
    batch, pages = k.shape[0], k.shape[2] // 16
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1))
    table = order.view(batch, pages).int()
    caches = [torch.empty(batch * pages, x.shape[1], 16, x.shape[3], dtype=x.dtype) for x in (k, v)]
    for cache, keys in zip(caches, (k, v), strict=True):
        for b in range(batch):
            cache[table[b].long()] = keys[b].unflatten(1, (pages, 16)).transpose(0, 1)
    return caches, table


@pytest.mark.slow
@pytest.mark.parametrize(("path", "arch"), take_turns(SERVED_PATHS, ARCHS), ids=case_id)
def test_every_spec_computes_the_same_over_pages(path: Path, arch: str) -> None:
    call = example(path, Case(8, 208, 2, 4, 2), offsets={"q_offset": 200}, arch=arch)
    expected = call.judged_forward(split_size=64)
    q, k, v = call.qkv
    caches, table = shuffled(k, v)
    lengths = torch.full((2,), 208, dtype=torch.int32)
    tables = {"page_table": table, "cache_seqlens": lengths}
    numbers = {**call.numbers, "tensors": {**call.numbers.get("tensors", {}), **tables}}
    del numbers["q_offset"]
    spec = call.spec.replace(paged=True)
    run = run_forward(spec, q, *caches, **numbers, **call.how, split_size=64)
    assert equal(run, expected)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_boxes_lie_in_one_page_where_a_split_begins_inside_of_it(page_size: int) -> None:
    """A split begins in the middle of the rows that are in one page and in one tile."""
    spec = CAUSAL.replace(head_dim=128, head_dim_v=128)
    block_k = fg.plan(split(spec.replace(paged=True)), "sm_90a").block_k
    shared = math.gcd(block_k, page_size)
    of = Sequences.of((1,), (300,), dims=(128, 128))
    how = {"arch": "sm_90a", "split_size": 6 * shared + shared // 2}
    run = Paged(spec, of, page_size, how=how).judged()
    assert run.plan is not None
    assert run.plan.block_k == block_k


@pytest.mark.slow
@pytest.mark.parametrize(("path", "arch"), take_turns(SERVED_PATHS, ARCHS[::-1]), ids=case_id)
def test_decoding_of_every_spec_gives_the_bits_of_a_prefill(path: Path, arch: str) -> None:
    """Of its causal form, unless the mask or the score reads the lengths of the call."""
    call = example(path, Case(208, 208, 2, 4, 2), arch=arch)
    own = call.spec.mask_mod or (lambda b, h, q, k: q == q)
    spec = call.spec.replace(
        mask_mod=lambda b, h, q, k: own(b, h, q, k) & (k <= q), paged=True, name="of_prefill"
    )
    if {SEQ_Q, SEQ_K} & (spec.mask.free_symbols | spec.score.free_symbols):
        pytest.skip("the spec reads the lengths")
    q, k, v = call.qkv
    caches, table = shuffled(k, v)

    def run(rows: Tensor, length: int) -> ForwardRun:
        tables = {"page_table": table, "cache_seqlens": torch.full((2,), length).int()}
        numbers = {**call.numbers, "tensors": {**call.numbers.get("tensors", {}), **tables}}
        return run_forward(spec, rows, *caches, **numbers, **call.how, split_size=64)

    prefill = run(q, 208)
    for p in (0, 63, 130, 207):
        row = run(q[:, :, p : p + 1], p + 1)
        assert torch.equal(row.out[:, :, 0], prefill.out[:, :, p]), p
        assert torch.equal(row.lse[:, :, 0], prefill.lse[:, :, p]), p


PREFILL = Sequences.of((217,), (217,))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["causal", "window", "sink", "softcap", "alibi", "bias"])
def test_a_row_has_the_same_bits_alone_and_in_every_batch(name: str, arch: str) -> None:
    """Decoding over p + 1 keys, alone, beside others and packed, gives row p of a prefill."""
    prefill = paged(name, PREFILL, arch, split_size=64).run()
    for p in (64, 216):
        row = PREFILL.row(p)
        alone = paged(name, row, arch, split_size=64)
        beside = paged(name, DECODING + row, arch, split_size=64)
        packed = paged(name, MIXED + row, arch, split_size=64)
        for call in (alone, beside, dataclasses.replace(packed, packed=True)):
            out, lse = call.parts(call.run())[-1]
            assert torch.equal(out[0, :, 0], prefill.out[0, :, p]), p
            assert torch.equal(lse[0, :, 0], prefill.lse[0, :, p]), p


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_one_split_equals_unsplit(arch: str) -> None:
    call = paged("causal", DECODING, arch)
    assert equal(call.run(split_size=512), call.run(split_size=0))


def variants_of(spec: fg.AttentionSpec) -> list[fg.AttentionSpec]:
    """The kinds of calls with split keys: over pages, with packed queries, and contiguous."""
    spec = spec.replace(dropout=False)
    over_pages = spec.replace(paged=True)
    return [split(over_pages), split(packed_queries(over_pages)), split(spec)]


@pytest.mark.parametrize("arch", [slow("sm_80"), "sm_90a"])
def test_all_calls_of_a_spec_have_one_tile(arch: str) -> None:
    for path in SERVED_PATHS:
        plans = [fg.plan(variant, arch) for variant in variants_of(fg.load(path))]
        assert len({plan.tile for plan in plans}) == 1, path.stem


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("path", SERVED_PATHS, ids=lambda path: path.stem)
def test_kernels_with_the_tile_of_all_calls_spill_little(path: Path, arch: str) -> None:
    for variant in variants_of(fg.load(path)):
        built = build(variant, arch)
        assert built.plan.tile == fg.plan(variant, arch).tile
        check_few_spills(built)


def wide_variants(path: Path, head_dim: int) -> list[fg.AttentionSpec]:
    spec = fg.load(path).replace(head_dim=head_dim, head_dim_v=head_dim, dtype="bfloat16")
    return variants_of(spec)


@pytest.mark.parametrize(
    ("name", "head_dim", "warpgroups"),
    [
        *((name, 320, 2) for name in ("document", "alibi", "block_sparse")),
        ("causal", 320, 1),
        ("document", 288, 1),
    ],
)
def test_two_warpgroups_share_rows_where_one_has_few_registers(
    name: str, head_dim: int, warpgroups: int
) -> None:
    plans = [fg.plan(each, "sm_90a") for each in wide_variants(spec_path(name), head_dim)]
    assert len({each.tile for each in plans}) == 1
    assert plans[0].column_warps == warpgroups
    assert plans[0].block_k >= 32


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [264, 288, 304, 320])
@pytest.mark.parametrize("path", SERVED_PATHS, ids=lambda path: path.stem)
def test_no_kernel_of_wide_heads_spills(path: Path, head_dim: int) -> None:
    for variant in wide_variants(path, head_dim):
        columns = columns_of_launch(variant, "sm_90a", "forward").columns
        part = variant if columns == head_dim else with_columns(variant, columns)
        check_gates(build(part, "sm_90a"))
