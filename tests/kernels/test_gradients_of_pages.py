"""The gradient of q where keys and values are in the pages of a cache."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch

import flashgen as fg
from flashgen.calls.runtime import bind_arguments
from flashgen.calls.runtime.backward import prepare_queries
from flashgen.shared.call import (
    DEFAULT_OPTIONS,
    LaunchOptions,
    Operands,
    OutputGradients,
)
from flashgen.shared.paths import PATHS
from flashgen.spec.language.signature import split
from tests.support.judged import check_gates
from tests.support.paged_calls import Paged, Sequences
from tests.support.paged_gradients import PagedGradient
from tests.support.paged_specs import CAUSAL, MIXED, before, paged
from tests.support.planted import planted
from tests.support.tiers import one_in, slow

Tensor = torch.Tensor

ARCHS = tuple(PATHS)
ROWS = Sequences.of((9, 9, 9, 9), (37, 300, 0, 129))
"""One empty sequence, and lengths that are multiples of no page and of no tile."""


def squared(s, b, h, q, k):  # type: ignore[no-untyped-def]
    return fg.maximum(s, 0.0) ** 2


def weighted(normalize: str) -> fg.AttentionSpec:
    name = f"squared_{normalize}"
    return fg.AttentionSpec(before, weight_mod=squared, normalize=normalize, paged=True, name=name)


def gradient(name: str, of: Sequences, arch: str, page_size: int = 16) -> PagedGradient:
    return PagedGradient(paged(name, of, arch, page_size))


def of_spec(spec: fg.AttentionSpec, of: Sequences, arch: str, page_size: int = 16) -> PagedGradient:
    return PagedGradient(Paged(spec, of, page_size, how={"arch": arch}))


CASES = [("causal", 16), ("bias", 12), *(("causal", size) for size in (1, 7, 64, 256))]
CASES += [("window", 16), ("of_the_end", 16), ("sink", 48), ("softcap", 64), ("alibi", 128)]
CASES += [("tree", 16)]


@pytest.mark.parametrize(
    ("name", "page_size", "arch"),
    [
        case if case in (("causal", 16, "sm_90a"), ("bias", 12, "sm_80")) else slow(*case)
        for case in ((*case, arch) for case in CASES for arch in ARCHS)
    ],
)
def test_the_gradient_is_that_of_contiguous_keys(name: str, page_size: int, arch: str) -> None:
    of = Sequences.of((8, 8), (150, 8)) if name == "tree" else ROWS
    call = gradient(name, of, arch, page_size)
    dq, outputs, record = call.run()
    call.judge(dq, outputs)
    delta, of_queries = (run.build for run in record.launches)
    assert [delta.facts.kernel, of_queries.facts.kernel] == ["delta", "dq"]
    check_gates(of_queries)


@pytest.mark.parametrize(
    ("arch", "dims", "dtype"),
    [
        slow("sm_80", (72, 40), "float32"),
        slow("sm_80", (64, 64), "float32"),
        slow("sm_80", (128, 128), "float32"),
        *one_in(
            10,
            (
                (arch, dims, dtype)
                for arch in ARCHS
                for dims, dtype in (
                    ((128, 128), "bfloat16"),
                    ((192, 128), "bfloat16"),
                    ((40, 96), "bfloat16"),
                    ((256, 256), "float16"),
                    ((64, 512), "float16"),  # parts of the columns of V, on one path
                )
            ),
            first=8,
        ),
    ],
)
def test_head_dims_and_dtypes(arch: str, dims: tuple[int, int], dtype: str) -> None:
    spec = CAUSAL.replace(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype)
    of = Sequences.of((2, 2, 2), (130, 0, 47), dims=dims, dtype=dtype)
    of_spec(spec, of, arch).judged()


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_one_tensor_of_keys_and_values(arch: str) -> None:
    spec = CAUSAL.replace(head_dim=192, head_dim_v=128, shared_kv=True)
    of = Sequences.of((2, 2), (130, 47), heads=(4, 1), dims=(192, 128))
    of_spec(spec, of, arch).judged()


@pytest.mark.parametrize(("normalize", "arch"), one_in(4, product(("none", "sum"), ARCHS), first=1))
def test_weights_that_are_no_exponentials(normalize: str, arch: str) -> None:
    of_spec(weighted(normalize), ROWS, arch).judged()


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_queries_have_positions_of_their_own(arch: str) -> None:
    PagedGradient(paged("causal", ROWS, arch), q_offset=(3, 200, 5, 500)).judged()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_more_queries_than_keys_and_packed_ones(arch: str) -> None:
    gradient("causal", Sequences.of((300, 300), (17, 290)), arch).judged()
    PagedGradient(dataclasses.replace(paged("causal", MIXED, arch), packed=True)).judged()


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_a_block_layout_is_read_at_positions_of_the_sequence(arch: str) -> None:
    layout = torch.rand((1, 4, 10, 7), generator=torch.Generator().manual_seed(0)) < 0.5
    sparse = fg.BlockSparse(block_q=32, block_k=48)
    spec = fg.AttentionSpec(before, block_sparse=sparse, paged=True, name="layout_of_pages")
    numbers = {"tensors": {"layout": layout}}
    of = Sequences.of((70, 70), (150, 300))
    PagedGradient(Paged(spec, of, 16, numbers=numbers, how={"arch": arch})).judged()


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_launches_for_parts_of_the_batch_give_the_same_bits(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = gradient("causal", ROWS, arch)
    expected = call.judged()
    monkeypatch.setattr(bind_arguments, "MOST_ALONG_Y_AND_Z", 1)
    assert torch.equal(call.judged(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_neither_the_order_of_pages_nor_that_of_warps_matters(arch: str) -> None:
    call = gradient("causal", ROWS, arch)
    expected = call.judged()
    assert torch.equal(call.judged(seed=7, launch=LaunchOptions(order_seed=3)), expected)


def test_the_cpu_path_computes_the_same() -> None:
    tiled = {"backend": "tiled", "arch": None}
    gradient("sink", ROWS, "sm_80").judged(**tiled)
    of_spec(weighted("none"), ROWS, "sm_80").judged(**tiled)
    gradient("causal", ROWS, "sm_80").judged(backend="tiled", arch="sm_90a")
    PagedGradient(dataclasses.replace(paged("causal", MIXED, "sm_80"), packed=True)).judged(**tiled)


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
@pytest.mark.parametrize(
    ("page_size", "page"),
    [
        (16, -1),
        slow(16, 10_000),
        slow(4, -1),
        slow(4, 10_000),
    ],
)
@pytest.mark.parametrize("normalize", ["softmax", "none"])
def test_an_unknown_page_makes_the_rows_of_its_sequence_nan_and_no_other(
    normalize: str, page_size: int, page: int, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the checks, as on a GPU. The results of the forward call do not know of it."""
    monkeypatch.setattr("flashgen.calls.runtime.arguments.call.check_pages", lambda *_: None)
    spec = CAUSAL if normalize == "softmax" else weighted(normalize)
    call = of_spec(spec, ROWS, arch, page_size)
    expected = call.judged()
    table = call.of.operands()[3]["page_table"].clone()
    table[1, 5] = page
    found, *_ = call.run({"page_table": table})
    assert found[1].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_a_page_is_not_read_past_the_length(arch: str) -> None:
    """The entries behind a sequence's last page name pages that do not exist."""
    call = gradient("causal", ROWS, arch)
    table = call.of.operands()[3]["page_table"].clone()
    table[table < 0] = 10_000
    found, *_ = call.run({"page_table": table})
    assert torch.equal(found, call.judged())


@pytest.mark.parametrize(
    ("arch", "old", "new"),
    [
        ("sm_80", "const bool valid = r < valid_rows", "const bool valid = r < valid_rows + 16"),
        ("sm_90a", "box + p.box_rows <= valid_rows", "true"),
        slow("sm_80", "position - entry * p.page_size", "0"),
        slow("sm_80", "read_page_table(p, b, entry)", "read_page_table(p, 0, entry)"),
        slow("sm_90a", "const bool valid = r < valid_rows", "const bool valid = true"),
        slow("sm_90a", "read_page_table(p, b, entry)", "read_page_table(p, 0, entry)"),
        slow("sm_90a", "load_pages<PANELS, PANEL, HEAD_DIM>", "load_pages<PANELS, PANEL, 8>"),
    ],
)
def test_bugs_of_pages_are_seen(arch: str, old: str, new: str) -> None:
    """Rows past the length, a box that ends past it, one slot for all keys, another's pages, and
    columns that are not copied."""
    of = Sequences.of((2, 2), (37, 129))
    call = gradient("causal", of, arch, 12 if "PANELS" in old else 16)
    call.judged()
    with planted("dq", old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        call.judged()


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (CAUSAL.replace(dtype="float16", kv_dtype="float8_e4m3fn"), "codes"),
        (split(CAUSAL), "split keys"),
    ],
)
def test_codes_and_split_keys_are_refused(spec: fg.AttentionSpec, why: str) -> None:
    q, k, v, _ = paged("causal", ROWS, "sm_80").operands()
    of_rows = q[..., 0].float()
    with pytest.raises(fg.SpecError, match=why):
        prepare_queries(spec, Operands(q, k, v), OutputGradients(q, of_rows, q), DEFAULT_OPTIONS)
