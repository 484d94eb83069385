"""Rows appended to a paged cache, by the emitted kernel, by torch and by a plain loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.runtime import append_kv
from flashgen.calls.runtime.append_kv import access_bytes, prepare
from flashgen.calls.runtime.arguments.new_rows import AppendOperands
from flashgen.kernels.append_pipeline import build_append_kv
from flashgen.shared.call import LaunchOptions
from tests.support.judged import check_gates
from tests.support.paged_caches import LAYOUTS, Appended, Cache, append_in_a_loop, cache_of, rows_of
from tests.support.planted import caught, planted
from tests.support.tiers import one_in, slow

Tensor = torch.Tensor
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
HEADS = 3


def caches(count: int, *given: Any, **options: Any) -> list[Cache]:
    return [cache_of(*given, **options) for _ in range(count)]


def same(one: Cache, other: Cache) -> bool:
    """Whether both storages have the same bytes, those between the rows too."""
    return all(map(torch.equal, one.storage, other.storage))


def check(
    rows: Appended, cached: tuple[Any, ...], pad: int = 0, arch: str = "sm_80", **given: Tensor
) -> None:
    """The kernel, the CPU path and the loop write the same bytes."""
    by_kernel, by_torch, by_loop, before = caches(4, *cached, pad=pad)
    given = given or rows.by_table
    fg.append_kv(rows.k, rows.v, *by_kernel[1:], **given, backend="emulator", arch=arch)
    fg.append_kv(rows.k, rows.v, *by_torch[1:], **given)
    append_in_a_loop(rows, by_loop)
    assert same(by_kernel, by_loop)
    assert same(by_torch, by_loop)
    assert same(by_loop, before) == bool((rows.slots < 0).all())


@pytest.mark.parametrize("page", [1, 4, 16, 64, 128, 256])
def test_rows_are_the_last_positions_of_their_sequences_for_every_page_size(page: int) -> None:
    shape = (-(-400 // page) + 3, HEADS, page)
    rows = rows_of((5, 5, 5), (5, 131, 258), shape, (16, 24), HALF)
    check(rows, ("hnd", shape, (16, 24), HALF))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", one_in(3, [HALF, BRAIN, SINGLE]))
def test_a_cache_of_any_layout_is_written_in_place_and_nothing_else_of_it(
    layout: str, dtype: torch.dtype
) -> None:
    shape, dims = (12, HEADS, 4), (16, 16)
    check(rows_of((3, 3), (3, 14), shape, dims, dtype), (layout, shape, dims, dtype))


@pytest.mark.parametrize(
    ("dtype", "pad", "width"),
    [
        (HALF, 1, 2),
        (HALF, 8, 16),
        (SINGLE, 4, 16),
        slow(HALF, 2, 4),
        slow(BRAIN, 4, 8),
        slow(SINGLE, 1, 4),
        slow(SINGLE, 2, 8),
    ],
)
def test_copies_are_as_wide_as_strides_allow(dtype: torch.dtype, pad: int, width: int) -> None:
    shape, dims = (12, HEADS, 4), (40, 8)
    rows = rows_of((3, 3), (3, 14), shape, dims, dtype)
    (cache,) = caches(1, "nhd", shape, dims, dtype, pad=pad)
    assert access_bytes(AppendOperands(rows.k, rows.v, cache.k, cache.v)) == width
    check(rows, ("nhd", shape, dims, dtype), pad=pad)
    build = build_append_kv(width)
    check_gates(build)
    assert max(map(len, build.source.text.splitlines())) <= 100


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 9))])
def test_any_rows_in_any_layout(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(12):
        page, layout = draw.choice([1, 2, 3, 5, 16, 48]), draw.choice(LAYOUTS)
        d, d_v = (8 * draw.randint(1, 9) for _ in range(2))
        dims = (d, d if layout in ("pairs", "halves") else d_v)
        dtype, packed = draw.choice([HALF, BRAIN, SINGLE]), draw.random() < 0.6
        sequences = draw.randint(1, 5)
        new = tuple(draw.randint(0, 9) for _ in range(sequences))
        new = new if packed else (draw.randint(1, 9),) * sequences
        lengths = tuple(count + draw.choice([0, 1, 7, 60]) for count in new)
        shape = (sum(-(-length // page) for length in lengths) + 2, draw.randint(1, 5), page)
        rows = rows_of(
            new, lengths, shape, dims, dtype, packed=packed, behind=draw.randint(1, 3) * packed
        )
        given = draw.choice([rows.by_table, rows.by_slots])
        check(rows, (layout, shape, dims, dtype), pad=draw.choice([0, 0, 1, 2, 4, 8]), **given)


def test_the_address_of_a_tensor_decides_too() -> None:
    shape, dims = (12, HEADS, 4), (8, 8)
    rows = rows_of((3, 3), (3, 14), shape, dims, HALF)
    k = torch.cat([rows.k, rows.k], -1)[..., 1:9]
    (cache,) = caches(1, "hnd", shape, dims, HALF)
    assert access_bytes(AppendOperands(rows.k, rows.v, cache.k, cache.v)) == 16
    assert access_bytes(AppendOperands(k, rows.v, cache.k, cache.v)) == 2
    check(rows.change(k=k), ("hnd", shape, dims, HALF))


@pytest.mark.parametrize("dims", [(8, 8), (256, 40), slow((576, 512)), slow((16, 1024))])
def test_rows_of_any_head_dim_are_copied(dims: tuple[int, int]) -> None:
    shape = (12, HEADS, 4)
    rows = rows_of((2, 2), (2, 7), shape, dims, HALF)
    check(rows, ("hnd", shape, dims, HALF))


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a"), slow("sm_120")])
def test_packed_sequences_may_be_empty_and_rows_behind_them_are_not_written(arch: str) -> None:
    shape, dims = (20, HEADS, 4), (16, 16)
    new, lengths = (0, 5, 0, 0, 1, 7, 0), (0, 9, 3, 0, 1, 7, 8)
    rows = rows_of(new, lengths, shape, dims, HALF, packed=True, behind=3)
    check(rows, ("split", shape, dims, HALF), arch=arch)
    check(rows, ("split", shape, dims, HALF), arch=arch, **rows.by_slots)


def test_slots_place_tokens_in_order_of_batch_and_rows_and_minus_one_skips() -> None:
    shape, dims = (12, HEADS, 4), (16, 8)
    rows = rows_of((3, 3), (3, 14), shape, dims, SINGLE)
    rows.slots[[0, 4]] = -1
    check(rows, ("nhd", shape, dims, SINGLE), **rows.by_slots)


def test_new_rows_and_tables_of_any_strides_are_read_where_they_lie() -> None:
    shape, dims = (12, HEADS, 4), (16, 16)
    rows = rows_of((3, 3), (3, 14), shape, dims, HALF)
    qkv = torch.cat([rows.k, rows.v, rows.k], 1).transpose(1, 2).contiguous().transpose(1, 2)
    spread = {name: tensor.repeat_interleave(2, -1) for name, tensor in rows.by_table.items()}
    given = {name: tensor[..., ::2] for name, tensor in spread.items()}
    given["page_table"] = given["page_table"].t().contiguous().t()
    k, v, _ = qkv.chunk(3, 1)
    check(rows.change(k=k, v=v), ("pairs", shape, dims, HALF), **given)
    slots = torch.stack([rows.slots, rows.slots], 1)[:, 0]
    check(rows, ("pairs", shape, dims, HALF), slot_mapping=slots)


def test_a_call_without_rows_writes_nothing() -> None:
    shape, dims = (12, HEADS, 4), (16, 16)
    rows = rows_of((3, 3), (3, 14), shape, dims, HALF)
    cache, before = caches(2, "hnd", shape, dims, HALF)
    none = torch.tensor([], dtype=torch.int64)
    for how in ({}, {"backend": "emulator"}):
        k, v = rows.k[:, :, :0], rows.v[:, :, :0]
        fg.append_kv(k, v, *cache[1:], **rows.by_table, **how)
        fg.append_kv(k[:0], v[:0], *cache[1:], slot_mapping=none, **how)
        fg.append_kv(rows.k, rows.v, *cache[1:], slot_mapping=torch.full((6,), -1), **how)
    assert same(cache, before)


# ---- what no sequence of an engine does: refused on the CPU, skipped by the kernel

TABLE = torch.tensor([[3, 5, 1], [7, 2, 0]], dtype=torch.int32)
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"page_table": TABLE - 4}, "a page of a new row lies outside", "page_table"),
    ({"page_table": TABLE + 10}, "a page of a new row lies outside", "page_table"),
    ({"page_table": TABLE[:, :1]}, "a position lies behind the pages", "page_table"),
    ({"page_table": TABLE[:, :0]}, "a position lies behind the pages", "page_table"),
    ({"cache_seqlens": [3, 13]}, "a position lies behind the pages", "page_table"),
    ({"cache_seqlens": [2**31 - 1, 12]}, "a position lies behind the pages", "page_table"),
    ({"cache_seqlens": [3, 2]}, "fewer keys than are appended", "cache_seqlens"),
    ({"cache_seqlens": [-(2**31), 12]}, "fewer keys than are appended", "cache_seqlens"),
    ({"slot_mapping": [0, 1, 2, 3, 4, 48]}, "a slot lies outside", "slot_mapping"),
    ({"slot_mapping": [0, 1, 2, 3, 4, 2**32]}, "a slot lies outside", "slot_mapping"),
    ({"slot_mapping": [0, 1, 2, 3, 4, -2]}, "a slot lies outside", "slot_mapping"),
    ({"cu_seqlens": [0, 4, 7]}, "does not ascend", "cu_seqlens"),
    ({"cu_seqlens": [1, 3, 6]}, "does not ascend", "cu_seqlens"),
    ({"cu_seqlens": [0, 2**31 - 1, -(2**31)]}, "does not ascend", "cu_seqlens"),
]
SHAPE, DIMS = (12, HEADS, 4), (8, 8)


def bad_call(change: dict[str, Any]) -> tuple[Appended, dict[str, Tensor]]:
    """Six new rows, of two sequences."""
    packed = "cu_seqlens" in change
    rows = rows_of((3, 3), (3, 12), SHAPE, DIMS, HALF, packed=packed)
    given = {**rows.by_table, "page_table": TABLE}
    if "slot_mapping" in change:
        given = rows.by_slots
    return rows, {
        name: torch.as_tensor(change.get(name, tensor), dtype=tensor.dtype)
        for name, tensor in given.items()
    }


def launch(rows: Appended, cache: Cache, given: dict[str, Tensor], **options: Any) -> Any:
    """Launches the kernel without a check of contents, as on a GPU."""
    operands = AppendOperands(rows.k, rows.v, cache.k, cache.v, **given)
    return prepare(operands, "emulator", "sm_80").run(operands, LaunchOptions(**options))


@pytest.mark.parametrize(("change", "what", "argument"), BAD)
@pytest.mark.parametrize("how", [{}, {"backend": "emulator"}])
def test_contents_that_no_cache_has_are_refused_before_anything_is_written(
    change: dict[str, Any], what: str, argument: str, how: dict[str, str]
) -> None:
    rows, given = bad_call(change)
    cache, before = caches(2, "hnd", SHAPE, DIMS, HALF)
    with pytest.raises(fg.InputError, match=what) as error:
        fg.append_kv(rows.k, rows.v, *cache[1:], **given, **how)  # type: ignore[arg-type]
    assert f"argument {argument} of append_kv" in error.value.where
    assert error.value.numbers
    assert error.value.way_out
    assert same(cache, before)


@pytest.mark.parametrize("change", [change for change, *_ in BAD])
def test_the_kernel_skips_such_rows_and_writes_the_others(change: dict[str, Any]) -> None:
    rows, given = bad_call(change)
    cache, expected = caches(2, "hnd", SHAPE, DIMS, HALF)
    launch(rows, cache, given)
    pages, _, page = SHAPE
    if "slot_mapping" in given:
        slots = [
            slot if 0 <= slot < pages * page else -1 for slot in given["slot_mapping"].tolist()
        ]
    else:
        slots = [-1] * 6
        ends = given.get("cu_seqlens", torch.tensor([0, 3, 6])).tolist()
        for token in range(6):
            b = 1 if ends[1] <= token else 0
            position = int(given["cache_seqlens"][b]) - ends[b + 1] + token
            table = given["page_table"][b].tolist()
            if ends[b] <= token < ends[b + 1] and 0 <= position < len(table) * page:
                number = table[position // page]
                slots[token] = number * page + position % page if 0 <= number < pages else -1
    append_in_a_loop(rows.change(slots=torch.tensor(slots)), expected)
    assert same(cache, expected)
    assert slots.count(-1) < 6 or "page_table" in change or "cu_seqlens" in change


PAGE_BOUND = "if (to.page < 0 || to.page >= p.pages) return;"


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        (PAGE_BOUND, "", {"page_table": TABLE - 300}),  # below the caches
        (PAGE_BOUND, "if (to.page < 0) return;", {"page_table": TABLE + 900}),
        ("if (position < 0 || position >= (long long)p.max_pages * p.page_size)", "if (false)",
         {"cache_seqlens": [3, 2**30]}),  # an entry behind the table
        ("if (row >= p.tokens * p.heads) return;", "", {"cache_seqlens": [3, 12]}),
    ],
)  # fmt: skip
def test_a_missing_bound_is_named(
    old: str, new: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, given = bad_call(change)
    (cache,) = caches(1, "hnd", SHAPE, DIMS, HALF)
    launch(rows, cache, given)
    monkeypatch.setattr(append_kv, "_prepared", {})
    with planted("append_kv", old, new), caught("OutOfBounds"):
        launch(rows, cache, given)


def test_each_byte_of_a_row_is_read_once_and_written_once() -> None:
    shape, dims = (12, HEADS, 4), (64, 128)
    rows = rows_of((3, 3), (3, 14), shape, dims, HALF)
    (cache,) = caches(1, "nhd", shape, dims, HALF)
    rows.slots[2] = -1
    counters = launch(rows, cache, rows.by_slots)
    lanes = 8  # of a row, each of which reads the slot
    written = 2 * 5 * HEADS * sum(dims)
    assert counters.global_write_bytes == written
    assert counters.global_write_sectors == written // 32
    assert counters.global_read_bytes == written + 8 * lanes * 6 * HEADS


def test_every_order_of_blocks_writes_the_same_bytes() -> None:
    rows = rows_of((9, 9), (9, 14), (12, HEADS, 4), (64, 64), HALF)
    one, other = caches(2, "nhd", (12, HEADS, 4), (64, 64), HALF)
    launch(rows, one, rows.by_table)
    launch(rows, other, rows.by_table, order_seed=3)
    assert same(one, other)


def test_values_that_are_columns_of_the_keys_are_written_once() -> None:
    """The emulator would report two stores of the same bytes."""
    k = torch.randn(1, 2, 3, 32, generator=torch.Generator().manual_seed(1)).half()
    cache = torch.zeros(2, 2, 4, 32, dtype=HALF)
    places = torch.tensor([5, 0, 3])
    fg.append_kv(k, k[..., :16], cache, cache[..., :16], slot_mapping=places, backend="emulator")
    assert torch.equal(cache.transpose(1, 2).flatten(0, 1)[places], k[0].transpose(0, 1))
