"""Atomic operations: result and returned value of every opcode, with and without contention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import agree, probe, run, run_ptx
from tests.ptx_emulator.test_conformance_integer import EDGES, M32, M64, signed

SEEDS = [None, 1, 2]


def s(v: int) -> int:
    return signed(v, 32)


UPDATES: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda old, b: old + b, "add.s32": lambda old, b: old + b,
    "exch.b32": lambda old, b: b, "and.b32": lambda old, b: old & b,
    "or.b32": lambda old, b: old | b, "xor.b32": lambda old, b: old ^ b,
    "min.u32": min, "max.u32": max,
    "min.s32": lambda old, b: min(s(old), s(b)), "max.s32": lambda old, b: max(s(old), s(b)),
    "inc.u32": lambda old, b: 0 if old >= b else old + 1,
    "dec.u32": lambda old, b: b if old == 0 or old > b else old - 1,
}  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared", ""])
@pytest.mark.parametrize("opcode", [*UPDATES])
def test_atom_returns_the_old_value_and_stores_the_new_one(opcode: str, space: str) -> None:
    old = np.repeat(np.array(EDGES[32], np.uint32), len(EDGES[32]))
    given = np.resize(np.array(EDGES[32], np.uint32), old.size)
    at = "[%at_e]" if space != "shared" else "[s]"
    st = "st.shared" if space == "shared" else "st.global"
    dot = f".{space}" if space else ""
    body = f""".reg .b32 s, t; .shared .align 4 .b8 room[512]; mov.u32 t, %tid.x;
        mov.u32 s, room; mad.lo.u32 s, t, 4, s;
        {st}.b32 {at}, %a; atom{dot}.{opcode} %d, {at}, %b; ld{st[2:]}.b32 %e, {at};"""
    got, after = probe(body, "u4 u4", old, given)
    want = [UPDATES[opcode](a, b) & M32 for a, b in zip(old.tolist(), given.tolist(), strict=True)]
    agree(got, old, old, given)
    agree(after, np.array(want, np.uint32), old, given)


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("add.u64", lambda old, b: (old + b) & M64),
        ("exch.b64", lambda old, b: b),
        ("max.u64", max),
        ("min.s64", lambda old, b: min(signed(old, 64), signed(b, 64)) & M64),
        ("or.b64", lambda old, b: old | b),
    ],
)
def test_atom_on_64_bits(opcode: str, function: Callable[[int, int], int]) -> None:
    old = np.repeat(np.array(EDGES[64], np.uint64), len(EDGES[64]))
    given = np.resize(np.array(EDGES[64], np.uint64), old.size)
    body = f"""st.global.b64 [%at_e], %a; atom.global.{opcode} %d, [%at_e], %b;
        ld.global.b64 %e, [%at_e];"""
    got, after = probe(body, "u8 u8", old, given)
    want = [function(a, b) for a, b in zip(old.tolist(), given.tolist(), strict=True)]
    agree(got, old, old, given)
    agree(after, np.array(want, np.uint64), old, given)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_cas_stores_only_where_the_old_value_matches(width: int) -> None:
    unit = f"u{width // 8}"
    old = np.array(EDGES[width] * 2, unit)
    compare = np.where(np.arange(old.size) % 2 == 0, old, old ^ 1).astype(unit)
    given = np.arange(old.size).astype(unit)
    body = f"""st.global.b{width} [%at_e], %a; atom.global.cas.b{width} %d, [%at_e], %b, %c;
        ld.global.b{width} %e, [%at_e];"""
    got, after = probe(body, f"{unit} {unit}", old, compare, given)
    agree(got, old, old)
    agree(after, np.where(compare == old, given, old), old, compare)


def test_atom_add_f32_f64_and_packed_halves() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 100)).astype(np.float32)
    body = (
        "st.global.f32 [%at_e], %a; atom.global.add.f32 %d, [%at_e], %b; ld.global.f32 %e, [%at_e];"
    )
    got, after = probe(body, "f4 f4", a, b)
    agree(got, a, a)
    agree(after, a + b, a, b)
    x, y = a.astype(np.float64) / 3, b.astype(np.float64) / 3
    got, after = probe(body.replace("f32", "f64"), "f8 f8", x, y)
    agree(after, x + y, x, y)
    halves = [v.astype(np.float16).view(np.uint32) for v in (a, b)]
    body = """st.global.b32 [%at_e], %a; atom.global.add.noftz.f16x2 %d, [%at_e], %b;
        ld.global.b32 %e, [%at_e];"""
    got, after = probe(body, "u4 u4", *halves)
    agree(got, halves[0], *halves)
    agree(after.view(np.float16), a.astype(np.float16) + b.astype(np.float16), a, b)


CUDA = r"""
typedef unsigned long long u64;
extern "C" __global__ void tickets(int* counter, int* seen) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    seen[i] = atomicAdd(counter, 1);
}
extern "C" __global__ void histogram(const int* in, int* out, int n) {
    __shared__ int bins[16];
    if (threadIdx.x < 16) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[in[i] & 15], 1);
    __syncthreads();
    if (threadIdx.x < 16) atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
}
extern "C" __global__ void cas_max(const float* in, unsigned* best, int* rounds) {
    unsigned mine = __float_as_uint(in[blockIdx.x * blockDim.x + threadIdx.x]), seen;
    unsigned old = *(volatile unsigned*)best;
    int turns = 0;
    do {
        seen = old;
        if (__uint_as_float(seen) >= __uint_as_float(mine)) break;
        old = atomicCAS(best, seen, mine);
        ++turns;
    } while (old != seen);
    rounds[blockIdx.x * blockDim.x + threadIdx.x] = turns;
}
extern "C" __global__ void lock_per_lane(int* lock, volatile int* sum) {
    bool done = false;                      // the spin-lock form that is safe in a warp
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            __threadfence();
            *sum = *sum + threadIdx.x;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}
extern "C" __global__ void reductions(const float* in, float* sum, int* low, u64* bits) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(sum, in[i]);
    atomicMin(low, (int)(in[i] * 100));
    atomicOr(bits, 1ull << (i % 64));
}
extern "C" __global__ void whole_numbers(const float* in, u64* sum, unsigned* greatest) {
    float x = in[blockIdx.x * blockDim.x + threadIdx.x];
    atomicAdd(sum, (u64)__float2ll_rn(x));
    atomicMax(greatest, __float_as_uint(fabsf(x)));
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_contended_tickets_are_each_given_once(seed: int | None) -> None:
    counter, seen = np.zeros(1, np.int32), np.zeros(320, np.int32)
    run(CUDA, "tickets", (5,), (64,), counter, seen, seed=seed)
    assert counter[0] == 320
    assert sorted(seen.tolist()) == list(range(320))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_histogram_in_shared_then_global_memory(seed: int | None) -> None:
    values = np.random.default_rng(2).integers(0, 1 << 20, 1000).astype(np.int32)
    out = np.zeros(16, np.int32)
    run(CUDA, "histogram", (3,), (96,), values, out, np.int32(1000), seed=seed)
    assert (out == np.bincount(values & 15, minlength=16)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cas_loop_ends_with_the_maximum(seed: int | None) -> None:
    values = np.random.default_rng(3).uniform(1, 100, 128).astype(np.float32)
    best, rounds = np.zeros(1, np.float32), np.zeros(128, np.int32)
    run(CUDA, "cas_max", (2,), (64,), values, best.view(np.uint32), rounds, seed=seed)
    assert best[0] == values.max()
    assert rounds.max() >= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spin_lock_taken_by_every_lane_of_a_warp(seed: int | None) -> None:
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    run(CUDA, "lock_per_lane", (1,), (64,), lock, total, seed=seed)
    assert total[0] == 63 * 32
    assert lock[0] == 0


def test_reductions_without_a_result() -> None:
    values = np.random.default_rng(4).integers(-50, 50, 192).astype(np.float32)
    total, low = np.zeros(1, np.float32), np.full(1, 1 << 30, np.int32)
    bits = np.zeros(1, np.uint64)
    run(CUDA, "reductions", (2,), (96,), values, total, low, bits)
    assert total[0] == values.sum()
    assert low[0] == 100 * values.min()
    assert bits[0] == M64


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_64_bits_carry_and_borrow_in_any_order(seed: int | None) -> None:
    values = np.random.default_rng(5).normal(scale=2.0**40, size=192).astype(np.float32)
    total, greatest = np.zeros(1, np.uint64), np.zeros(1, np.uint32)
    run(CUDA, "whole_numbers", (3,), (64,), values, total, greatest, seed=seed)
    assert total.view(np.int64)[0] == sum(round(float(x)) for x in values)
    assert greatest.view(np.float32)[0] == np.abs(values).max()


@pytest.mark.parametrize(
    ("number", "want"), [(3, 192), (-3, -192), (0x01234567_FFFFFFFF, 64 * 0x01234567_FFFFFFFF)]
)
@pytest.mark.parametrize("form", ["red.global.add.u64", "red.relaxed.gpu.global.add.u64"])
def test_red_on_64_bits_under_contention(form: str, number: int, want: int) -> None:
    ptx = f""".visible .entry k(.param .u64 p) {{ .reg .b64 %v; .reg .b64 %p;
        mov.b64 %v, {number & M64}; ld.param.u64 %p, [p]; {form} [%p], %v; ret; }}"""
    out = np.zeros(1, np.uint64)
    run_ptx(ptx, "k", 1, 64, out)
    assert out.view(np.int64)[0] == want


@pytest.mark.parametrize(
    ("opcode", "want"),
    [
        ("red.global.add.f32", np.float32(sum(range(64)))),
        ("red.relaxed.gpu.global.add.f32", np.float32(sum(range(64)))),
        ("red.add.f32", np.float32(sum(range(64)))),
        ("red.global.max.s32", np.float32(63.0)),  # the bits of positive floats order as integers
        ("red.global.max.u32", np.float32(63.0)),
        ("red.global.gpu.or.b32", None),
    ],
)
def test_red_under_contention(opcode: str, want: Any) -> None:
    ptx = f""".visible .entry k(.param .u64 p) {{ .reg .b32 %t; .reg .b32 %f; .reg .b64 %p;
        mov.u32 %t, %tid.x; cvt.rn.f32.u32 %f, %t; ld.param.u64 %p, [p];
        {opcode} [%p], %f; ret; }}"""
    out = np.zeros(1, np.float32)
    run_ptx(ptx, "k", 1, 64, out)
    if want is None:
        numbers = np.arange(64, dtype=np.float32).view(np.uint32)
        want = np.bitwise_or.reduce(numbers).view(np.float32)
    assert out.view(np.uint32)[0] == want.view(np.uint32)


@pytest.mark.parametrize(
    "form",
    [
        *("atom.acq_rel.gpu.global.add.u32", "atom.relaxed.cta.global.add.u32", "atom.add.u32"),
        *("atom.global.gpu.acq_rel.add.u32", "atom.global.gpu.relaxed.add.u32"),
    ],
)
def test_atom_takes_its_qualifiers_in_any_order_seen_in_the_wild(form: str) -> None:
    values = np.arange(64, dtype=np.uint32)
    body = f"st.global.b32 [%at_e], 5; {form} %d, [%at_e + 0], %a; ld.global.b32 %e, [%at_e];"
    got, after = probe(body, "u4 u4", values)
    assert (got == 5).all()
    agree(after, values + np.uint32(5), values)


@pytest.mark.parametrize(("space", "flushes"), [("global", True), ("shared", False)])
def test_a_float32_that_is_added_to_global_memory_is_flushed(space: str, flushes: bool) -> None:
    a, b = np.array([1e-40, 1e-40, -1e-40, 1.0], np.float32), np.float32(1e-40)
    body = ".shared .f32 s[4]; .reg .b32 at; mov.u32 at, s; mad.lo.u32 at, %index, 4, at;"
    place = "[at]" if space == "shared" else "[%at_a]"
    body += f"st.{space}.f32 {place}, %a; red.{space}.add.f32 {place}, %b;"
    body += f"ld.{space}.f32 %d, {place};"
    want = np.array([0, 0, 0, 1], np.float32) if flushes else a + b
    agree(probe(body, "f4", a.copy(), np.full(4, b)), want)


def test_cas_of_128_bits_compares_bits() -> None:
    """As numbers, NaNs differ from themselves, and zeros of both signs are equal."""
    old = np.array([0x7FF8000000000000, 0, 5], np.uint64)
    expected = np.array([0x7FF8000000000000, 1 << 63, 5], np.uint64)
    body = """.reg .b128 x, y, z; .shared .align 16 .b8 s[48]; .reg .b32 at; .reg .b64 low;
    mov.u32 at, s; mad.lo.u32 at, %index, 16, at; mov.b128 x, {%a, %a}; st.shared.b128 [at], x;
    mov.b128 y, {%b, %b}; mov.b64 low, 9; mov.b128 z, {low, low};
    atom.shared.cas.b128 x, [at], y, z; ld.shared.b64 %d, [at]; mov.b128 {low, %e}, x;"""
    new, before = probe(body, "u8 u8", old, expected)
    agree(new, np.array([9, 0, 9], np.uint64), old)
    agree(before, old, old)
