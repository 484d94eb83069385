"""Tensor maps in global memory: passed by pointer, inside structs, changed by kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.shared.errors import EmulatorError
from ptx_emulator import LaunchArguments, OutOfBounds, TensorMap, launch
from ptx_emulator.errors import FenceError, Misaligned
from tests.ptx_emulator.test_conformance import Array
from tests.ptx_emulator.test_conformance_planted import SEEDS
from tests.support.hopper_ptx import hopper_ptx

CUDA = r"""
#define TILE 512
#define COPY_BOX(map, column, row) \
    __shared__ __align__(128) unsigned short s[TILE]; \
    __shared__ ull full; \
    if (T == 0) { init(&full, 1); fence_init(); } \
    __syncthreads(); \
    if (T == 0) { expect(&full, 2 * TILE); load2(s, map, column, row, &full); } \
    wait(&full, 0); \
    for (int i = T; i < TILE; i += blockDim.x) out[blockIdx.x * TILE + i] = s[i];
struct Work { CUtensorMap map; int x, y; unsigned short* out; };
__device__ __forceinline__ void acquire(const void* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory");
}
KERNEL(by_pointer) (const CUtensorMap* map, unsigned short* out) { COPY_BOX(map, 0, 8) }
KERNEL(one_of_several) (const CUtensorMap* maps, unsigned short* out) {
    COPY_BOX(&maps[blockIdx.x], 0, 0)
}
KERNEL(in_a_struct) (const Work* work) {
    unsigned short* out = work->out;
    COPY_BOX(&work->map, work->x, work->y)
}
KERNEL(beside_the_map) (const Work* work) {
    unsigned short* out = work->out;
    COPY_BOX((const CUtensorMap*)((const char*)&work->map + 8), 0, 0)
}
#define REPLACE(field, type, where, value) \
    asm volatile("tensormap.replace.tile." field ".shared::cta.b1024." type " [%0], %1;" \
                 :: "r"(SM(where)), value : "memory")
// A block takes the map, points it at its own rows and uses the copy in global memory.
KERNEL(changed) (MAP map, unsigned short* out, CUtensorMap* maps, unsigned short* rows, u count) {
    __shared__ __align__(128) CUtensorMap mine;
    CUtensorMap* own = maps + blockIdx.x;
    if (T < 16) mine.opaque[T] = map.opaque[T];
    __syncwarp();
    if (T == 0) {
        REPLACE("global_address", "b64", &mine, "l"(rows + 64 * 8 * blockIdx.x));
        asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;"
                     :: "r"(SM(&mine)), "r"(count) : "memory");
    }
    __syncwarp();
    if (T < 32) {
        asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu"
                     ".sync.aligned [%0], [%1], 128;" :: "l"(own), "r"(SM(&mine)) : "memory");
        FIX(acquire(own);)
    }
    COPY_BOX(own, 0, 0)
}
#define SET(field, entry, value) \
    asm volatile("tensormap.replace.tile." field ".shared::cta.b1024.b32 [%0], " entry "%1;" \
                 :: "r"(SM(&mine)), value : "memory")
// A map of a matrix with 64 columns that no host has made, as a descriptor of Triton.
KERNEL(made) (unsigned short* out, CUtensorMap* own, unsigned short* rows, u count, u stride) {
    __shared__ __align__(128) CUtensorMap mine;
    if (T < 16) mine.opaque[T] = 0;
    __syncwarp();
    if (T == 0) {
        REPLACE("global_address", "b64", &mine, "l"(rows));
        asm volatile("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], 1;"
                     :: "r"(SM(&mine)) : "memory");
        SET("box_dim", "0, ", "r"(64));
        SET("box_dim", "1, ", "r"(8));
        SET("global_dim", "0, ", "r"(64));
        SET("global_dim", "1, ", "r"(count));
        asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;"
                     :: "r"(SM(&mine)), "l"(128ull) : "memory");
        SET("element_stride", "0, ", "r"(1));
        SET("element_stride", "1, ", "r"(stride));
        SET("elemtype", "", "n"(1));
        SET("interleave_layout", "", "n"(0));
        SET("swizzle_mode", "", "n"(0));
        SET("fill_mode", "", "n"(0));
    }
    __syncwarp();
    if (T < 32) {
        asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu"
                     ".sync.aligned [%0], [%1], 128;" :: "l"(own), "r"(SM(&mine)) : "memory");
        FIX(acquire(own);)
    }
    COPY_BOX(own, 0, 0)
}
KERNEL(wider) (MAP map, unsigned short* out, CUtensorMap* own) {
    if (T < 16) own->opaque[T] = map.opaque[T];
    __syncwarp();
    if (T == 0) {
        asm volatile("tensormap.replace.tile.box_dim.global.b1024.b32 [%0], 0, %1;"
                     :: "l"(own), "r"(64) : "memory");
        asm volatile("tensormap.replace.tile.swizzle_mode.global.b1024.b32 [%0], 3;"
                     :: "l"(own) : "memory");
        asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
        acquire(own);
    }
    COPY_BOX(own, 0, 0)
}
"""
VALUES = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
BOX = (64, 8)


def run(
    kernel: str, *args: Any, grid: int = 1, seed: int | None = None, fixed: bool = True
) -> None:
    launch(hopper_ptx(CUDA, fixed), kernel, grid, 64, list(args), order_seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_map_for_a_pointer_lies_in_global_memory(seed: int | None) -> None:
    out = np.zeros((8, 64), np.uint16)
    run("by_pointer", TensorMap(VALUES, BOX), out, seed=seed)
    assert (out == VALUES[8:16]).all()


def test_an_array_of_maps_lies_in_global_memory() -> None:
    out = np.zeros((3, 8, 64), np.uint16)
    maps = np.array([TensorMap(VALUES[8 * i :], BOX) for i in range(3)], object)
    run("one_of_several", maps, out, grid=3)
    assert (out.reshape(24, 64) == VALUES[:24]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_struct_in_global_memory_holds_a_map_numbers_and_pointers(seed: int | None) -> None:
    out = np.zeros((8, 64), np.uint16)
    work = np.array([TensorMap(VALUES, BOX), np.int32(0), np.int32(16), out], object)
    run("in_a_struct", work, seed=seed)
    assert (out == VALUES[16:24]).all()


def test_an_address_beside_a_map_is_refused() -> None:
    out = np.zeros((8, 64), np.uint16)
    work = np.array([TensorMap(VALUES, BOX), np.int32(0), np.int32(0), out], object)
    with pytest.raises((LaunchArguments, Misaligned), match="tensor map"):
        run("beside_the_map", work)
    with pytest.raises(LaunchArguments, match="no tensor map lies at this address") as caught:
        run("by_pointer", np.zeros(128, np.uint8), out)
    assert "maps among the arguments: none" in caught.value.numbers


def changed(count: int, fixed: bool = True, seed: int | None = None) -> Array:
    template, out = np.zeros((1, 64), np.uint16), np.zeros((4, 8, 64), np.uint16)
    store = np.array([TensorMap(template, BOX) for _ in range(4)], object)
    args = [TensorMap(template, BOX), out, store, VALUES, np.uint32(count)]
    run("changed", *args, grid=4, seed=seed, fixed=fixed)
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_change_copies_of_a_map_and_use_them(seed: int | None) -> None:
    assert (changed(8, seed=seed).reshape(32, 64) == VALUES[:32]).all()


def test_rows_beyond_a_changed_dimension_are_zero() -> None:
    out = changed(5)
    for block in range(4):
        assert (out[block, :5] == VALUES[8 * block : 8 * block + 5]).all()
        assert not out[block, 5:].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_changed_map_needs_its_fence(seed: int | None) -> None:
    with pytest.raises(FenceError, match="tensor map that the kernel has written") as caught:
        changed(8, fixed=False, seed=seed)
    assert "fence.proxy.tensormap" in caught.value.way_out


def made(out: Array, fixed: bool = True, stride: int = 1) -> None:
    room = np.zeros(256, np.uint8)
    own = room[-room.ctypes.data % 128 :][:128]
    run("made", out, own, VALUES[8:], np.uint32(5), np.uint32(stride), fixed=fixed)


def test_a_kernel_makes_a_map_of_nothing() -> None:
    out = np.ones((8, 64), np.uint16)
    made(out)
    assert (out[:5] == VALUES[8:13]).all()
    assert not out[5:].any()
    with pytest.raises(FenceError, match="tensor map that the kernel has written"):
        made(out, fixed=False)
    with pytest.raises(LaunchArguments, match="element strides other than 1"):
        made(out, stride=2)


def test_a_changed_map_must_stay_in_a_buffer() -> None:
    with pytest.raises(OutOfBounds, match="does not lie in a buffer"):
        changed(60)


def test_modes_and_boxes_can_be_changed() -> None:
    out, own = np.zeros((8, 64), np.uint16), TensorMap(VALUES, (8, 8))
    run("wider", TensorMap(VALUES, (8, 8)), out, own)
    chunks = VALUES[:8].reshape(8, 8, 8)
    want = np.stack([chunks[row][np.arange(8) ^ row] for row in range(8)])
    assert (out.reshape(8, 8, 8) == want).all()


@pytest.mark.parametrize("text", [
    "tensormap.replace.tile.global_dim.global.b1024.b64 [%p], 0, %x;",
    "tensormap.replace.tile.no_such_field.global.b1024.b32 [%p], 0;",
    "tensormap.replace.tile.global_stride.global.b1024.b64 [%p], 4, %x;",
])  # fmt: skip
def test_a_field_that_does_not_exist_is_refused(text: str) -> None:
    ptx = f""".version 8.3\n.target sm_90a\n.address_size 64
    .visible .entry k(.param .u64 m) {{ .reg .b64 %p, %x; ld.param.u64 %p, [m]; mov.u64 %x, 16;
    {text} ret; }}"""
    with pytest.raises(EmulatorError):
        launch(ptx, "k", 1, 1, [TensorMap(VALUES, BOX)])


@pytest.mark.parametrize(("dtype", "columns", "nan"), [("float16", 57, 0x7FFF), ("uint16", 64, 0)])
def test_elements_outside_a_map_are_nan_or_zero(dtype: str, columns: int, nan: int) -> None:
    """The box has rows 8 to 15 of twelve, and columns 0 to 63; one unit of copies is an element."""
    out = np.zeros((8, 64), np.uint16)
    dims, strides = (columns, 12), (128,)
    part = TensorMap(VALUES, BOX, dims=dims, strides=strides, dtype=dtype, fill_nan=nan != 0)
    run("by_pointer", part, out)
    inside = np.arange(64) < columns
    assert (out[:4] == np.where(inside, VALUES[8:12], nan)).all()
    assert (out[4:] == nan).all()


def test_maps_of_integers_do_not_fill_with_nan() -> None:
    with pytest.raises(LaunchArguments, match="cannot fill with NaN"):
        TensorMap(VALUES, BOX, fill_nan=True)
