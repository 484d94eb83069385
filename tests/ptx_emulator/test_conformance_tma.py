"""Tensor copies against numpy: ranks, types, strides, borders, swizzles, stores, reductions."""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.shared.errors import LaunchError
from ptx_emulator import TensorMap, launch
from ptx_emulator.errors import LaunchArguments, Misaligned, UnknownInstruction
from ptx_emulator.machine.tma import boxes
from tests.ptx_emulator.test_conformance import Array
from tests.support.tma_boxes import box_kernel, load, swizzled_by_hand

SEEDS = [None, 1, 2]
RNG = np.random.default_rng(7)


def padded_box(array: Array, at: tuple[int, ...], box: tuple[int, ...]) -> Array:
    """The box by hand: outermost dimension first, zero where it leaves the array."""
    out = np.zeros(box[::-1], array.dtype)
    for place in itertools.product(*(range(side) for side in out.shape)):
        source = [start + step for start, step in zip(at[::-1], place, strict=True)]
        if all(0 <= i < side for i, side in zip(source, array.shape, strict=True)):
            out[place] = array[tuple(source)]
    return out


CASES: list[tuple[str, tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]] = [
    ("uint8", (50,), (32,), [(0,), (16,), (30,), (-5,), (60,)]),
    ("uint16", (8, 40), (16, 4), [(0, 0), (8, 2), (32, 6), (-8, -1), (3, 1), (37, 7)]),
    ("int32", (6, 5, 12), (4, 3, 2), [(0, 0, 0), (8, 3, 5), (-1, -2, -1), (100, 0, 0)]),
    ("float32", (3, 4, 5, 8), (8, 2, 2, 2), [(0, 0, 0, 0), (0, 4, 3, 2), (-4, -1, 0, 1)]),
    ("uint64", (2, 3, 2, 3, 4), (2, 2, 2, 2, 2), [(0, 0, 0, 0, 0), (2, 1, 1, 2, 1)]),
    ("float16", (7, 24), (8, 256), [(0, 0), (16, -250), (0, 3)]),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("dtype", "shape", "box", "places"), CASES)
def test_loads_of_every_rank(
    dtype: str,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    places: list[tuple[int, ...]],
    seed: int | None,
) -> None:
    # Room behind the rows keeps strides at multiples of 16 bytes.
    size = np.dtype(dtype).itemsize
    inner = -(-shape[-1] * size // 16) * 16 // size
    full = RNG.integers(1, 250, (*shape[:-1], inner)).astype(dtype)
    array = full[..., : shape[-1]]
    for at in places:
        got, counters = load(TensorMap(array, box), at, seed)
        want = padded_box(array, at, box)
        assert (got.view(dtype) == want.reshape(-1)).all(), at
        inside = np.count_nonzero(want) * size
        assert counters.global_read_bytes == inside + 4 * len(at) * 128
        assert counters.shared_write_bytes == want.nbytes


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzles_permute_chunks_of_each_row(span: int) -> None:
    array = RNG.integers(1, 1 << 16, (40, 3 * span // 2)).astype(np.uint16)
    box = (span // 2, 24)
    for at in [(0, 0), (span // 2, 20)]:
        linear = padded_box(array, at, box).reshape(-1).view(np.uint8)
        got, _ = load(TensorMap(array, box, span), at)
        assert (got == swizzled_by_hand(linear, span)).all()


def test_the_swizzle_depends_on_the_address_and_not_on_the_box() -> None:
    array = RNG.integers(1, 1 << 16, (64, 64)).astype(np.uint16)
    linear = array[:16].reshape(-1).view(np.uint8)
    got, _ = load(TensorMap(array, (64, 16), 128), (0, 0), offset=3 * 128)
    pad = np.zeros(3 * 128, np.uint8)
    want = swizzled_by_hand(np.concatenate([pad, linear]), 128)[3 * 128 :]
    assert (got == want).all()


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Array, tuple[int, ...], list[tuple[int, ...]]]:
    """A tensor, a box and places of it, which may lie anywhere around the tensor."""
    dtype = draw(st.sampled_from(["uint8", "uint16", "float32", "int64"]))
    size = np.dtype(dtype).itemsize
    rank = draw(st.integers(1, 5))
    dims = [draw(st.integers(1, 40 // size))] + [draw(st.integers(1, 4)) for _ in range(rank - 1)]
    box = [draw(st.integers(1, 3)) * 16 // size] + [
        draw(st.integers(1, 3)) for _ in range(rank - 1)
    ]
    inner = -(-dims[0] * size // 16) * 16 // size
    full = (1 + np.arange(inner * math.prod(dims[1:])) % 250).astype(dtype)
    array = full.reshape(*dims[:0:-1], inner)[..., : dims[0]]
    place = st.tuples(
        *(st.integers(-side - 1, dim + 1) for side, dim in zip(box, dims, strict=True))
    )
    return array, tuple(box), draw(st.lists(place, min_size=1, max_size=3))


@given(tensors())
def test_boxes_are_found_wherever_they_lie(
    case: tuple[Array, tuple[int, ...], list[tuple[int, ...]]],
) -> None:
    array, box, places = case
    spec = TensorMap(array, box).spec
    found = boxes(spec, 1 << 20, np.array(places))
    low, high = np.lib.array_utils.byte_bounds(array)
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
    where = found.offsets[:, :, None] + np.arange(found.unit)
    taken = raw[np.clip(where, 0, len(raw) - 1)]
    if found.inside is not None:
        taken[~found.inside] = 0
    want = np.stack([padded_box(array, at, box).reshape(-1) for at in places])
    assert np.array_equal(taken.reshape(len(places), -1).view(array.dtype), want)
    assert found.bytes == int(np.count_nonzero(want)) * array.itemsize
    if found.wide_offsets is not None:
        ranges = found.wide_offsets[:, :, None] + np.arange(found.wide_unit)
        assert np.array_equal(ranges.reshape(len(places), -1), where.reshape(len(places), -1))
        assert not (ranges[..., 0] % found.wide_unit).any()


def test_any_strides_serve_as_a_tensor() -> None:
    batch = RNG.integers(1, 1000, (2, 10, 3, 16)).astype(np.int32)  # [B, N, H, D]
    heads = batch.transpose(0, 2, 1, 3)
    got, _ = load(TensorMap(heads, (8, 4, 2, 1)), (8, 5, 1, 1))
    assert (got.view(np.int32) == heads[1, 1:3, 5:9, 8:].reshape(-1)).all()
    # The same rows for every index of a dimension without a stride.
    tensor = TensorMap(batch, (4, 2, 3), dims=(16, 10, 3), strides=(3 * 64, 0))
    got, _ = load(tensor, (4, 2, 0))
    assert (got.view(np.int32).reshape(3, 2, 4) == batch[0, 2:4, 0, 4:8]).all()


def store(
    how: str, array: Array, box: tuple[int, ...], at: tuple[int, ...], span: int = 0
) -> Array:
    """Puts a box of random data into a tensor; returns the data, outermost dimension first."""
    tensor = TensorMap(array, box, span, dtype="bfloat16" if how.endswith("bf16") else None)
    size = tensor.spec.box_bytes
    data = RNG.integers(0, 100, size // array.itemsize).astype(array.dtype)
    if how.endswith("bf16"):
        data = (data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    raw = swizzled_by_hand(data.view(np.uint8), span) if span else data
    ptx = box_kernel(len(at), size, how.removesuffix("/bf16"))
    launch(ptx, "k", 1, 128, [tensor, np.array(at, np.int32), raw], size)
    return data.reshape(box[::-1])


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("at", [(0, 0), (16, 3), (40, 18), (-8, -2)])
def test_stores_leave_out_what_lies_outside(at: tuple[int, int], span: int) -> None:
    array = np.full((20, 64), 999, np.uint16)
    box = (span // 2 or 24, 5)
    want = np.full((32, 256), 999, np.uint16)  # with a margin of 8 rows and 64 columns
    data = store("store", array, box, at, span)
    want[8 + at[1] : 13 + at[1], 64 + at[0] : 64 + at[0] + box[0]] = data
    assert (array == want[8:28, 64:128]).all()


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        *itertools.product(["add", "min", "max"], ["uint32", "int32", "uint64", "float16"]),
        ("add", "float32"),
        ("add", "float64"),
        *itertools.product(["and", "or", "xor"], ["uint32", "uint64"]),
    ],
)
def test_reductions_combine_with_what_is_there(operation: str, dtype: str) -> None:
    function: Any = {
        **{"add": np.add, "min": np.minimum, "max": np.maximum},
        **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    }[operation]
    before = RNG.integers(0, 100, (6, 16)).astype(dtype)
    array = before.copy()
    data = store(operation, array, (8, 4), (12 if dtype != "uint64" else 8, 3))
    want = before.copy()
    columns = slice(12, 16) if dtype != "uint64" else slice(8, 16)
    want[3:6, columns] = function(before[3:6, columns], data[:3, : columns.stop - columns.start])
    assert (array == want).all()


def test_bfloat16_is_added_as_bfloat16() -> None:
    def number(bits: Array) -> Array:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    array = (np.arange(64, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(4, 16)
    before = array.copy()
    data = store("add/bf16", array, (16, 4), (0, 0))
    exact = number(before) + number(data)
    assert np.abs(number(array) - exact).max() <= np.abs(exact).max() / 256


def test_a_profile_has_the_bytes_of_copies() -> None:
    array = RNG.integers(1, 100, (20, 64)).astype(np.uint16)
    _, counters = load(TensorMap(array, (64, 8), 128), (0, 16))
    totals = dict(counters.by_instruction())
    copy = next(t for text, t in totals.items() if text.startswith("cp.async.bulk.tensor"))
    assert copy.global_bytes == 4 * 128
    assert copy.sectors == copy.sectors_least == 4 * 4
    assert copy.shared_bytes == 8 * 128
    assert copy.wavefronts == copy.wavefronts_least == 8
    assert counters.recorded is not None
    buffer = next(b for b in counters.recorded.buffers if b.label == "argument 0")
    assert buffer.read == 4 * 128
    assert counters.total().warps["barrier"] > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"box": (7,)}, "multiple of 16 bytes"),
        ({"box": (8,)}, "this number of dimensions"),
        ({"box": (8, 257)}, "a box of this size"),
        ({"box": (8, 0)}, "a box of this size"),
        ({"box": (64, 8), "swizzle": 64}, "wider than the span"),
        ({"swizzle": 16}, "this swizzle"),
        ({"strides": (130,)}, "a stride of this size"),
        ({"strides": (128, 128)}, "this number of strides"),
        ({"dims": (64, 0)}, "a dimension of this size"),
        ({"dtype": "complex64"}, "this element type"),
    ],
)
def test_a_map_that_the_driver_would_refuse_is_refused(changes: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"box": (8, 8), "dims": (64, 16), "strides": (128,), **changes}
    if changes.get("box") == (7,):
        given["box"] = (7, 8)
    with pytest.raises(LaunchError, match=said):
        TensorMap(np.zeros((16, 64), np.uint16), **given)


def test_a_map_stays_inside_its_array() -> None:
    array = np.zeros((16, 64), np.uint16)
    with pytest.raises(LaunchArguments, match="beyond its array"):
        TensorMap(array, (8, 8), dims=(64, 17), strides=(128,))
    with pytest.raises(LaunchError, match="not aligned"):
        TensorMap(array[:, 1:], (8, 8))
    with pytest.raises(LaunchArguments, match="not contiguous"):
        TensorMap(array[:, ::2], (8, 8))


def test_copies_that_do_not_fit_their_map_are_refused() -> None:
    array = np.zeros((16, 64), np.uint16)
    where, out = np.zeros(3, np.int32), np.zeros(1024, np.uint8)
    ptx = box_kernel(3, 1024)
    with pytest.raises(LaunchArguments, match="number of dimensions"):
        launch(ptx, "k", 1, 128, [TensorMap(array, (64, 8)), where, out], 1024)
    with pytest.raises(LaunchArguments, match="narrower than the span"):
        load(TensorMap(array, (32, 8), 128), (0, 0))
    astray = box_kernel(2, 1024).replace(
        "mov.b64 %map, m;", "mov.b64 %map, m; add.u64 %map, %map, 64;"
    )
    with pytest.raises(LaunchArguments, match="no tensor map"):
        launch(astray, "k", 1, 128, [TensorMap(array, (64, 8)), where, out], 1024)
    repeats = TensorMap(array, (64, 8), dims=(64, 8), strides=(0,), dtype="float16")
    with pytest.raises(LaunchArguments, match="repeated elements"):
        launch(box_kernel(2, 1024, "add"), "k", 1, 128, [repeats, where, out], 1024)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".tile.", ".im2col."),
        ("::bytes\n", "::bytes.multicast::cluster\n"),
        (".3d.", ".6d."),
        (".global.tile", ".shared::cta.tile"),
    ],
)
def test_other_forms_are_refused(old: str, new: str) -> None:
    array, out = np.zeros((4, 4, 64), np.uint16), np.zeros(1024, np.uint8)
    ptx = box_kernel(3, 1024).replace(old, new)
    assert new in ptx
    with pytest.raises(UnknownInstruction):
        launch(ptx, "k", 1, 128, [TensorMap(array, (64, 4, 2)), np.zeros(3, np.int32), out], 1024)


def prefetch_ptx(body: str) -> str:
    return f""".version 8.6\n.target sm_90a\n.address_size 64
        .visible .entry k(.param .align 64 .b8 m[128], .param .u64 x) {{ .reg .b64 %map, %x;
        mov.b64 %map, m; cvta.param.u64 %map, %map; ld.param.u64 %x, [x]; {body} ret; }}"""


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("[%map, {0, 0}]", None, ""),
        ("[%map, {0, 0, 0}]", LaunchArguments, "number of dimensions"),
        ("[%x, {0, 0}]", LaunchArguments, "no tensor map lies"),
        ("[%x], 64", None, ""),
        ("[%x+16], 24", LaunchArguments, "not a multiple of 16"),
        ("[%x+8], 64", Misaligned, "misaligned 16-byte access to global memory"),
    ],
)
def test_a_prefetch_has_the_operands_of_a_copy(
    body: str, error: type[Exception] | None, said: str
) -> None:
    rank = f".tensor.{body.count(',')}d" if "{" in body else ""
    where = "L2.global.tile" if rank else "L2.global"
    ptx = prefetch_ptx(f"cp.async.bulk.prefetch{rank}.{where} {body};")
    array = np.zeros((16, 64), np.uint16)
    args = [TensorMap(array, (64, 8)), array]
    if error is None:
        launch(ptx, "k", 1, 1, args)
        return
    with pytest.raises(error, match=said):
        launch(ptx, "k", 1, 1, args)


def test_a_prefetch_with_a_word_that_it_does_not_have_is_refused() -> None:
    array = np.zeros((16, 64), np.uint16)
    ptx = prefetch_ptx("cp.async.bulk.prefetch.later.L2.global [%x], 64;")
    with pytest.raises(UnknownInstruction, match=r"\.later"):
        launch(ptx, "k", 1, 1, [TensorMap(array, (64, 8)), array])
