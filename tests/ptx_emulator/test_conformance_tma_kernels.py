"""Kernels of tensor copies and plain bulk copies: reductions, groups, maps in structs, phases."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import TensorMap, launch
from tests.support.hopper_ptx import hopper_ptx

SEEDS = [None, 1, 2]
RNG = np.random.default_rng(7)

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


def test_a_reduction_of_a_box_that_is_wider_than_the_tensor_adds_what_is_inside() -> None:
    sums, given = np.zeros((10, 16), np.float32), RNG.integers(0, 9, (8, 32)).astype(np.float32)
    arguments = [TensorMap(sums, (32, 8)), given]
    launch(hopper_ptx(CUDA), "accumulate", 1, 32, arguments, 1024)
    assert (sums[4:] == given[:6, :16]).all()
    assert not sums[:4].any()
