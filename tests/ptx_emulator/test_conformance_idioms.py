"""Idioms of real kernels: flags between warps and blocks, inlined functions, alternative syntax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ptx_emulator import launch
from ptx_emulator.errors import (
    DeadlockError,
    LaunchArguments,
    OutOfBounds,
    RaceError,
    UninitialisedRead,
)
from ptx_emulator.machine import scheduler
from tests.ptx_emulator.test_conformance import HEADER, agree, compiled, probe, run, run_ptx
from tests.support.nvrtc_helper import compile_ptx

SEEDS = [None, 1, 2, 3]

CUDA = r"""
#define T threadIdx.x
#ifndef FENCE
#define FENCE __threadfence()
#define BLOCK_FENCE __threadfence_block()
#define AFTER
#endif
extern "C" __global__ void flag_between_warps(const int* in, int* out) {
    __shared__ int data[32];
    __shared__ volatile int ready;
    if (T == 0) ready = 0;
    __syncthreads();
    if (T >= 32) {                            // the later warp produces, the earlier one spins
        data[T - 32] = in[T - 32] * 2;
        __threadfence_block();
        __syncwarp();
        if (T == 32) ready = 1;
    } else {
        while (ready == 0) {}
        __threadfence_block();
        out[T] = data[31 - T];
    }
}
extern "C" __global__ void flag_between_blocks(const int* in, int* mail, int* flag, int* out) {
    if (blockIdx.x == 1) {                    // the later block produces, the earlier one spins
        mail[T] = in[T] + 5;
        __syncthreads();
        if (T == 0) { __threadfence(); atomicExch(flag, 1); }
    } else {
        if (T == 0) { while (atomicAdd(flag, 0) == 0) {} __threadfence(); }
        __syncthreads();
        out[T] = *(volatile int*)&mail[63 - T];
    }
}
extern "C" __global__ void release_acquire(const int* in, int* mail, int* flag, int* out) {
    if (blockIdx.x == 1) {
        if (T == 0) {
            mail[0] = in[0] * 3;
            asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
        }
    } else if (T == 0) {
        int seen;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        while (seen == 0);
        out[0] = mail[0];
    }
}
// Every thread writes and executes a fence of its own, and one of them counts the block.
extern "C" __global__ void last_block(const int* in, int* mail, int* count, int* out) {
    __shared__ bool last;
    mail[blockIdx.x * 64 + T] = in[T] + blockIdx.x;
    FENCE;
    AFTER;
    __syncthreads();
    if (T == 0) last = atomicAdd(count, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    int sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += mail[i * 64 + 63 - T];
    out[T] = sum;
}
extern "C" __global__ void flag_of_a_group(const int* in, int* out) {
    __shared__ int data[64];
    __shared__ volatile int ready;
    if (T == 0) ready = 0;
    __syncthreads();
    if (T >= 64) {
        data[T - 64] = in[T - 64] * 2;
        BLOCK_FENCE;
        asm volatile("bar.sync 1, 64;" ::: "memory");
        if (T == 64) ready = 1;
    } else {
        while (ready == 0) {}
        __threadfence_block();
        out[T] = data[63 - T];
    }
}
#define ACQUIRE(seen, from) \
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory")
extern "C" __global__ void take_turns(int* turn, int* out) {
    for (int i = blockIdx.x; i < 40; i += 2) {
        int seen;
        if (T == 0) do ACQUIRE(seen, turn); while (seen != i);
        __syncwarp();
        out[T] += i;
        __syncwarp();
        if (T == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;"
                                 :: "l"(turn), "r"(i + 1) : "memory");
    }
}
extern "C" __global__ void gives_up(int* turn, int* out) {
    int seen, tries = 0;
    do ACQUIRE(seen, turn); while (seen != 99 && ++tries < 900);
    out[T] = tries;
}
extern "C" __global__ void far_apart(int* out, int last) {
    if (T == 0 && (blockIdx.x == 0 || blockIdx.x == last))
        out[0] = blockIdx.x;                                                     // BUG
    else out[blockIdx.x * 64 + T + 1] = 1;
}
__device__ __forceinline__ int fetch(const int* p, int i) {
    return p[i];                                                                 // INLINED
}
extern "C" __global__ void inlined(const int* in, int* out, int i) { out[T] = fetch(in, i) + 1; }
__device__ __noinline__ int call_fetch(const int* p, int i) {
    return p[i];                                                                 // CALLED
}
extern "C" __global__ void called(const int* in, int* out, int i) {
    out[T] = call_fetch(in, i) + 1;
}
extern "C" __global__ void __launch_bounds__(64) bounded(int* out) { out[T] = 1; }
extern "C" __global__ void tickets(int* counter, int* seen) {
    seen[blockIdx.x * 64 + T] = atomicAdd(counter, 1);
}
extern "C" __global__ void undefined_but_unused(const int* in, int* out) {
    int x, y;
    if (in[T] & 1) { x = in[T] * 3; y = x + 1; }
    for (int i = 0; i < 3; ++i) if (in[T] & 1) { x += y; y ^= i; }
    out[T] = in[T] & 1 ? x : 0;
}
"""


def line(mark: str) -> str:
    rows = CUDA.splitlines()
    return f"test.cu:{next(i for i, row in enumerate(rows, 1) if row.endswith('// ' + mark))}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warp_may_spin_on_a_flag_of_another(seed: int | None) -> None:
    values, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    run(CUDA, "flag_between_warps", (1,), (64,), values, out, seed=seed)
    assert (out == 2 * values[::-1]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_may_spin_on_a_flag_of_another(seed: int | None) -> None:
    values, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    mail, flag = np.zeros(64, np.int32), np.zeros(1, np.int32)
    run(CUDA, "flag_between_blocks", (2,), (64,), values, mail, flag, out, seed=seed)
    assert (out == values[::-1] + 5).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_who_polls_lets_others_run(seed: int | None) -> None:
    turn, out = np.zeros(1, np.int32), np.ones(32, np.int32)
    counters = launch(compile_ptx(CUDA), "take_turns", 2, 32, [turn, out], order_seed=seed)
    agree(out, np.full(32, 781, np.int32))
    assert counters.segment_runs < 40 * 40


@pytest.mark.parametrize("seed", SEEDS)
def test_polls_of_what_nobody_writes_are_a_deadlock(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_MOST_TURNS", 1)
    turn, out = np.full(1, 7, np.int32), np.ones(32, np.int32)
    with pytest.raises(DeadlockError, match=r"lanes 0 of 0-31, poll at test.cu:\d+: ld.acquire"):
        launch(compile_ptx(CUDA), "take_turns", 2, 32, [turn, out], order_seed=seed)


def test_a_poll_that_gives_up_is_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_MOST_TURNS", 1)
    out = np.zeros(32, np.int32)
    launch(compile_ptx(CUDA), "gives_up", 1, 32, [np.zeros(1, np.int32), out])
    agree(out, np.full(32, 900, np.int32))


@pytest.mark.parametrize("seed", SEEDS)
def test_release_and_acquire_order_two_blocks(seed: int | None) -> None:
    values, out = np.full(1, 14, np.int32), np.zeros(1, np.int32)
    mail, flag = np.zeros(1, np.int32), np.zeros(1, np.int32)
    run(CUDA, "release_acquire", (2,), (32,), values, mail, flag, out, seed=seed)
    assert out[0] == 42


def last_block(seed: int | None, source: str = CUDA) -> None:
    values, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    mail, count = np.zeros(256, np.int32), np.zeros(1, np.int32)
    run(source, "last_block", (4,), (64,), values, mail, count, out, seed=seed)
    assert (out == 4 * values[::-1] + 6).all()


def flag_of_a_group(seed: int | None, source: str = CUDA) -> None:
    values, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    run(source, "flag_of_a_group", (1,), (128,), values, out, seed=seed)
    assert (out == 2 * values[::-1]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_may_stand_between_fences_of_all_threads_and_the_flag_of_one(
    seed: int | None,
) -> None:
    last_block(seed)
    flag_of_a_group(seed)


WEAK = 'asm volatile("fence.acq_rel.gpu;" ::: "memory")'
DEFINES = {
    "no fence": ("", "", ""),
    "a fence that does not hold for other threads": (WEAK, WEAK, ""),
    "one fence alone": ("if (T == 0) __threadfence()", "if (T == 64) __threadfence_block()", ""),
}


@pytest.mark.parametrize("name", DEFINES)
@pytest.mark.parametrize("check", [last_block, flag_of_a_group])
def test_a_flag_behind_a_barrier_is_a_race_with(name: str, check: Callable[..., None]) -> None:
    fence, block_fence, after = DEFINES[name]
    head = f"#define FENCE {fence}\n#define BLOCK_FENCE {block_fence}\n#define AFTER {after}\n"
    for seed in SEEDS:
        with pytest.raises(RaceError, match="not ordered"):
            check(seed, head + CUDA)


@pytest.mark.parametrize(
    ("fence", "after"),
    [("__threadfence_block()", ""), ("__threadfence()", "mail[blockIdx.x * 64 + T] = in[T]")],
    ids=["a fence of the block", "a write after the fence"],
)
def test_a_count_of_blocks_is_a_race_with(fence: str, after: str) -> None:
    head = f"#define FENCE {fence}\n#define BLOCK_FENCE\n#define AFTER {after}\n"
    for seed in SEEDS:
        with pytest.raises(RaceError, match="not ordered"):
            last_block(seed, head + CUDA)


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_blocks_that_never_run_together_race_all_the_same(seed: int | None) -> None:
    blocks = 2500
    out = np.zeros(blocks * 64 + 1, np.int32)
    with pytest.raises(RaceError) as caught:
        run(CUDA, "far_apart", (blocks,), (64,), out, np.int32(blocks - 1), seed=seed)
    assert line("BUG") in str(caught.value)
    run(CUDA, "far_apart", (blocks,), (64,), out, np.int32(0), seed=seed)


@pytest.mark.parametrize(("kernel", "mark"), [("inlined", "INLINED"), ("called", "CALLED")])
def test_an_error_inside_a_function_points_at_its_line(kernel: str, mark: str) -> None:
    values, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    run(CUDA, kernel, (1,), (32,), values, out, np.int32(31))
    assert (out == 32).all()
    with pytest.raises(OutOfBounds) as caught:
        run(CUDA, kernel, (1,), (32,), values, out, np.int32(32))
    assert line(mark) in str(caught.value)
    assert kernel in str(caught.value)


def test_a_block_larger_than_the_kernel_allows_is_refused() -> None:
    out = np.zeros(128, np.int32)
    run(CUDA, "bounded", (1,), (64,), out)
    assert out.sum() == 64
    with pytest.raises(LaunchArguments):
        run(CUDA, "bounded", (1,), (128,), out)


def test_reqntid_is_required() -> None:
    ptx = """.visible .entry k(.param .u64 p) .reqntid 64, 1, 1 { .reg .b64 %p;
        ld.param.u64 %p, [p]; st.global.u32 [%p], 1; ret; }"""
    out = np.zeros(1, np.uint32)
    with pytest.raises(LaunchArguments):
        launch(HEADER + ptx, "k", (1, 1, 1), (32, 1, 1), [out])
    assert out[0] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_launch_is_reproducible(seed: int | None) -> None:
    orders = []
    for _ in range(2):
        counter, seen = np.zeros(1, np.int32), np.zeros(512, np.int32)
        launch(compiled(CUDA), "tickets", (8,), (64,), [counter, seen], order_seed=seed)
        orders.append(seen.tolist())
    assert orders[0] == orders[1]


def test_different_seeds_run_warps_in_different_orders() -> None:
    orders = set()
    for seed in range(6):
        counter, seen = np.zeros(1, np.int32), np.zeros(512, np.int32)
        launch(compiled(CUDA), "tickets", (8,), (64,), [counter, seen], order_seed=seed)
        orders.add(tuple(seen.tolist()))
    assert len(orders) > 1


def test_a_value_undefined_where_nobody_uses_it_is_fine() -> None:
    values, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    run(CUDA, "undefined_but_unused", (1,), (64,), values, out)
    for i in range(64):
        x, y = i * 3, i * 3 + 1
        for k in range(3):
            x, y = x + y, y ^ k
        assert out[i] == (x if i & 1 else 0)


def test_an_array_that_is_only_read_may_be_read_only() -> None:
    values, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    values.flags.writeable = False
    run(CUDA, "inlined", (1,), (32,), values, out, np.int32(3))
    assert (out == 4).all()


@pytest.mark.parametrize(
    "address",
    [
        *("[%at_a]", "[ %at_a ]", "[%at_a+0]", "[%at_a + 0]", "[q+-4]", "[ q + -4 ]", "[q+-0x4]"),
        *("[r+4]", "[%at_a+0x0]"),
    ],
)
def test_addresses_are_spelled_in_many_ways(address: str) -> None:
    values = np.random.default_rng(1).integers(0, 1 << 32, 64, np.uint32)
    body = f""".reg .b64 q, r; add.s64 q, %at_a, 4; add.s64 r, %at_a, -4;
        ld.global.b32 %d, {address};"""
    agree(probe(body, "u4", values), values, values)


def test_symbols_carry_offsets_and_shared_addresses_wrap() -> None:
    ptx = """.global .align 8 .b32 table[4] = {10, 20, 30, 0x28};
        .const .align 4 .b8 bytes[4] = {1, 2, 3, 255};
        .visible .entry k(.param .u64 p) { .reg .b64 %p, %q; .reg .b32 %r<8>;
        .shared .align 16 .b8 pad[64]; .shared .align 16 .b8 room[64]; ld.param.u64 %p, [p];
        ld.global.u32 %r0, [table+8]; st.global.u32 [%p], %r0; mov.u64 %q, table+4;
        ld.global.u32 %r0, [%q]; st.global.u32 [%p+4], %r0; cvta.global.u64 %q, %q;
        ld.u32 %r0, [%q+8]; st.global.u32 [%p+8], %r0; ld.const.s8 %r0, [bytes+3];
        st.global.u32 [%p+12], %r0; mov.u32 %r1, 77; st.shared.u32 [room+12], %r1;
        mov.u32 %r2, room; add.u32 %r2, %r2, -48; ld.shared.u32 %r3, [%r2+60];
        st.global.u32 [%p+16], %r3; mov.u32 %r2, room; sub.u32 %r2, 0, %r2; neg.s32 %r2, %r2;
        ld.shared.u32 %r3, [%r2+12]; st.global.u32 [%p+20], %r3; mov.u32 %r4, room+12;
        ld.shared.u32 %r3, [%r4]; st.global.u32 [%p+24], %r3; sub.u32 %r5, %r4, 4000;
        ld.shared.u32 %r3, [%r5+4000]; st.global.u32 [%p+28], %r3; ret; }"""
    out = np.zeros(8, np.uint32)
    run_ptx(ptx, "k", 1, 1, out)
    assert out.view(np.int32).tolist() == [30, 20, 40, -1, 77, 77, 77, 77]


@pytest.mark.parametrize(
    "form",
    [
        *("ca.shared.global [s], [g], 16", "cg.shared.global [s], [g], 16"),
        *("cg.shared.global.L2::128B [s], [g], 16", "ca.shared::cta.global [s], [g], 16"),
        *("cg.shared.global [ s + 0 ], [ g + 0 ], 0x10, 16", "cg.shared.global [s], [g], 16, full"),
        "cg.shared::cta.global.L2::256B [s], [g], 16, full",
    ],
)
def test_cp_async_is_spelled_in_many_ways(form: str) -> None:
    ptx = f""".visible .entry k(.param .u64 in, .param .u64 out) {{
        .reg .pred p; .reg .b32 t, s, full;
        .reg .b64 g, q, x, y; .shared .align 16 .b8 room[1024]; mov.u32 t, %tid.x; mov.u32 s, room;
        mad.lo.u32 s, t, 16, s; mov.u32 full, 16; setp.eq.u32 p, t, t; ld.param.u64 g, [in];
        mad.wide.u32 g, t, 16, g; ld.param.u64 q, [out]; mad.wide.u32 q, t, 16, q;
        @p cp.async.{form}; cp.async.commit_group; cp.async.wait_group 0;
        ld.shared.v2.b64 {{x, y}}, [s]; st.global.v2.b64 [q], {{y, x}}; ret; }}"""
    data, out = np.arange(128, dtype=np.uint64).reshape(64, 2), np.zeros((64, 2), np.uint64)
    run_ptx(ptx, "k", 1, 64, data, out)
    assert (out == data[:, ::-1]).all()


PARTLY_FILLED = """
struct Stack { int count, items[8]; };
__device__ __noinline__ int total(Stack s, int more) {
    int sum = 0;
    for (int i = 0; i < s.count + more; ++i) sum += s.items[i];  // the first item that is not set
    return sum;
}
extern "C" __global__ void passed(const int* in, int* out, int more) {
    Stack s;
    s.count = 0;
    for (int i = 0; i < 6; ++i) if (in[threadIdx.x] >> i & 1) s.items[s.count++] = i;
    out[threadIdx.x] = total(s, more);
}
"""


def test_a_structure_that_is_set_in_part_may_be_copied_but_not_used() -> None:
    """It is passed by value through local memory, where its copies have the same gaps."""
    values, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    ptx = compile_ptx(PARTLY_FILLED)
    launch(ptx, "passed", 1, 64, [values, out, np.int32(0)])
    assert out.tolist() == [sum(i for i in range(6) if v >> i & 1) for v in range(64)]
    with pytest.raises(UninitialisedRead, match="local memory is read") as caught:
        launch(ptx, "passed", 1, 64, [values, out, np.int32(1)])
    assert "the value is used by test.cu" in caught.value.numbers
