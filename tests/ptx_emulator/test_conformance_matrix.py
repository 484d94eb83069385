"""ldmatrix, mma.sync and movmatrix: where each lane's registers lie in the matrices.

The fragment layouts are copied from the ISA's tables (G = lane / 4, T = lane % 4), independently
of any other code; the numbers are small integers so that every product and sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import Array, run, run_ptx

G, T = np.arange(32) // 4, np.arange(32) % 4
BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
Index = Callable[[int], tuple[Array, Array]]

# (row, column) of element i in each lane, in the order in which the registers hold them
A_K16: Index = lambda i: (G + 8 * (i // 2 % 2), 2 * T + i % 2 + 8 * (i // 4))  # noqa: E731
A_K8: Index = lambda i: (G + 8 * (i // 2), 2 * T + i % 2)  # noqa: E731
A_TF32: Index = lambda i: (G + 8 * (i % 2), T + 4 * (i // 2))  # noqa: E731
B_16BIT: Index = lambda i: (2 * T + i % 2 + 8 * (i // 2), G)  # noqa: E731
B_TF32: Index = lambda i: (T + 4 * i, G)  # noqa: E731
C_ANY: Index = lambda i: (G + 8 * (i // 2), 2 * T + i % 2)  # noqa: E731


def to_lanes(matrix: Array, index: Index) -> Array:
    """[32, registers] 32-bit words that hold `matrix` as the lanes of a warp do."""
    count = matrix.size // 32
    elements = np.stack([matrix[index(i)] for i in range(count)], axis=1)
    return np.ascontiguousarray(elements).view(np.uint32)


def from_lanes(words: Array, shape: tuple[int, int], kind: np.dtype[Any], index: Index) -> Array:
    elements, matrix = words.view(kind), np.zeros(shape, kind)
    for i in range(elements.shape[1]):
        matrix[index(i)] = elements[:, i]
    return matrix


def mma_text(opcode: str, a: int, b: int, c: int, times: int) -> str:
    """A warp per block: load the fragments, multiply `times` times into the same registers."""

    def registers(name: str, count: int) -> str:
        return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"

    def each(name: str, count: int, line: str) -> str:
        moves = "".join(
            line.format(r=f"%{name}{i}", at=f"[%p{name}+{4 * i}]") for i in range(count)
        )
        at = f"mad.wide.u32 %p{name}, %i, {4 * count}, %p{name};"
        return f"ld.param.u64 %p{name}, [p{name}]; {at} {moves}"

    product = f"{opcode} {registers('c', c)}, {registers('a', a)}, {registers('b', b)}, " + (
        f"{registers('c', c)};\n"
    )
    load = "ld.global.b32 {r}, {at}; "
    store = "".join(f"st.global.b32 [%pc+{4 * i}], %c{i};" for i in range(c))
    return f""".visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc) {{
        .reg .b32 %a<{a}>, %b<{b}>, %c<{c}>; .reg .b32 %i, %j; .reg .b64 %pa, %pb, %pc;
        mov.u32 %i, %ctaid.x; mov.u32 %j, %ntid.x; mul.lo.u32 %i, %i, %j;
        mov.u32 %j, %tid.x; add.u32 %i, %i, %j;
        {each("a", a, load)} {each("b", b, load)} {each("c", c, load)}
        {product * times} {store} ret; }}"""


FORMS: dict[str, tuple[tuple[int, int, int], np.dtype[Any], np.dtype[Any], Index, Index]] = {
    "m16n8k16.row.col.f32.f16.f16.f32": ((16, 8, 16), F16, F32, A_K16, B_16BIT),
    "m16n8k16.row.col.f16.f16.f16.f16": ((16, 8, 16), F16, F16, A_K16, B_16BIT),
    "m16n8k16.row.col.f32.bf16.bf16.f32": ((16, 8, 16), BF16, F32, A_K16, B_16BIT),
    "m16n8k8.row.col.f32.f16.f16.f32": ((16, 8, 8), F16, F32, A_K8, B_16BIT),
    "m16n8k8.row.col.f16.f16.f16.f16": ((16, 8, 8), F16, F16, A_K8, B_16BIT),
    "m16n8k8.row.col.f32.bf16.bf16.f32": ((16, 8, 8), BF16, F32, A_K8, B_16BIT),
    "m16n8k8.row.col.f32.tf32.tf32.f32": ((16, 8, 8), F32, F32, A_TF32, B_TF32),
    "m16n8k4.row.col.f32.tf32.tf32.f32": ((16, 8, 4), F32, F32, A_TF32, B_TF32),
}


def multiply(form: str, a: Array, b: Array, c: Array, times: int = 1) -> Array:
    """Runs batches [w, m, k] x [w, k, n] + [w, m, n], one warp each, two warps to a block."""
    (m, n, _), _, kind, index_a, index_b = FORMS[form]
    words = [
        np.stack([to_lanes(v, index) for v in batch])
        for batch, index in ((a, index_a), (b, index_b), (c, C_ANY))
    ]
    counts = [w.shape[-1] for w in words]
    ptx = mma_text(f"mma.sync.aligned.{form}", *counts, times)
    run_ptx(ptx, "k", len(a) // 2, 64, *words)
    return np.stack([from_lanes(w, (m, n), kind, C_ANY) for w in words[2]])


def operands(form: str, seed: int, draw: Callable[..., Array]) -> tuple[Array, Array, Array]:
    (m, n, k), kind_in, kind_out, _, _ = FORMS[form]
    shapes = ((4, m, k), kind_in), ((4, k, n), kind_in), ((4, m, n), kind_out)
    a, b, c = (draw(shape).astype(kind) for shape, kind in shapes)
    return a, b, c


@pytest.mark.parametrize("form", [*FORMS])
def test_mma_is_exact_on_small_integers(form: str) -> None:
    rng = np.random.default_rng(1)
    a, b, c = operands(form, 1, lambda shape: rng.integers(-8, 9, shape).astype(np.float64))
    want = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)
    assert (multiply(form, a, b, c).astype(np.float64) == want).all()


@pytest.mark.parametrize("form", [*FORMS])
def test_mma_places_every_single_element(form: str) -> None:
    """A with one entry, B with distinct entries: each result names the element it came from."""
    (m, n, k), kind_in, kind_out, _, _ = FORMS[form]
    batch = np.zeros((m * k + m * k % 2, m, k), kind_in)
    for at in range(m * k):
        batch[at, at // k, at % k] = 1
    b = np.arange(1, k * n + 1).reshape(k, n).astype(kind_in)
    bs = np.broadcast_to(b, (len(batch), k, n))
    got = multiply(form, batch, bs, np.zeros((len(batch), m, n), kind_out))
    assert (got.astype(np.float64) == batch.astype(np.float64) @ b.astype(np.float64)).all()


@pytest.mark.parametrize("form", [*FORMS])
def test_mma_chain_accumulates_in_place(form: str) -> None:
    rng = np.random.default_rng(2)
    a, b, c = operands(form, 2, lambda shape: rng.integers(-3, 4, shape).astype(np.float64))
    want = 5 * (a.astype(np.float64) @ b.astype(np.float64)) + c.astype(np.float64)
    assert (multiply(form, a, b, c, times=5).astype(np.float64) == want).all()


@pytest.mark.parametrize("form", [*FORMS])
def test_mma_is_accurate_on_real_numbers(form: str) -> None:
    rng = np.random.default_rng(3)
    a, b, c = operands(form, 3, lambda shape: rng.normal(size=shape))
    if FORMS[form][1] == F32:  # the tensor core reads the upper 19 bits
        exact_a, exact_b = ((v.view(np.uint32) & 0xFFFFE000).view(F32) for v in (a, b))
    else:
        exact_a, exact_b = a, b
    x, y, z = (v.astype(np.float64) for v in (exact_a, exact_b, c))
    scale = np.abs(x) @ np.abs(y) + np.abs(z)
    error = np.abs(multiply(form, a, b, c).astype(np.float64) - (x @ y + z)) / scale
    assert error.max() < (2.0**-10 if FORMS[form][2] == F16 else 2.0**-21)


@pytest.mark.parametrize("form", [f for f in FORMS if "tf32" in f])
def test_mma_tf32_ignores_the_low_13_bits(form: str) -> None:
    rng = np.random.default_rng(4)
    a, b, c = operands(form, 4, lambda shape: rng.integers(-8, 9, shape).astype(np.float64))
    dirty = [(v.view(np.uint32) | 0x1FFF).view(F32) for v in (a, b)]
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    assert (multiply(form, *dirty, c) == want).all()


def test_mma_carries_infinity_and_nan() -> None:
    form = "m16n8k16.row.col.f32.f16.f16.f32"
    a, b, c = np.ones((2, 16, 16), F16), np.ones((2, 16, 8), F16), np.zeros((2, 16, 8), F32)
    a[0, 3, 2] = np.inf
    b[0, 2, 5] = 0
    b[0, 2, 6] = -1
    a[1, 9, 9] = np.nan
    got = multiply(form, a, b, c)
    assert np.isnan(got[0, 3, 5])
    assert got[0, 3, 6] == -np.inf
    assert (got[0, 3, :5] == np.inf).all()
    assert np.isnan(got[1, 9]).all()
    assert (np.delete(got[1], 9, axis=0) == 16).all()


def test_mma_f16_accumulator_overflows_to_infinity_and_keeps_16_bits() -> None:
    form = "m16n8k16.row.col.f16.f16.f16.f16"
    a, b = np.full((2, 16, 16), 64, F16), np.full((2, 16, 8), 64, F16)
    got = multiply(form, a, b, np.zeros((2, 16, 8), F16))
    assert (got == np.inf).all()
    a[:], b[:] = 0, 0
    a[:, :, 0], b[:, 0, :] = 1, 1
    got = multiply(form, a, b, np.full((2, 16, 8), 4096, F16))  # 4097 is no float16
    assert (got == 4096).all()


def test_mma_f16_products_are_not_rounded_before_the_sum() -> None:
    """2047 x 2047 needs 22 bits: a product held in float16 would lose most of them."""
    form = "m16n8k8.row.col.f32.f16.f16.f32"
    a, b = np.zeros((2, 16, 8), F16), np.zeros((2, 8, 8), F16)
    a[:, :, 3], b[:, 3, :] = 2047, 2047
    got = multiply(form, a, b, np.ones((2, 16, 8), F32))
    assert (got == 2047.0 * 2047 + 1).all()


LDMATRIX = r"""
#define LOAD(NAME, FORM, N, OUTS, ...)                                                        \
extern "C" __global__ void NAME(const uint4* in, const int* rows, unsigned* out) {            \
    __shared__ uint4 tile[96];                                                                \
    for (int i = threadIdx.x; i < 96; i += blockDim.x) tile[i] = in[i];                       \
    __syncthreads();                                                                          \
    unsigned r[4];                                                                            \
    unsigned at = (unsigned)__cvta_generic_to_shared(tile) + 16 * rows[threadIdx.x];          \
    asm volatile("ldmatrix.sync.aligned.m8n8." FORM ".b16 {" OUTS "}, [%" #N "];"             \
                 : __VA_ARGS__ : "r"(at));                                                    \
    for (int i = 0; i < N; ++i) out[N * threadIdx.x + i] = r[i];                              \
}
#define R1 "=r"(r[0])
#define R2 R1, "=r"(r[1])
#define R4 R2, "=r"(r[2]), "=r"(r[3])
LOAD(x1, "x1.shared", 1, "%0", R1)
LOAD(x2, "x2.shared", 2, "%0, %1", R2)
LOAD(x4, "x4.shared", 4, "%0, %1, %2, %3", R4)
LOAD(x1t, "x1.trans.shared", 1, "%0", R1)
LOAD(x2t, "x2.trans.shared", 2, "%0, %1", R2)
LOAD(x4t, "x4.trans.shared", 4, "%0, %1, %2, %3", R4)
"""


@pytest.mark.parametrize("trans", ["", "t"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_takes_its_rows_from_the_first_lanes(count: int, trans: str) -> None:
    """Rows lie anywhere; the values of lanes that provide no address are not used."""
    rng = np.random.default_rng(count)
    tile = rng.integers(0, 1 << 16, (96, 8)).astype(np.uint16)
    rows = rng.integers(0, 96, 64).astype(np.int32)
    rows[8 * count : 32] = rows[32 + 8 * count :] = 1 << 22
    out = np.zeros((64, count, 2), np.uint16)
    run(LDMATRIX, f"x{count}{trans}", (1,), (64,), tile, rows, out)
    for thread in range(64):
        warp, lane = thread // 32 * 32, thread % 32
        for matrix in range(count):
            held = tile[rows[warp + 8 * matrix : warp + 8 * matrix + 8]]
            held = held.T if trans else held
            want = held[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
            assert out[thread, matrix].tolist() == want.tolist(), (thread, matrix)


def test_movmatrix_transposes_one_8x8_matrix() -> None:
    ptx = """.visible .entry k(.param .u64 p) { .reg .b32 %r, %t; .reg .b64 %p; mov.u32 %t, %tid.x;
        ld.param.u64 %p, [p]; mad.wide.u32 %p, %t, 4, %p; ld.global.b32 %r, [%p];
        movmatrix.sync.aligned.m8n8.trans.b16 %r, %r; st.global.b32 [%p], %r; ret; }"""
    matrices = np.random.default_rng(5).integers(0, 1 << 16, (2, 8, 8)).astype(np.uint16)
    words = matrices.copy().reshape(64, 2).view(np.uint32)
    run_ptx(ptx, "k", 1, 64, words)
    assert (words.view(np.uint16).reshape(2, 8, 8) == matrices.transpose(0, 2, 1)).all()


GEMM = r"""
typedef unsigned u;
extern "C" __global__ void __launch_bounds__(64) gemm(const uint4* a, const uint4* b, float* c) {
    __shared__ uint4 sa[32][2], sb[8][2];          // 32 x 16 and 8 x 16 halves, xor-swizzled
    int t = threadIdx.x, warp = t / 32, lane = t % 32;
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    for (int step = 0; step < 4; ++step) {
        sa[t / 2][(t ^ t / 4) & 1] = a[(t / 2) * 8 + step * 2 + t % 2];
        if (t < 16) sb[t / 2][(t ^ t / 4) & 1] = b[(t / 2) * 8 + step * 2 + t % 2];
        __syncthreads();
        u x[4], y[2];
        int row = warp * 16 + lane % 16;
        u at = (u)__cvta_generic_to_shared(&sa[row][(lane / 16 ^ row / 2) & 1]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
            : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
        row = lane % 8;
        at = (u)__cvta_generic_to_shared(&sb[row][(lane / 8 ^ row / 2) & 1]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
            : "=r"(y[0]), "=r"(y[1]) : "r"(at));
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
        __syncthreads();
    }
    int row = warp * 16 + lane / 4, col = 2 * (lane % 4);
    *(float2*)&c[row * 8 + col] = make_float2(acc[0], acc[1]);
    *(float2*)&c[(row + 8) * 8 + col] = make_float2(acc[2], acc[3]);
}
"""


@pytest.mark.parametrize("seed", [None, 1])
def test_a_swizzled_gemm_from_ldmatrix_to_store(seed: int | None) -> None:
    rng = np.random.default_rng(6)
    a, b = (rng.integers(-9, 10, shape).astype(F16) for shape in ((32, 64), (8, 64)))
    c = np.zeros((32, 8), F32)
    run(GEMM, "gemm", (1,), (64,), a, b, c, seed=seed)
    assert (c == a.astype(F32) @ b.astype(F32).T).all()


SATURATES = """
extern "C" __global__ void product(const int* a, int* c) {
    int x = a[threadIdx.x], d[4];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.satfinite.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%4}, {%4}, {%5,%5,%6,%6};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(x), "r"(2147483000), "r"(-2147483000));
    for (int i = 0; i < 4; i++) c[4 * threadIdx.x + i] = d[i];
}
"""


def test_satfinite_clamps_sums_of_integers() -> None:
    words = np.random.default_rng(8).integers(-128, 128, (8, 16)).astype(np.int8)
    c = np.zeros((8, 4, 4), np.int32)
    run(SATURATES, "product", (1,), (32,), words.reshape(-1).view(np.int32), c)
    products = words.astype(np.int64) @ words.T
    for half, start in ((slice(0, 2), 2147483000), (slice(2, 4), -2147483000)):
        want = np.clip(products + start, -(2**31), 2**31 - 1)
        assert (c[:, :, half].reshape(8, 8) == want).all()


INTEGERS = [
    *(
        f"m16n8k{k}.row.col.s32.{x}{bits}.{y}{bits}.s32"
        for bits in (8, 4)
        for k in (128 // bits, 256 // bits)
        for x in "su"
        for y in "su"
    ),
    "m8n8k16.row.col.s32.s8.u8.s32",
    "m8n8k32.row.col.s32.u4.s4.s32",
    *(
        f"{shape}.row.col.s32.b1.b1.s32.{logic}.popc"
        for logic in ("xor", "and")
        for shape in ("m8n8k128", "m16n8k128", "m16n8k256")
    ),
]


def packed_rows(rows: Array, bits: int) -> Array:
    """Registers (rows / 8, chunks of k, 32 lanes) of elements that run along k."""
    each = 32 // bits
    places = (bits * np.arange(each)).astype(np.uint64)
    elements = rows.astype(np.int64).view(np.uint64) & np.uint64((1 << bits) - 1)
    words = (elements.reshape(len(rows), -1, each) << places).sum(axis=2).astype(np.uint32)
    chunks = words.reshape(-1, 8, words.shape[1] // 4, 4).transpose(0, 2, 1, 3)
    return chunks.reshape(len(rows) // 8, -1, 32)


@pytest.mark.parametrize("form", INTEGERS)
def test_mma_of_integers_is_exact(form: str) -> None:
    """In the layouts of the ISA: a register has neighbours along k, of row or column G."""
    shape, _, _, _, kind_a, kind_b, *_ = form.split(".")
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    bits = int(kind_a[1:])
    rng = np.random.default_rng(9)

    def drawn(kind: str, rows: int) -> Array:
        low, high = (-(1 << bits - 1), 1 << bits - 1) if kind[0] == "s" else (0, 1 << bits)
        return rng.integers(low, high, (rows, k))

    a, b, c = drawn(kind_a, m), drawn(kind_b, 8), rng.integers(-(2**31), 2**31, (m, 8))
    to_a = packed_rows(a, bits).transpose(1, 0, 2).reshape(-1, 32)
    pairs = c.astype(np.int32).reshape(m // 8, 32, 2).transpose(1, 0, 2).reshape(32, -1)
    words = [np.ascontiguousarray(to_a.T), np.ascontiguousarray(packed_rows(b, bits)[0].T), pairs]
    words = [w.view(np.uint32).copy() for w in words]
    text = mma_text(f"mma.sync.aligned.{form}", *(w.shape[1] for w in words), 1)
    run_ptx(text, "k", 1, 32, *words)
    got = words[2].view(np.int32).reshape(32, m // 8, 2).transpose(1, 0, 2).reshape(m, 8)
    differ = (a[:, None] != b).sum(axis=2)
    want = differ if "xor" in form else a @ b.T
    assert (got == (want + c).astype(np.int32)).all()
