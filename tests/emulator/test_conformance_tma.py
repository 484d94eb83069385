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

from flashgen.emulator import Counters, TensorMap, launch
from flashgen.emulator.errors import LaunchArguments, OutOfBounds, UnknownInstruction
from flashgen.emulator.machine.tma import boxes
from flashgen.errors import LaunchError
from flashgen.tensormap import RAGGED_ROWS, TensorMapSpec
from tests.emulator.test_conformance import Array
from tests.support.hopper_ptx import hopper_ptx

SEEDS = [None, 1, 2]
# The constants lie first in device memory: what lies outside must be zero all the same.
HEADER = """.version 8.6
.target sm_90a
.address_size 64
.const .align 16 .b32 first[4] = {7, 7, 7, 7};
"""
RNG = np.random.default_rng(7)


def box_kernel(rank: int, size: int, how: str = "load", at: int = 0) -> str:
    """PTX: loads a box and writes it out as it lies, or puts it into the tensor.

    Args:
        rank: coordinates of the box, which the kernel reads from its second argument.
        size: bytes of the box, which the third argument gets or has.
        how: "load", "store", or the operation of a reduction.
        at: where in shared memory the box lies.
    """
    where = ", ".join(f"%c{i}" for i in range(rank))
    reads = "".join(f"ld.global.s32 %c{i}, [%where+{4 * i}];\n" for i in range(rank))
    copy = """L: setp.ge.u32 %p, %i, SIZE; @%p bra E; add.u32 %a, %i, %s; cvt.u64.u32 %x, %i;
        add.u64 %x, %x, %raw; ONE; add.u32 %i, %i, 512; bra L; E:"""
    if how != "load":
        name = "cp.async.bulk" if how == "store" else "cp.reduce.async.bulk"
        kind = "tile" if how == "store" else f"{how}.tile"
        body = copy.replace("ONE", "ld.global.u32 %v, [%x]; st.shared.u32 [%a], %v")
        body += f"""fence.proxy.async.shared::cta; bar.sync 0; @%q bra END;
            {name}.tensor.{rank}d.global.shared::cta.{kind}.bulk_group [%map, {{{where}}}], [%s];
            cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"""
    else:
        body = f"""@%q bra W; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], SIZE;
            cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
                [%s], [%map, {{{where}}}], [bar];
            W: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;"""
        body += copy.replace("ONE", "ld.shared.u32 %v, [%a]; st.global.u32 [%x], %v")
    return (
        HEADER
        + f""".extern .shared .align 1024 .b8 s[];
        .visible .entry k(.param .align 64 .b8 m[128], .param .u64 where, .param .u64 raw) {{
        .reg .pred %p, %q; .reg .b32 %t, %i, %a, %s, %v; .reg .s32 %c<5>;
        .reg .b64 %map, %where, %raw, %x; .shared .align 8 .b64 bar;
        mov.b64 %map, m; cvta.param.u64 %map, %map; ld.param.u64 %where, [where];
        ld.param.u64 %raw, [raw]; {reads} mov.u32 %t, %tid.x; setp.ne.u32 %q, %t, 0;
        mov.u32 %s, s; add.u32 %s, %s, {at}; shl.b32 %i, %t, 2;
        @!%q mbarrier.init.shared::cta.b64 [bar], 1;
        fence.mbarrier_init.release.cluster; bar.sync 0; {body} ret; }}""".replace(
            "SIZE", str(size)
        )
    )


def padded_box(array: Array, at: tuple[int, ...], box: tuple[int, ...]) -> Array:
    """The box by hand: outermost dimension first, zero where it leaves the array."""
    out = np.zeros(box[::-1], array.dtype)
    for place in itertools.product(*(range(side) for side in out.shape)):
        source = [start + step for start, step in zip(at[::-1], place, strict=True)]
        if all(0 <= i < side for i, side in zip(source, array.shape, strict=True)):
            out[place] = array[tuple(source)]
    return out


def load(
    tensor: TensorMap, at: tuple[int, ...], seed: int | None = None, offset: int = 0
) -> tuple[Array, Counters]:
    """Bytes of shared memory after a load."""
    size = tensor.spec.box_bytes
    out = np.zeros(size, np.uint8)
    ptx = box_kernel(len(at), size, at=offset)
    where = np.array(at, np.int32)
    arguments: list[Any] = [tensor, where, out]
    counters = launch(ptx, "k", 1, 128, arguments, size + offset, order_seed=seed, profile=True)
    return out, counters


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


def swizzled_by_hand(linear: Array, span: int) -> Array:
    """Rows of ``span`` bytes; in chunks of 16, chunk c of row r goes to place c ^ f(r) of it."""
    chunks = linear.reshape(-1, span // 16, 16)
    out = np.empty_like(chunks)
    for row, column in np.ndindex(*chunks.shape[:2]):
        turn = {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2}[span]
        out[row, column ^ turn] = chunks[row, column]
    return out.reshape(-1)


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
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
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


CUDA = r"""
extern __shared__ __align__(1024) unsigned char room[];
#define ROOM(type) type* s = (type*)room
KERNEL(accumulate)(MAP sums, const float* in) {
    ROOM(float);
    for (int i = T; i < 256; i += 32) s[i] = in[blockIdx.x * 256 + i];
    fence_async();
    __syncwarp();
    if (T == 0) {
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
                     " [%0, {%1, %2}], [%3];" :: "l"(&sums), "r"(0), "r"(4), "r"(SM(s)) : "memory");
        commit(); wait_read<0>();
    }
}
struct Params { const float* a; int n; CUtensorMap x; float scale; CUtensorMap y; };
KERNEL(maps_in_a_struct)(const __grid_constant__ Params p) {
    ROOM(float);
    __shared__ ull full;
    if (T == 0) {
        init(&full, 1);
        fence_init();
        const CUtensorMap* map = blockIdx.x ? &p.y : &p.x;
        asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
        asm volatile("cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%0, {%1}];"
                     :: "l"(map), "r"(p.n) : "memory");
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], 64;" :: "l"(p.a) : "memory");
        expect(&full, 64);
        ull policy;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                     ".L2::cache_hint [%0], [%1, {%2}], [%3], %4;"
                     :: "r"(SM(s)), "l"(map), "r"(p.n), "r"(SM(&full)), "l"(policy) : "memory");
        wait(&full, 0);
        for (int i = 0; i < 16; ++i) ((float*)p.a)[blockIdx.x * 16 + i] = s[i] * p.scale;
    }
}
KERNEL(four_tiles)(MAP in, MAP out) {                 // stores of four groups, two of them pending
    ROOM(unsigned char);
    __shared__ ull full[2];
    if (T == 0) {
        init(&full[0], 1); init(&full[1], 1);
        fence_init();
        for (int t = 0; t < 4; ++t) {
            unsigned char* stage = s + t % 2 * 1024;
            if (t >= 2) wait_read<1>();
            expect(&full[t % 2], 1024);
            load2(stage, &in, 0, 8 * t, &full[t % 2]);
            wait(&full[t % 2], t / 2);
            store2(&out, 0, 8 * t, stage);
            commit();
        }
        wait_read<0>();
    }
}
KERNEL(reads_too_early)(MAP in, unsigned short* out) {
    ROOM(unsigned short);
    __shared__ ull full;
    if (T == 0) { init(&full, 1); expect(&full, 1024); load2(s, &in, 0, 0, &full); }
    __syncthreads();
    out[T] = s[T];
    wait(&full, 0);
}
KERNEL(overwrites_too_early)(MAP out) {
    ROOM(unsigned short);
    for (int i = T; i < 512; i += 32) s[i] = 1;
    fence_async();
    __syncwarp();
    if (T == 0) { store2(&out, 0, 0, s); commit(); }
    __syncwarp();
    for (int i = T; i < 512; i += 32) s[i] = 2;
    if (T == 0) wait_read<0>();
}
KERNEL(plain)(const unsigned char* in, unsigned char* out, const int* sizes) {
    ROOM(unsigned char);
    __shared__ ull full;
    if (T == 0) {
        u size = sizes[blockIdx.x];
        init(&full, 1); fence_init(); expect(&full, size);
        load_bulk(s + 16, in + blockIdx.x * 512, size, &full);
        wait(&full, 0);
        store_bulk(out + blockIdx.x * 512, s + 16, size); commit(); wait_read<0>();
    }
}
KERNEL(rows_by_lanes)(const float* in, float* out, int early) {
    ROOM(float);
    __shared__ ull full;
    if (T == 0) { init(&full, 1); fence_init(); if (early) expect(&full, 2048); }
    __syncwarp();
    load_bulk(s + 16 * T, in + 512 * blockIdx.x + 16 * (31 - T), 64, &full);
    __syncwarp();
    if (T == 0 && !early) expect(&full, 2048);
    wait(&full, 0);
    for (int i = T; i < 512; i += 32) out[512 * blockIdx.x + i] = s[i];
}
KERNEL(a_phase_ends_between_two_copies)(const float* in, float* out) {
    ROOM(float);
    __shared__ ull full;
    if (T == 0) { init(&full, 1); fence_init(); expect(&full, 64); }
    __syncwarp();
    if (T < 2) load_bulk(s + 16 * T, in + 16 * T, 64, &full);
    wait(&full, 0);
    if (T == 0) expect(&full, 64);
    wait(&full, 1);
    out[T] = s[T];
}
KERNEL(plain_sum)(const float* in, float* out, unsigned short* half) {
    ROOM(float);
    for (int i = T; i < 128; i += 32) s[i] = in[i];
    fence_async();
    __syncwarp();
    if (T < 4) {                                      // each lane its own rows and group
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 128;"
                     :: "l"(out + 32 * T), "r"(SM(s + 32 * T)) : "memory");
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16"
                     " [%0], [%1], 16;" :: "l"(half + 8 * T), "r"(SM(s + 32 * T)) : "memory");
        commit(); wait_read<0>();
    }
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_add_up_in_the_same_box(seed: int | None) -> None:
    values = RNG.integers(0, 50, (40, 8, 32)).astype(np.float32)
    sums = np.ones((10, 32), np.float32)
    ptx = hopper_ptx(CUDA)
    launch(ptx, "accumulate", 40, 32, [TensorMap(sums, (32, 8)), values], 1024, order_seed=seed)
    assert (sums[:4] == 1).all()
    assert (sums[4:] == 1 + values.sum(axis=0)[:6]).all()


def test_maps_may_be_fields_of_a_parameter() -> None:
    x, y = np.arange(64, dtype=np.float32), -np.arange(64, dtype=np.float32)
    out = np.zeros((2, 16), np.float32)
    fields = (out, np.int32(9), TensorMap(x, (16,)), np.float32(3), TensorMap(y, (16,)))
    launch(hopper_ptx(CUDA), "maps_in_a_struct", 2, 32, [fields], 64)
    assert (out == 3 * np.stack([x[9:25], y[9:25]])).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_of_stores_are_waited_for_one_by_one(seed: int | None) -> None:
    source = RNG.integers(0, 1000, (32, 64)).astype(np.uint16)
    target = np.zeros_like(source)
    maps = [TensorMap(a, (64, 8), 128) for a in (source, target)]
    counters = launch(hopper_ptx(CUDA), "four_tiles", 1, 32, maps, 2048, order_seed=seed)
    assert (source == target).all()
    assert counters.global_read_bytes == counters.global_write_bytes == 4096
    assert counters.global_read_sectors == counters.global_write_sectors == 128
    assert counters.shared_read_bytes == counters.shared_write_bytes == 4096


def test_a_missing_wait_changes_the_results() -> None:
    source, out = np.ones((8, 64), np.uint16), np.full(32, 9, np.uint16)
    ptx = hopper_ptx(CUDA)
    launch(ptx, "reads_too_early", 1, 32, [TensorMap(source, (64, 8)), out], 1024, check=False)
    assert (out == 0).all()
    launch(ptx, "overwrites_too_early", 1, 32, [TensorMap(source, (64, 8))], 1024, check=False)
    assert (source == 2).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_plain_copies_have_their_own_sizes(seed: int | None) -> None:
    source = RNG.integers(1, 256, (6, 512)).astype(np.uint8)
    target = np.zeros_like(source)
    sizes = np.array([16, 512, 32, 48, 512, 496], np.int32)
    launch(hopper_ptx(CUDA), "plain", 6, 32, [source, target, sizes], 528, order_seed=seed)
    assert (target == np.where(np.arange(512) < sizes[:, None], source, 0)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("early", [0, 1])
def test_copies_of_many_lanes_complete_one_phase(early: int, seed: int | None) -> None:
    values = RNG.standard_normal((3, 32, 16)).astype(np.float32)
    out = np.zeros_like(values)
    launch(hopper_ptx(CUDA), "rows_by_lanes", 3, 32, [values, out, early], 2048, order_seed=seed)
    assert (out == values[:, ::-1]).all()


def test_a_copy_may_count_for_the_next_phase() -> None:
    values = RNG.standard_normal(32).astype(np.float32)
    out = np.zeros_like(values)
    launch(hopper_ptx(CUDA), "a_phase_ends_between_two_copies", 1, 32, [values, out], 128)
    assert (out == values).all()


def test_plain_reductions_add() -> None:
    values = RNG.integers(0, 100, 128).astype(np.float32)
    out = np.ones(128, np.float32)
    half = np.ones(32, np.float16)
    launch(hopper_ptx(CUDA), "plain_sum", 1, 32, [values, out, half.view(np.uint16)], 512)
    assert (out == 1 + values).all()
    bits = values.reshape(4, 32)[:, :4].copy().view(np.float16).reshape(-1)
    assert np.array_equal(half, 1 + bits, equal_nan=True)


def test_a_wrong_swizzle_gives_wrong_values() -> None:
    source = RNG.integers(0, 1000, (32, 64)).astype(np.uint16)
    target = np.zeros_like(source)
    maps = [TensorMap(source, (64, 8), 128), TensorMap(target, (64, 8))]
    launch(hopper_ptx(CUDA), "four_tiles", 1, 32, maps, 2048)
    assert (source[::8] == target[::8]).all()
    assert (source != target).any()


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


# ---- maps with ragged rows: an element more than once, addresses that wrap around --------------


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
