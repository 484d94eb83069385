"""The operator with a paged cache: its arguments, and torch's tools."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flashgen as fg
from flashgen import reference
from flashgen.kernels.planner import plan_backward, plan_splits
from flashgen.shared.paths import PATHS

Tensor = torch.Tensor


def before(b, h, q, k):  # type: ignore[no-untyped-def]
    return k <= q


SPEC = fg.AttentionSpec(before, head_dim=32, paged=True, name="before_paged")
OP = fg.attention(SPEC)
TABLE = torch.tensor([[0, 3, 4, -1], [5, 6, -1, -1]], dtype=torch.int32)
LENGTHS_OF = torch.tensor([40, 17], dtype=torch.int32)
ENDS = torch.tensor([0, 5, 6], dtype=torch.int32)


def operands(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = (shape or (2, 4, 1, 32), (9, 2, 16, 32), (9, 2, 16, 32))
    q, k, v = (torch.randn(size, generator=generator).half() for size in sizes)
    return q, k, v


def tables(**changes: Any) -> dict[str, Any]:
    return {"page_table": TABLE, "cache_seqlens": LENGTHS_OF, **changes}


@pytest.mark.parametrize(
    ("shape", "given", "message"),
    [
        ((2, 4, 1, 32), {"q_offset": 3}, "no common position"),
        ((2, 4, 1, 32), {"k_offset": 1}, "counted from 0 in each sequence"),
        ((2, 4, 1, 32), {"cache_seqlens": LENGTHS_OF + 30}, "longer than its row of the page"),
        ((2, 4, 1, 32), {"cache_seqlens": LENGTHS_OF - 20}, "or shorter than 0"),
        ((2, 4, 1, 32), {"cache_seqlens": LENGTHS_OF + 20}, "outside of the caches"),
        ((2, 4, 1, 32), {"page_table": TABLE + 4}, "outside of the caches"),
        ((2, 4, 1, 32), {"page_table": TABLE[:1]}, "page_table is not for the sequences of q"),
        ((3, 4, 1, 32), {}, "page_table is not for the sequences of q"),
        ((2, 4, 1, 32), {"page_table": TABLE.long()}, "the dtype that the spec declares"),
        ((2, 4, 1, 32), {"page_table": TABLE[0]}, "1 dimensions, not 2"),
        ((2, 4, 1, 32), {"cu_seqlens_q": ENDS}, "one after another in one batch entry"),
        ((1, 4, 5, 32), {"cu_seqlens_q": ENDS}, "does not ascend from 0 to the length"),
        ((2, 4, 1, 32), {"split_size": 100}, "split_size is not a number of keys"),
        ((2, 4, 1, 32), {"dropout_p": 0.1}, "without dropout"),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(
    shape: tuple[int, ...], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(fg.InputError, match=message):
        OP(*operands(*shape), **tables(**given))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_table", TABLE[0]),
        ("page_table", TABLE[:1, None]),
        ("cache_seqlens", LENGTHS_OF[0]),
        ("cache_seqlens", LENGTHS_OF[None, :1]),
        ("cu_seqlens_q", ENDS[None, [0, -1]] // 6),
    ],
)
def test_the_way_out_of_a_wrong_rank_is_a_table_that_the_call_takes(
    name: str, value: Tensor
) -> None:
    given = tables(page_table=TABLE[:1], cache_seqlens=LENGTHS_OF[:1])
    with pytest.raises(fg.InputError, match="dimensions, not") as raised:
        OP(*operands(1, 4, 1, 32), **{**given, name: value})
    mended = eval(raised.value.way_out, {name: value})
    q, k, v = operands()
    assert torch.equal(OP(q[:1], k, v, **{**given, name: mended}), OP(q[:1], k, v, **given))


def test_a_missing_table_is_named_and_the_other_arguments_of_the_call_are_not() -> None:
    with pytest.raises(fg.InputError) as raised:
        OP(*operands(), cache_seqlens=LENGTHS_OF)
    assert "'page_table' of the spec is missing" in str(raised.value)
    assert "whole_heads" not in str(raised.value)


@pytest.mark.parametrize(
    ("taken", "named"),
    [
        ((slice(3),), "numbers of pages"),
        ((slice(None), slice(1)), "numbers of heads"),
        ((slice(None), slice(None), slice(3)), "page sizes"),
    ],
)
def test_caches_of_different_sizes_are_refused(taken: tuple[slice, ...], named: str) -> None:
    q, k, v = operands()
    with pytest.raises(fg.InputError, match=f"different {named}") as raised:
        OP(q, k, v[taken], **tables())
    assert "caches [pages, heads_kv, page_size, head_dim]" in raised.value.way_out


def test_a_cache_without_heads_has_a_way_out_that_works() -> None:
    q, k, v = (x[:, :1] for x in operands())
    with pytest.raises(fg.InputError, match="k has 3 dimensions") as raised:
        OP(q, k[:, 0], v[:, 0], **tables())
    assert "expected [pages, heads_kv, page_size, head_dim]" in raised.value.numbers
    assert raised.value.way_out.startswith("k.unsqueeze(1)")
    mended = (x[:, 0].unsqueeze(1) for x in (k, v))
    assert torch.equal(OP(q, *mended, **tables()), OP(q, k, v, **tables()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packed": True}, "cannot have packed=True"),
        ({"dropout": True}, "cannot have dropout=True"),
        ({"paged": 1}, "paged is True or False"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fg.SpecError, match=message):
        fg.AttentionSpec(before, **{"paged": True, **options})


def test_a_layout_that_is_a_function_is_refused() -> None:
    layout = fg.BlockSparse(lambda b, h, i, j: i == j, block_q=16, block_k=16)
    op = fg.attention(SPEC.replace(block_sparse=layout, name="static_paged"))
    with pytest.raises(fg.InputError, match="positions that the host knows"):
        op(*operands(), **tables())


def test_there_is_no_backward_pass() -> None:
    q, k, v = operands()
    with pytest.raises(fg.SpecError, match="a paged cache has no backward pass"):
        OP(q.requires_grad_(), k, v, **tables()).sum().backward()
    with pytest.raises(fg.SpecError, match="a paged cache has no backward pass"):
        plan_backward(SPEC)


def test_calls_without_keys_or_queries_have_empty_rows() -> None:
    q, k, v = operands()
    none = tables(cache_seqlens=0 * LENGTHS_OF)
    assert not OP(q, k, v, **none).any()
    assert not OP(q, k[:0], v[:0], **{**none, "page_table": TABLE[:, :0]}).any()
    assert OP(q[:, :, :0], k, v, **tables()).shape == (2, 4, 0, 32)
    assert OP(q[:0], k, v, page_table=TABLE[:0], cache_seqlens=LENGTHS_OF[:0]).shape[0] == 0
    for backend in ("tiled", "emulator"):
        with pytest.raises(fg.InputError, match="longer than its row of the page table"):
            OP(q, k, v, **tables(page_table=TABLE[:, :0]), backend=backend)


def test_a_table_without_pages_takes_captured_tensors_without_elements() -> None:
    q, k, v = operands()
    kept = fg.Tensor("kept", ("batch", "seq_k"), "bool")
    op = fg.attention(SPEC.replace(mask_mod=lambda b, h, q, k: kept[b, k], name="kept_paged"))
    given = tables(page_table=TABLE[:, :0], cache_seqlens=0 * LENGTHS_OF)
    assert not op(q, k, v, **given, kept=torch.ones(2, 0, dtype=torch.bool)).any()


def test_the_entropy_is_of_queries_at_any_positions() -> None:
    q, k, v = operands()
    request = fg.AuxRequest(entropy=True)
    at = torch.tensor([9, 3], dtype=torch.int32)
    found = OP(q, k, v, **tables(), q_offset=at, return_aux=request)[1]
    expected = OP(q, k, v, **tables(cache_seqlens=at + 1), return_aux=request)[1]
    torch.testing.assert_close(found.entropy, expected.entropy)


def test_the_reference_takes_caches() -> None:
    q, k, v = operands()
    exact, _ = reference.attention(SPEC, q, k, v, tensors=tables())
    torch.testing.assert_close(OP(q, k, v, **tables()).double(), exact, rtol=0, atol=2e-3)
    at = torch.tensor([9, 3], dtype=torch.int32)
    exact, _ = reference.attention(SPEC, q, k, v, tensors=tables(), q_offset=at)
    found = OP(q, k, v, **tables(), q_offset=at)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-3)


def test_some_heads_of_a_whole_are_those_of_the_whole() -> None:
    q, k, v = operands()
    some = OP(q[:, 2:], k[:, 1:], v[:, 1:], **tables(), h_offset=2, whole={"heads": 4})
    assert torch.equal(some, OP(q, k, v, **tables())[:, 2:])


def test_some_heads_of_a_whole_read_their_own_slopes() -> None:
    slopes = fg.Tensor("slopes", ("heads",), "float32")
    spec = SPEC.replace(score_mod=lambda s, b, h, q, k: s + slopes[h] * k, name="slopes_paged")
    op, (q, k, v) = fg.attention(spec), operands()
    given = {**tables(), "slopes": torch.arange(4.0)}
    some = op(q[:, 2:], k[:, 1:], v[:, 1:], **given, h_offset=2, whole={"heads": 4})
    assert torch.equal(some, op(q, k, v, **given)[:, 2:])


def test_torch_compile_and_export_trace_one_node() -> None:
    q, k, v = operands()
    expected = OP(q, k, v, **tables())

    def decode(q: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        return OP(q, k, v, page_table=table, cache_seqlens=lengths)

    compiled = torch.compile(decode, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, TABLE, LENGTHS_OF), expected)

    def packed(q: Tensor, ends: Tensor) -> Tensor:
        return OP(q, k, v, **tables(), cu_seqlens_q=ends)

    rows = operands(1, 4, 6, 32)[0]
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(rows, ENDS), packed(rows, ENDS))


def test_vmap_and_the_checks_of_operators() -> None:
    q, k, v = operands()
    mapped = torch.vmap(lambda x: OP(x, k, v, **tables()))(torch.stack([q, -q]))
    assert torch.equal(mapped[1], OP(-q, k, v, **tables()))
    overload = getattr(torch.ops.flashgen, OP.name).default
    torch.library.opcheck(overload, (q, k, v, TABLE, LENGTHS_OF), {})


def test_operations_are_counted_over_the_keys_of_each_sequence() -> None:
    q, k, v = operands()
    with FlopCounterMode(display=False) as counter:
        OP(q, k, v, **tables())
    assert counter.get_total_flops() == 2 * 4 * (40 + 17) * (32 + 32)


@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("heads_kv", [1, 2, 4, 8, 32])
def test_the_planned_split_has_whole_tiles_and_the_least_time(heads_kv: int, arch: str) -> None:
    spec = SPEC.replace(head_dim=128, dtype="bfloat16")
    planned = plan_splits(spec, arch, heads_kv)
    step = math.lcm(16, planned.kernel.block_k)
    assert planned.size % step == 0
    assert planned.size >= 2 * planned.kernel.block_k
    others = [replace(planned, size=step * n) for n in range(2, 8192 // step + 1)]
    assert planned.mean == min(each.mean for each in others)
    assert f"split_size = {planned.size:,}" in str(planned)


@pytest.mark.slow
def test_the_planned_split_is_that_of_a_call() -> None:
    q, k, v = operands()
    how: dict[str, Any] = {"backend": "emulator", "arch": "sm_90a"}
    size = plan_splits(SPEC, "sm_90a", heads_kv=2).size
    planned = OP(q, k, v, **tables(), **how)
    assert torch.equal(planned, OP(q, k, v, **tables(), split_size=size, **how))
