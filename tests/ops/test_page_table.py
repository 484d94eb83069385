"""Page tables from FlashInfer's indptr, indices and last_page_len."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen as fg

Tensor = torch.Tensor


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


INDPTR, INDICES, LAST = int32(0, 2, 2, 3, 6), int32(5, 3, 9, 1, 0, 7), int32(4, 0, 1, 3)
TABLE = int32([5, 3, -1], [-1, -1, -1], [9, -1, -1], [1, 0, 7])
LENGTHS = int32(8, 0, 1, 11)


def check(found: tuple[Tensor, Tensor], width: int = 3) -> None:
    table, lengths = found
    assert table.dtype == lengths.dtype == torch.int32
    expected = torch.full((4, width), -1, dtype=torch.int32)
    expected[:, :3] = TABLE
    assert torch.equal(table, expected)
    assert torch.equal(lengths, LENGTHS)


def test_each_sequence_has_its_pages_in_order_and_counts_its_keys() -> None:
    check(fg.page_table(INDPTR, INDICES, LAST, 4))


def test_a_width_may_be_given_and_a_list_may_have_room_behind_its_end() -> None:
    check(fg.page_table(INDPTR, torch.cat([INDICES, int32(-5, 99)]), LAST, 4, max_pages=5), 5)


def test_there_may_be_no_pages_and_no_sequences() -> None:
    table, lengths = fg.page_table(int32(0, 0), int32(), int32(0), 16)
    assert (table.shape, lengths.tolist()) == ((1, 0), [0])
    table, lengths = fg.page_table(int32(0, 0), int32(), int32(0), 16, max_pages=2)
    assert (table.tolist(), lengths.tolist()) == ([[-1, -1]], [0])
    table, lengths = fg.page_table(int32(0), int32(), int32(), 16)
    assert (table.shape, lengths.shape) == ((0, 0), (0,))


def test_with_a_given_width_it_compiles_in_a_full_graph_and_takes_fakes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fg.page_table, backend="aot_eager", fullgraph=True)
    check(compiled(INDPTR, INDICES, LAST, 4, max_pages=4), 4)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(each) for each in (INDPTR, INDICES, LAST)]
        for device in ("cpu", "cuda"):  # on a GPU no contents are read
            moved = [torch.empty_like(each, device=device) for each in given]
            table, lengths = fg.page_table(*moved, 4, max_pages=7)
            assert (table.shape, lengths.shape) == ((4, 7), (4,))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"indptr": [0, 2]}, "indptr is not a torch tensor"),
    ({"indices": INDICES.long()}, "indices is not an int32 tensor"),
    ({"last_page_len": LAST[None]}, "last_page_len is not an int32 tensor"),
    ({"last_page_len": LAST[:3]}, "different numbers of sequences"),
    ({"page_size": 0}, "page_size is not a whole number"),
    ({"page_size": 2**31}, "page_size is not a whole number"),
    ({"max_pages": 10**400}, "max_pages is not a whole number"),
    ({"page_size": 2**28}, "more keys than kernels support"),
    ({"page_size": None}, "page_size is not a whole number"),
    ({"max_pages": -1}, "max_pages is not a whole number"),
    ({"max_pages": 2}, "more pages than the table is wide"),
    ({"indptr": int32(0, 2, 1, 3, 6)}, "does not ascend"),
    ({"indptr": int32(1, 2, 2, 3, 6)}, "does not ascend"),
    ({"indptr": int32(0, 2, 2, 3, 7)}, "does not ascend"),
    ({"last_page_len": int32(5, 0, 1, 3)}, "impossible number of keys"),
    ({"last_page_len": int32(4, 0, 0, 3)}, "impossible number of keys"),
    ({"last_page_len": int32(4, 1, 1, 3)}, "impossible number of keys"),
    ({"indices": int32(5, 3, -1, 1, 0, 7)}, "page number is negative"),
]


@pytest.mark.parametrize(("change", "what"), WRONG)
def test_wrong_arguments_are_named(change: dict[str, Any], what: str) -> None:
    given = {"indptr": INDPTR, "indices": INDICES, "last_page_len": LAST, "page_size": 4}
    with pytest.raises(fg.InputError, match=what) as error:
        fg.page_table(**given | change)
    assert next(iter(change)) in error.value.where
    assert error.value.numbers
    assert error.value.way_out


def test_the_result_is_what_append_kv_takes() -> None:
    table, lengths = fg.page_table(int32(0, 1, 3), int32(3, 0, 2), int32(2, 1), 2)
    k, cache = torch.randn(2, 1, 1, 8), torch.zeros(2, 4, 1, 2, 8)
    fg.append_kv(k, 2 * k, *cache, page_table=table, cache_seqlens=lengths)
    assert torch.equal(cache[0, [3, 2], 0, [1, 0]], k[:, 0, 0])
    assert torch.equal(cache[1, [3, 2], 0, [1, 0]], 2 * k[:, 0, 0])
    assert cache.count_nonzero() == 2 * k.numel()
