"""Calls with keys and values in the pages of a cache: results, bits, and slots without effect."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.language import SEQ_K, SEQ_Q
from flashgen.language.signature import packed_queries, split
from flashgen.ops import ForwardRun, run_forward
from flashgen.pipeline import build
from flashgen.runtime.splits import Splits
from tests.support.examples import SPECS, spec_path
from tests.support.judged import FEW_BYTES, check_gates, example, normal
from tests.support.paged_caches import LAYOUTS, cache_of
from tests.support.paged_calls import Paged, Sequences
from tests.support.planted import planted
from tests.support.shapes import Case
from tests.support.tiers import slow

Tensor = torch.Tensor

ARCHS = ("sm_80", "sm_90a")


def before(b, h, q, k):  # type: ignore[no-untyped-def]
    return k <= q


def near(b, h, q, k):  # type: ignore[no-untyped-def]
    return (k <= q) & (q - k < 50)


def near_the_end(b, h, q, k):  # type: ignore[no-untyped-def]
    return (k <= q) & (k >= fg.seq_k - 70)


TREE = fg.Tensor("tree", (8, 8), "bool")


def in_tree(b, h, q, k):  # type: ignore[no-untyped-def]
    """The last 8 positions are a tree, whose nodes see their ancestors and all positions before."""
    first = fg.seq_k - 8
    return (k < first) | TREE[q - first, k - first]


BIAS = fg.Tensor("bias", ("heads", "positions"), "float32")
CAUSAL = fg.AttentionSpec(before, paged=True, name="causal_paged")
SERVED = {
    "causal": CAUSAL,
    "window": fg.AttentionSpec(near, paged=True, name="window_paged"),
    "of_the_end": fg.AttentionSpec(near_the_end, paged=True, name="near_the_end"),
    "sink": fg.AttentionSpec(before, sink=True, paged=True, name="sink_paged"),
    "softcap": fg.load(spec_path("softcap")).replace(mask_mod=before, paged=True),
    "alibi": fg.load(spec_path("alibi")).replace(mask_mod=before, paged=True),
    "bias": fg.AttentionSpec(
        before, lambda s, b, h, q, k: s + BIAS[h, k], paged=True, name="bias_paged"
    ),
    "tree": fg.AttentionSpec(in_tree, paged=True, name="tree_paged"),
}
NODES = torch.tensor([[0], [0], [1], [1], [2], [4], [4], [6]])  # the parent of each node of a tree
ANCESTORS = torch.eye(8, dtype=torch.bool)
for node, parent in enumerate(NODES.flatten().tolist()):
    ANCESTORS[node] |= ANCESTORS[parent]
VALUES = {
    "sink": torch.linspace(-1, 2, 4),
    "bias": normal((4, 512), torch.float32, 1),
    "tree": ANCESTORS,
}
DECODING = Sequences.of((1, 1, 1, 1), (37, 300, 1, 129))
VERIFYING = Sequences.of((8, 8, 8), (150, 8, 217))
MIXED = Sequences.of((70, 1, 0, 3), (130, 217, 40, 5))


def paged(name: str, of: Sequences, arch: str, page_size: int = 16, **how: Any) -> Paged:
    spec = SERVED[name]
    names = {tensor.name for tensor in spec.tensors} & VALUES.keys()
    numbers = {"tensors": {each: VALUES[each] for each in names}} if names else {}
    return Paged(spec, of, page_size, numbers=numbers, how={"arch": arch, **how})


def equal(found: ForwardRun, expected: ForwardRun) -> bool:
    return torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
@pytest.mark.parametrize(
    ("name", "of", "page_size", "split_size"),
    [
        ("causal", DECODING, 16, 128),
        ("tree", VERIFYING, 16, 64),
        slow("window", DECODING, 64, 64),
        slow("of_the_end", VERIFYING, 16, 64),
        slow("sink", VERIFYING, 48, 96),
        slow("softcap", DECODING, 128, 128),
        slow("alibi", VERIFYING, 16, 256),
        slow("bias", DECODING, 16, 112),
        slow("causal", Sequences.of((40, 40), (17, 90)), 16, None),  # more queries than keys
        slow("causal", Sequences.of((2, 2, 2), (0, 1, 33)), 16, 16),
        *(slow("tree", Sequences.of((n, n), (150, 8)), 16, 64) for n in range(1, 8)),
    ],
)
def test_results_are_those_of_contiguous_keys(
    name: str, of: Sequences, page_size: int, split_size: int | None, arch: str
) -> None:
    run = paged(name, of, arch, page_size, split_size=split_size).judged()
    check_gates(run.report.kernel)


@pytest.mark.parametrize(
    ("arch", "name", "split_size"),
    [
        ("sm_80", "of_the_end", 64),
        slow("sm_90a", "of_the_end", 64),
        *(slow(arch, "causal", None) for arch in ARCHS),
        *(slow(arch, "sink", 128) for arch in ARCHS),
    ],
)
def test_queries_of_different_numbers_are_packed(
    arch: str, name: str, split_size: int | None
) -> None:
    call = dataclasses.replace(paged(name, MIXED, arch, split_size=split_size), packed=True)
    call.judged()


@pytest.mark.parametrize(
    ("arch", "dims", "dtype"),
    [
        ("sm_90a", (40, 96), "bfloat16"),
        slow("sm_80", (40, 96), "bfloat16"),
        *(slow(arch, (128, 128), "bfloat16") for arch in ARCHS),
        *(slow(arch, (256, 256), "float16") for arch in ARCHS),
        *(slow(arch, (192, 128), "bfloat16") for arch in ARCHS),
        slow("sm_80", (64, 64), "float32"),
        slow("sm_80", (72, 40), "float32"),
    ],
)
def test_head_dims_and_dtypes(arch: str, dims: tuple[int, int], dtype: str) -> None:
    spec = CAUSAL.replace(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype)
    of = Sequences.of((2, 2), (130, 47), dims=dims, dtype=dtype)
    run = Paged(spec, of, 16, how={"arch": arch, "split_size": 64}).judged()
    check_gates(run.report.kernel)


def test_the_cpu_path_computes_the_same() -> None:
    for name in ("of_the_end", "sink"):
        how = {"backend": "tiled", "arch": None}
        paged(name, VERIFYING, "sm_80").judged(**how)
        packed = dataclasses.replace(paged(name, MIXED, "sm_80"), packed=True)
        packed.judged(**how, split_size=64)


# ---- bits ---------------------------------------------------------------------------------------


def contiguous(call: Paged, b: int) -> ForwardRun:
    """One sequence with contiguous keys, in a call with the same split_size."""
    q, k, v = (each[b][None] for each in (call.of.q, call.of.k, call.of.v))
    first = k.shape[2] - q.shape[2]
    given = {"backend": "emulator", **call.how, **call.numbers}
    return run_forward(call.spec.replace(paged=False), q, k, v, q_offset=first, **given)


@pytest.mark.parametrize(
    ("arch", "page_size"),
    [
        *(("sm_90a", 16), ("sm_80", 16)),
        *(slow(arch, page_size) for arch in ARCHS for page_size in (1, 4, 64, 128, 256)),
    ],
)
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
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("path", SERVED_PATHS, ids=lambda path: path.stem)
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


@pytest.mark.parametrize("page_size", [64, slow(32), slow(128)])
def test_boxes_lie_in_one_page_where_a_split_begins_inside_of_it(page_size: int) -> None:
    """A tile of 160 keys and a page share 32 rows, which a split of 208 keys does not have."""
    spec = CAUSAL.replace(head_dim=128, head_dim_v=128)
    of = Sequences.of((1,), (300,), dims=(128, 128))
    run = Paged(spec, of, page_size, how={"arch": "sm_90a", "split_size": 208}).judged()
    assert run.plan is not None
    assert run.plan.block_k % 32 == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("path", SERVED_PATHS, ids=lambda path: path.stem)
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


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
@pytest.mark.parametrize(
    "name", ["causal", *(slow(each) for each in ("window", "sink", "softcap", "alibi", "bias"))]
)
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


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_one_split_equals_unsplit(arch: str) -> None:
    call = paged("causal", DECODING, arch)
    assert equal(call.run(split_size=512), call.run(split_size=None))


def variants_of(spec: fg.AttentionSpec) -> list[fg.AttentionSpec]:
    """The kinds of calls with split keys: over pages, with packed queries, and contiguous."""
    spec = spec.replace(dropout=False)
    over_pages = spec.replace(paged=True)
    return [split(over_pages), split(packed_queries(over_pages)), split(spec)]


@pytest.mark.parametrize("arch", ARCHS)
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
        assert built.binary.resources.spill_store_bytes <= FEW_BYTES
        assert built.binary.resources.registers <= built.plan.registers


# ---- slots and pages without effect -------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90a", slow("sm_80")])
def test_parts_that_are_not_written_are_not_read(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Splits.parts

    def with_nan(*arguments: Any) -> Any:
        made = parts(*arguments)
        for tensor in made:
            tensor.fill_(math.nan)
        return made

    monkeypatch.setattr(Splits, "parts", with_nan)
    paged("causal", DECODING, arch, split_size=64).judged()


def unknown_pages(call: Paged, arch: str, page: int) -> ForwardRun:
    """A run in which a page of the first sequence is unknown, as it is on a GPU: without checks."""
    q, k, v, tables = call.operands()
    tables["page_table"][0, 1] = page
    given = {"backend": "emulator", **call.how}
    return run_forward(call.spec, q, k, v, tensors=tables, **given)


@pytest.mark.parametrize(
    ("arch", "page_size", "page"),
    [
        ("sm_80", 16, -1),
        ("sm_90a", 4, 10_000),
        slow("sm_90a", 16, 10_000),
        *(slow(arch, 4, -1) for arch in ARCHS),
        slow("sm_80", 4, 10_000),
        slow("sm_80", 16, 10_000),
        slow("sm_90a", 16, -1),
    ],
)
def test_an_unknown_page_makes_its_sequence_nan_and_no_other(
    arch: str, page_size: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.runtime.checks.check_pages", lambda *_: None)
    call = paged("causal", DECODING, arch, page_size, split_size=128)
    run = unknown_pages(call, arch, page)
    assert run.out[0].isnan().all()
    assert torch.equal(run.out[1:], call.run().out[1:])


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_a_page_is_not_read_past_the_length(arch: str) -> None:
    """The entries behind a sequence's last page name pages that do not exist."""
    call = paged("causal", DECODING, arch, split_size=128)
    q, k, v, tables = call.operands()
    table = tables["page_table"]
    table[table < 0] = 10_000
    given = {"backend": "emulator", **call.how}
    assert equal(run_forward(CAUSAL, q, k, v, tensors=tables, **given), call.run())


@pytest.mark.parametrize(
    ("arch", "old", "new"),
    [
        ("sm_80", "const bool valid = r < valid_rows", "const bool valid = r < valid_rows + 16"),
        ("sm_90a", "box + p.box_rows <= valid_rows", "true"),
        slow("sm_80", "position - entry * p.page_size", "0"),
        slow("sm_90a", "const bool valid = r < valid_rows", "const bool valid = true"),
        slow("sm_90a", "read_page_table(p, b, entry)", "read_page_table(p, 0, entry)"),
    ],
)
def test_bugs_of_pages_are_seen(arch: str, old: str, new: str) -> None:
    """Rows past the length, a box that ends past it, one slot for all keys, another's pages."""
    call = paged("causal", DECODING, arch, split_size=None)
    with planted("forward", old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        call.judged()


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "layout"),
    [
        ("sm_90a", "nhd"),
        *(slow(arch, layout) for arch in ARCHS for layout in LAYOUTS if layout != "nhd"),
    ],
)
def test_caches_of_serving_engines_are_read_in_place(arch: str, layout: str) -> None:
    cache = cache_of(layout, (9, 2, 16), (64, 64), torch.float16)
    plain = [each.contiguous() for each in (cache.k, cache.v)]
    tables = {
        "page_table": torch.tensor([[7, 2, -1], [0, 4, 5]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([18, 40], dtype=torch.int32),
    }
    q = normal((2, 4, 1, 64), torch.float16, 3)
    how: dict[str, Any] = {"backend": "emulator", "arch": arch, "tensors": tables}
    found = run_forward(CAUSAL, q, cache.k, cache.v, split_size=128, **how)
    assert equal(found, run_forward(CAUSAL, q, *plain, split_size=128, **how))


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_a_cache_that_is_not_aligned_is_read_element_by_element(arch: str) -> None:
    call = paged("causal", DECODING, arch, split_size=128)
    q, k, v, tables = call.operands()
    odd = [torch.nn.functional.pad(each, (0, 1))[..., :-1] for each in (k, v)]
    how: dict[str, Any] = {"backend": "emulator", "arch": arch, "tensors": tables}
    run = run_forward(CAUSAL, q, *odd, split_size=128, **how)
    assert run.report.access_bytes == 2
    call.judge(run)
