"""Tensor maps with ragged rows: an element more than once, addresses that wrap around."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.shared.tensormap import RAGGED_ROWS, TensorMapSpec
from ptx_emulator import TensorMap, launch
from ptx_emulator.errors import OutOfBounds
from tests.ptx_emulator.test_conformance import Array
from tests.support.tma_boxes import box_kernel, load, swizzled_by_hand

RNG = np.random.default_rng(7)


def ragged(array: Array, box: tuple[int, ...], span: int = 0, before: int = 0) -> TensorMap:
    """Of [heads, rows, columns]."""
    heads, rows, columns = array.shape
    dims, steps = (columns, rows, heads, 1), (*array.strides[1::-1], 0)
    spec = TensorMapSpec(array.dtype.name, dims, steps, (*box, 1, 1), span).ragged()
    return TensorMap(array, spec.box, span, dims=spec.dims, strides=spec.strides, before=before)


def place_in_sequence(first: int, end: int, row: int, head: int) -> tuple[int, ...]:
    """Coordinates of a row of the sequence [first, end)."""
    return (0, RAGGED_ROWS - (end - first) + row, head, end, RAGGED_ROWS)


SEQUENCES = [(0, 20), (0, 3), (3, 17), (17, 20), (5, 6), (8, 8)]


@pytest.mark.parametrize("span", [0, 64])
@pytest.mark.parametrize(("first", "end"), SEQUENCES)
def test_a_box_reads_zeros_where_its_sequence_has_ended(first: int, end: int, span: int) -> None:
    array = RNG.integers(1, 1 << 16, (3, 20, 32)).astype(np.uint16)
    for row, head in [(0, 1), (2, 2), (8, 0)]:
        got, counters = load(ragged(array, (32, 8), span), place_in_sequence(first, end, row, head))
        rows = array[head, first + row : min(first + row + 8, end)]
        want = np.zeros((8, 32), np.uint16)
        want[: len(rows)] = rows
        linear = want.reshape(-1).view(np.uint8)
        assert (got == (swizzled_by_hand(linear, span) if span else linear)).all()
        assert counters.global_read_bytes == rows.nbytes + 4 * 5 * 128


@pytest.mark.parametrize(("first", "end"), SEQUENCES)
def test_nothing_is_written_where_the_sequence_has_ended(first: int, end: int) -> None:
    array = np.full((3, 20, 32), 999, np.uint16)
    data = RNG.integers(1, 900, (8, 32)).astype(np.uint16)
    where = np.array(place_in_sequence(first, end, 2, 1), np.int32)
    ptx = box_kernel(5, 512, "store")
    launch(ptx, "k", 1, 128, [ragged(array, (32, 8)), where, data], 512)
    want = np.full((3, 20, 32), 999, np.uint16)
    here = want[1, first + 2 : min(first + 10, end)]
    here[:] = data[: len(here)]
    assert (array == want).all()


@pytest.mark.parametrize(
    ("row", "end", "offset"), [(-20, 5, -15 * 64), (-1, 0, -64), (-10, 20, (2 * 20 + 10) * 64)]
)
def test_a_box_of_a_map_with_ragged_rows_stays_inside_its_array(
    row: int, end: int, offset: int
) -> None:
    array = np.ones((2, 20, 32), np.uint16)
    head = int(offset > 0) * 2
    tensor = ragged(array, (32, 8))
    if head:  # a head more than the array has, and so the row behind its last
        dims = (*tensor.spec.dims[:2], 3, *tensor.spec.dims[3:])
        tensor = TensorMap(array, tensor.spec.box, dims=dims, strides=tensor.spec.strides)
    with pytest.raises(OutOfBounds, match="beyond its array") as caught:
        load(tensor, (0, RAGGED_ROWS + row, head, end, RAGGED_ROWS))
    assert f"offset {offset:,} of 2,560 bytes" in caught.value.numbers


def test_a_map_that_begins_before_its_array_may_store_and_not_load() -> None:
    # The write-only form of Triton's ragged descriptors. For loads it is a planted bug: one mode of
    # TMA reads the first element of a map for elements outside the tensor.
    array = np.full((20, 32), 999, np.uint16)
    how: dict[str, Any] = {"dims": (32, 20, 21), "strides": (64, 64), "before": 20 * 64}
    data = np.zeros((8, 32), np.uint16)
    where = np.array((0, 20 - 3, 5), np.int32)  # the last three rows of a sequence that ends at 5
    early = TensorMap(array, (32, 8, 1), **how)
    launch(box_kernel(3, 512, "store"), "k", 1, 128, [early, where, data], 512)
    assert not array[2:5].any()
    assert (array[5:] == 999).all()
    assert (array[:2] == 999).all()
    with pytest.raises(OutOfBounds, match="begins before its array") as caught:
        load(early, tuple(where))
    assert "1,280 B before it" in caught.value.numbers
