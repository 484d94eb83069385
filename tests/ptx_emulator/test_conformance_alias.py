"""Programs that fail if registers, lanes or blocks share arrays by mistake."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.shared.errors import EmulatorError
from tests.ptx_emulator.test_conformance import agree, probe, run, run_ptx

WORDS = np.random.default_rng(1).integers(0, 1 << 32, 256, np.uint32)
SEEDS = [None, 1]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("mov.b32 %d, %a; add.u32 %a, %a, 1;", WORDS),
        ("mov.b32 %d, %a; @p mov.b32 %d, 7;", np.where(WORDS & 1, 7, WORDS)),
        ("mov.b32 %d, %a; @p add.u32 %a, %a, 1; sub.u32 %d, %a, %d;", WORDS & 1),
        ("mov.b32 x, %a; mov.b32 %d, x; not.b32 x, x; not.b32 x, x;", WORDS),
        ("mov.b64 l, {%a, 5}; mov.b64 {x, %d}, l; mov.b64 l, {9, 9}; add.u32 %d, %d, x;",
         WORDS + 5),
        ("mov.b32 {h, k}, %a; mov.b32 %d, {k, h}; mov.b16 h, 0;", WORDS >> 16 | WORDS << 16),
        ("mov.b32 {h, k}, %a; mov.b32 {k, h}, %a; mov.b32 %d, {h, k};", WORDS >> 16 | WORDS << 16),
        ("mov.b64 l, {%a, %a}; mov.b64 {x, %a}, l; mov.b32 %d, x;", WORDS),
        ("mad.lo.u32 %a, %a, %a, %a; mov.b32 %d, %a;", WORDS * WORDS + WORDS),
        ("mul.wide.u32 l, %a, %a; mad.wide.u32 l, %a, 3, l; cvt.u32.u64 %d, l;",
         WORDS * WORDS + WORDS * 3),
        ("shf.l.wrap.b32 %a, %a, %a, 8; mov.b32 %d, %a;", WORDS << 8 | WORDS >> 24),
        ("setp.ne.and.b32 p|q, %a, 0, p; selp.b32 %d, 1, 0, p;", WORDS & 1),
        ("setp.eq.and.b32 p|q, %a, %a, p; selp.b32 %d, 1, 0, p;", WORDS & 1),
        ("add.u32 %a, %a, %a; selp.b32 %d, %a, %a, p; add.u32 %a, %a, 1;", WORDS * 2),
    ],
    ids=lambda v: v[:28] if isinstance(v, str) else "",
)  # fmt: skip
def test_an_instruction_reads_before_it_writes_and_changes_nothing_else(
    body: str, want: np.ndarray
) -> None:
    start = """.reg .pred p, q; .reg .b32 x; .reg .b64 l; .reg .b16 h, k;
        and.b32 x, %a, 1; setp.ne.s32 p, x, 0; """
    agree(probe(start + body, "u4", WORDS), want.astype(np.uint32), WORDS)


def test_loads_may_overwrite_their_own_address() -> None:
    body = """.reg .b32 s, t, v; .shared .align 16 .b8 room[2048]; mov.u32 t, %tid.x;
        mov.u32 s, room; mad.lo.u32 s, t, 16, s; add.u32 v, %a, 1;
        st.shared.v4.b32 [s], {%a, v, %a, v}; ld.shared.v4.b32 {v, s, %d, t}, [s];
        add.u32 %d, %d, s; ld.global.u32 %at_a, [%at_a]; cvt.u32.u64 %e, %at_a;"""
    total, loaded = probe(body, "u4 u4", WORDS)
    agree(total, WORDS * 2 + np.uint32(1), WORDS)
    agree(loaded, WORDS, WORDS)


def test_shuffles_and_matrices_may_overwrite_their_sources() -> None:
    body = """shfl.sync.bfly.b32 %a, %a, 1, 31, -1; shfl.sync.bfly.b32 %a, %a, 2, 31, -1;
        mov.b32 %d, %a;"""
    agree(probe(body, "u4", WORDS), WORDS.reshape(-1, 32)[:, np.arange(32) ^ 3].reshape(-1), WORDS)
    ptx = """.visible .entry k(.param .u64 p) { .reg .b32 %r<6>, %t; .reg .b64 %p;
        .shared .align 16 .b8 s[512]; mov.u32 %t, %tid.x; ld.param.u64 %p, [p];
        mad.wide.u32 %p, %t, 16, %p; ld.global.v4.b32 {%r0,%r1,%r2,%r3}, [%p];
        mov.u32 %r4, s; mad.lo.u32 %r4, %t, 16, %r4; st.shared.v4.b32 [%r4], {%r0,%r1,%r2,%r3};
        bar.sync 0; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4,%r1,%r2,%r3}, [%r4];
        mov.b32 %r5, %r4;
        mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r4,%r1}, {%r4,%r1,%r2,%r3}, {%r4,%r2},
            {%r4,%r1};
        st.global.v2.b32 [%p], {%r4,%r1}; st.global.v2.b32 [%p+8], {%r5,%r2}; ret; }"""
    rows = np.random.default_rng(2).integers(-3, 4, (4, 8, 8)).astype(np.float16)
    out = rows.copy().reshape(32, 8)
    run_ptx(ptx, "k", 1, 32, out)
    a = np.block([[rows[0], rows[2]], [rows[1], rows[3]]]).astype(np.float64)
    b = np.concatenate([rows[0].T, rows[2].T]).astype(np.float64)
    want = a @ b + np.concatenate([rows[0], rows[1]])
    halves = out.reshape(8, 4, 4, 2)
    assert (halves[:, :, 0].reshape(8, 8) == want[:8]).all()
    assert (halves[:, :, 1].reshape(8, 8) == want[8:]).all()
    assert (halves[:, :, 2].reshape(8, 8) == rows[0]).all()
    assert (halves[:, :, 3].reshape(8, 8) == rows[2]).all()


def test_a_vector_of_atomics_may_overwrite_its_operands() -> None:
    ptx = """.visible .entry k(.param .u64 p) { .reg .f32 %f<2>; .reg .b64 %p;
        ld.param.u64 %p, [p]; mov.f32 %f0, 0f3F800000; mov.f32 %f1, 0f40000000;
        atom.global.v2.f32.add {%f1, %f0}, [%p], {%f0, %f1};
        st.global.v2.f32 [%p+8], {%f0, %f1}; ret; }"""
    out = np.array([3, 4, 0, 0], np.float32)
    run_ptx(ptx, "k", 1, 1, out)
    assert out.tolist() == [4, 6, 4, 3]


def test_one_register_holds_floats_on_one_path_and_integers_on_the_other() -> None:
    body = """.reg .pred p; .reg .b32 x; and.b32 x, %a, 1; setp.ne.s32 p, x, 0;
        @p bra ODD; cvt.rn.f32.u32 %d, %a; bra JOIN; ODD: add.s32 %d, %a, 0x7fc00001;
        JOIN: mov.b32 %e, %d; add.f32 x, %d, 0f00000000; xor.b32 %d, %d, 0;"""
    values = np.arange(128, dtype=np.uint32)
    want = np.where(values & 1, values + 0x7FC00001, values.astype(np.float32).view(np.uint32))
    got, copy = probe(body, "u4 u4", values)
    agree(got, want.astype(np.uint32), values)
    agree(copy, want.astype(np.uint32), values)


CUDA = r"""
#define T threadIdx.x
extern "C" __global__ void swaps(const int* in, int* out) {
    int a = in[T], b = in[T] * 7 + 1, c = 3;
    for (int i = 0; i < (T & 15); ++i) { int t = a; a = b; b = c; c = t + i; }
    out[3 * T] = a; out[3 * T + 1] = b; out[3 * T + 2] = c;
}
extern "C" __global__ void triangular(const int* in, int* out) {
    __shared__ int s[64];
    int sum = 0;                              // block b takes b + 1 steps, with barriers
    for (int i = 0; i <= blockIdx.x; ++i) {
        s[T] = in[64 * i + T];
        __syncthreads();
        sum += s[63 - T] * (blockIdx.x % 2 ? 1 : i);
        __syncthreads();
    }
    out[64 * blockIdx.x + T] = sum;
}
extern "C" __global__ void by_block(const int* in, int* out) {
    __shared__ int s[32];
    int b = blockIdx.x, x = in[32 * b + T];
    if (b % 3 == 0) { s[T] = x; __syncthreads(); x = s[31 - T]; }
    else if (b % 3 == 1 && T < 16) x = -x;
    else if (b % 3 == 2) x = __shfl_xor_sync(~0u, x, 7);
    if (b == 4) return;
    out[32 * b + T] = x;
}
extern "C" __global__ void uniform_and_not(const int* in, int* out, int n) {
    int limit = n, steps = 0;                 // starts the same in every lane, then does not
    for (int i = 0; i < limit; ++i) {
        if (in[T] == i) limit = i + 3;
        if (i == 4 && (T & 1)) limit += 2;
        steps += limit;
    }
    out[T] = steps;
}
extern "C" __global__ void one_bad_lane(const int* in, int* out, int n) {
    int at = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + T;
    if (blockIdx.x == 2 && blockIdx.y == 1 && T == 77) at = n;
    out[at] = in[at % 64];                    // BUG
}
"""


def test_values_rotate_through_registers() -> None:
    values, out = np.arange(64, dtype=np.int32), np.zeros((64, 3), np.int32)
    run(CUDA, "swaps", (1,), (64,), values, out)
    for t in range(64):
        a, b, c = t, t * 7 + 1, 3
        for i in range(t & 15):
            a, b, c = b, c, a + i
        assert out[t].tolist() == [a, b, c]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_block_ends_its_loop_in_its_own_time(seed: int | None) -> None:
    values = np.random.default_rng(3).integers(0, 99, (9, 64)).astype(np.int32)
    out = np.zeros_like(values)
    run(CUDA, "triangular", (9,), (64,), values, out, seed=seed)
    for b in range(9):
        factor = np.ones(b + 1) if b % 2 else np.arange(b + 1)
        assert (out[b] == (values[: b + 1, ::-1] * factor[:, None]).sum(axis=0)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_part_ways(seed: int | None) -> None:
    values = np.arange(12 * 32, dtype=np.int32).reshape(12, 32)
    out = np.full_like(values, -1)
    run(CUDA, "by_block", (12,), (32,), values, out, seed=seed)
    lanes = np.arange(32)
    for b, row in enumerate(values):
        want = [row[::-1], np.where(lanes < 16, -row, row), row[lanes ^ 7]][b % 3]
        assert (out[b] == (want if b != 4 else -1)).all()


def test_a_uniform_value_that_stops_being_uniform() -> None:
    values, out = (np.arange(64) * 5 % 23).astype(np.int32), np.zeros(64, np.int32)
    run(CUDA, "uniform_and_not", (1,), (64,), values, out, np.int32(12))
    for t in range(64):
        limit, steps, i = 12, 0, 0
        while i < limit:
            limit = i + 3 if values[t] == i else limit
            limit += 2 if i == 4 and t & 1 else 0
            steps, i = steps + limit, i + 1
        assert out[t] == steps


@pytest.mark.parametrize("seed", SEEDS)
def test_an_error_names_the_block_the_warp_the_lane_and_the_line(seed: int | None) -> None:

    values, out = np.zeros(64, np.int32), np.zeros(4 * 2 * 96, np.int32)
    with pytest.raises(EmulatorError) as caught:
        run(CUDA, "one_bad_lane", (4, 2), (96,), values, out, np.int32(out.size), seed=seed)
    text = str(caught.value)
    line = next(i for i, t in enumerate(CUDA.splitlines(), 1) if t.endswith("// BUG"))
    for fact in ("one_bad_lane", "(2, 1, 0)", "warp 2", "lane 13", f"test.cu:{line}", "st.global"):
        assert fact in text, text
