"""wmma in all shapes of sm_80, and mma.sync of float64: compared with matrix products in numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptx_emulator.errors import OutOfBounds, RaceError
from tests.ptx_emulator.test_conformance import Array, run_ptx
from tests.support.nvrtc_helper import compile_ptx

SHAPES = {"m16n16k16": (16, 16, 16), "m8n32k16": (8, 32, 16), "m32n8k16": (32, 8, 16)}
STORED: dict[str, Any] = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "s8": np.int8, "u8": np.uint8,
    "tf32": np.float32, "f32": np.float32, "s32": np.int32, "f64": np.float64,
}  # fmt: skip
REGISTERS = {
    ("bf16", "m16n16k16"): (4, 4), ("bf16", "m8n32k16"): (2, 8), ("bf16", "m32n8k16"): (8, 2),
    ("s8", "m16n16k16"): (2, 2), ("s8", "m8n32k16"): (1, 4), ("s8", "m32n8k16"): (4, 1),
}  # fmt: skip


def text(
    shape: str, kinds: tuple[str, str, str], layouts: tuple[str, str, str], counts: tuple[int, ...],
    strides: tuple[int, int, int], saturates: str = "",
) -> str:  # fmt: skip
    """D = A B + C with fragments loaded from and stored to global memory."""
    element, c_kind, d_kind = kinds
    a, b, c, d = (
        "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"
        for name, count in zip("abcd", counts, strict=True)
    )
    types = f"{d_kind}.{c_kind}" if element == "f16" else f"{d_kind}.{element}.{element}.{c_kind}"
    half = {"f64": ".f64", "f32": ".f32"}
    load_a, load_b, load_c = (
        f"wmma.load.{role}.sync.aligned.{layout}.{shape}.global.{kind} {group}, [%p{role}], {step};"
        for role, layout, kind, group, step in zip(
            "abc", layouts, (element, element, c_kind), (a, b, c), strides, strict=True
        )
    )
    ab = ".f64" if element == "f64" else ".b32"
    return f""".visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 pd) {{
        .reg .b64 %pa, %pb, %pc, %pd; .reg {ab} %a<16>, %b<16>;
        .reg {half.get(c_kind, ".b32")} %c<16>; .reg {half.get(d_kind, ".b32")} %d<16>;
        ld.param.u64 %pa, [pa]; ld.param.u64 %pb, [pb];
        ld.param.u64 %pc, [pc]; ld.param.u64 %pd, [pd]; {load_a} {load_b} {load_c}
        wmma.mma.sync.aligned.{layouts[0]}.{layouts[1]}.{shape}.{types}{saturates} {d}, {a}, {b},
        {c};
        wmma.store.d.sync.aligned.{layouts[2]}.{shape}.global.{d_kind} [%pd], {d}, {strides[2]};
        ret; }}"""


def padded(matrix: Array, layout: str, stride: int) -> Array:
    """A matrix as it lies in memory, with rows (or columns) ``stride`` elements apart."""
    rows = matrix if layout == "row" else matrix.T
    whole = np.zeros((rows.shape[0], stride), matrix.dtype)
    whole[:, : rows.shape[1]] = rows
    return whole


def check(
    shape: str, sizes: tuple[int, int, int], kinds: tuple[str, str, str],
    layouts: tuple[str, str, str], counts: tuple[int, ...], saturates: str = "",
) -> None:  # fmt: skip
    element, c_kind, d_kind = kinds
    m, n, k = sizes
    rng = np.random.default_rng(3)
    # Small integers: every sum is exact in every type.
    x, y, z = (rng.integers(-4 * (element != "u8"), 5, s) for s in ((m, k), (k, n), (m, n)))
    steps = tuple(
        (size[1] if layout == "row" else size[0]) + extra
        for size, layout, extra in zip(
            ((m, k), (k, n), (m, n)), layouts, (16, 0, 8), strict=True
        )
    )  # fmt: skip
    given = [
        padded(values.astype(STORED[kind]), layout, step)
        for values, kind, layout, step in zip(
            (x, y, z), (element, element, c_kind), layouts, steps, strict=True
        )
    ]
    out = np.zeros(given[2].shape, STORED[d_kind])
    raw = [v.view(np.uint16) if v.dtype == ml_dtypes.bfloat16 else v for v in given]
    run_ptx(text(shape, kinds, layouts, counts, steps, saturates), "k", 1, 32, *raw, out)
    want = padded((x @ y + z).astype(STORED[d_kind]), layouts[2], steps[2])
    assert (out == want).all()


@pytest.mark.parametrize("layouts", [("row", "col", "row"), ("col", "row", "col"),
                                     ("row", "row", "row"), ("col", "col", "col")])  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_halves_in_every_layout(shape: str, layouts: tuple[str, str, str]) -> None:
    for sums in (("f32", "f32"), ("f16", "f16"), ("f32", "f16"), ("f16", "f32")):
        counts = (8, 8, *(8 if kind == "f32" else 4 for kind in sums))
        check(shape, SHAPES[shape], ("f16", *sums), layouts, counts)


@pytest.mark.parametrize("kind", ["bf16", "s8", "u8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_bfloat16_and_of_bytes(shape: str, kind: str) -> None:
    sums = "f32" if kind == "bf16" else "s32"
    counts = (*REGISTERS["s8" if kind == "u8" else kind, shape], 8, 8)
    check(shape, SHAPES[shape], (kind, sums, sums), ("row", "col", "row"), counts)


def test_products_of_tf32_and_of_float64() -> None:
    layouts = ("row", "col", "row")
    check("m16n16k8", (16, 16, 8), ("tf32", "f32", "f32"), layouts, (4, 4, 8, 8))
    check("m8n8k4", (8, 8, 4), ("f64", "f64", "f64"), layouts, (1, 1, 2, 2))


def test_sums_of_bytes_saturate_if_they_say_so() -> None:
    a, b = np.ones((16, 16), np.int8), np.ones((16, 16), np.int8)
    c = np.full((16, 16), 2**31 - 5, np.int32)
    for flag, want in (("", -(2**31) + 11), (".satfinite", 2**31 - 1)):
        out = np.zeros((16, 16), np.int32)
        ptx = text("m16n16k16", ("s8", "s32", "s32"), ("row", "col", "row"), (2, 2, 8, 8),
                   (16, 16, 16), flag)  # fmt: skip
        run_ptx(ptx, "k", 1, 32, a, b, c, out)
        assert (out == want).all()


def test_a_fragment_beyond_its_buffer_is_out_of_bounds() -> None:
    ptx = text("m16n16k16", ("f16", "f32", "f32"), ("row", "col", "row"), (8, 8, 8, 8),
               (16, 16, 16))  # fmt: skip
    a, b = np.zeros((16, 16), np.float16), np.zeros((15, 16), np.float16)
    c, d = (np.zeros((16, 16), np.float32) for _ in range(2))
    with pytest.raises(OutOfBounds, match="2-byte load") as caught:
        run_ptx(ptx, "k", 1, 32, a, b, c, d)
    assert "wmma.load.b" in caught.value.where


# A tile in shared memory that two warps fill and each multiplies: with and without the barrier.
TILED = """
extern "C" __global__ void k(const unsigned short* a, float* out) {
  __shared__ __align__(32) unsigned short s[16 * 16];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) s[i] = a[i];
  BARRIER;
  unsigned at = (unsigned)__cvta_generic_to_shared(s), x[8], y[8];
  float z[8] = {};
  asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7},"
    " [%8], 16;" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]), "=r"(x[4]), "=r"(x[5]),
    "=r"(x[6]), "=r"(x[7]) : "r"(at) : "memory");
  asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7},"
    " [%8], 16;" : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3]), "=r"(y[4]), "=r"(y[5]),
    "=r"(y[6]), "=r"(y[7]) : "r"(at) : "memory");
  asm volatile("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%0,%1,%2,%3,%4,%5,%6,%7},"
    " {%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19,%20,%21,%22,%23},"
    " {%0,%1,%2,%3,%4,%5,%6,%7};" : "+f"(z[0]), "+f"(z[1]), "+f"(z[2]), "+f"(z[3]), "+f"(z[4]),
    "+f"(z[5]), "+f"(z[6]), "+f"(z[7]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]),
    "r"(x[5]), "r"(x[6]), "r"(x[7]), "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3]), "r"(y[4]),
    "r"(y[5]), "r"(y[6]), "r"(y[7]));
  for (float& one : z) one *= 0.5f;  // the same operation on every element is allowed
  asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%8],"
    " {%0,%1,%2,%3,%4,%5,%6,%7}, 16;" :: "f"(z[0]), "f"(z[1]), "f"(z[2]), "f"(z[3]), "f"(z[4]),
    "f"(z[5]), "f"(z[6]), "f"(z[7]), "l"(out + threadIdx.x / 32 * 256) : "memory");
}
"""


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_fragments_of_a_shared_tile_need_the_barrier(seed: int | None) -> None:
    a = np.arange(256, dtype=np.float16).reshape(16, 16) % 7
    out = np.zeros((2, 16, 16), np.float32)
    run = {True: TILED.replace("BARRIER", "__syncthreads()"), False: TILED.replace("BARRIER", "")}
    from ptx_emulator import launch

    launch(compile_ptx(run[True]), "k", 1, 64, [a, out], order_seed=seed)
    x = a.astype(np.float32)
    assert (out == 0.5 * (x @ x.T)).all()
    with pytest.raises(RaceError):
        launch(compile_ptx(run[False]), "k", 1, 64, [a, out], order_seed=seed)


# ---------------------------------------------------------------------------- mma of float64

DOUBLE = {"m8n8k4": (8, 4), "m16n8k4": (16, 4), "m16n8k8": (16, 8), "m16n8k16": (16, 16)}


def spread_double(m: int, k: int, x: Array, y: Array, z: Array) -> list[Array]:
    """Fragments by the tables of the PTX ISA: registers (lanes, count) of A, B and C."""
    lane = np.arange(32)
    g, t = lane >> 2, lane & 3
    halves = m // 8
    a = [x[g + 8 * h, t + 4 * s] for s in range(k // 4) for h in range(halves)]
    b = [y[t + 4 * s, g] for s in range(k // 4)]
    c = [z[g + 8 * h, 2 * t + i] for h in range(halves) for i in range(2)]
    return [np.ascontiguousarray(np.stack(part, axis=1)) for part in (a, b, c)]


@pytest.mark.parametrize("shape", DOUBLE)
def test_products_of_float64(shape: str) -> None:
    m, k = DOUBLE[shape]
    rng = np.random.default_rng(1)
    x, y, z = rng.standard_normal((m, k)), rng.standard_normal((k, 8)), rng.standard_normal((m, 8))
    a, b, c = spread_double(m, k, x, y, z)
    parts = {"a": a, "b": b, "c": c}
    names = {n: [f"%{n}{i}" for i in range(part.shape[1])] for n, part in parts.items()}
    loads = "".join(
        f"mad.wide.u32 %q, %t, {8 * len(group)}, %p{n};"
        + "".join(f"ld.global.f64 {r}, [%q+{8 * i}];" for i, r in enumerate(group))
        for n, group in names.items()
    )
    stores = "".join(f"st.global.f64 [%q+{8 * i}], {r};" for i, r in enumerate(names["c"]))
    lists = {n: "{" + ", ".join(group) + "}" for n, group in names.items()}
    ptx = f""".visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc) {{
        .reg .b64 %pa, %pb, %pc, %q; .reg .b32 %t; .reg .f64 %a<8>, %b<8>, %c<8>;
        ld.param.u64 %pa, [pa]; ld.param.u64 %pb, [pb]; ld.param.u64 %pc, [pc];
        mov.u32 %t, %tid.x; {loads}
        mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64 {lists["c"]}, {lists["a"]}, {lists["b"]},
        {lists["c"]}; {stores} ret; }}"""
    run_ptx(ptx, "k", 1, 32, a, b, c)
    want = spread_double(m, k, x, y, x @ y + z)[2]
    assert np.abs(c - want).max() < 1e-14
    assert np.abs(c).max() > 1


def test_results_of_an_mma_may_be_discarded() -> None:
    """`_` takes the place of a register whose value is not read."""
    template = """.visible .entry k(.param .u64 po) {{ .reg .b64 %p; .reg .b32 %t, %r<2>;
        .reg .f32 %f<4>; ld.param.u64 %p, [po]; mov.u32 %t, %tid.x; mov.b32 %r0, 0x3C003C00;
        mov.f32 %f0, 0f3F800000; mov.f32 %f1, %f0;
        mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{{to}}}, {{%r0, %r0}}, {{%r0}},
        {{%f0, %f1, %f0, %f1}}; mad.wide.u32 %p, %t, 4, %p; st.global.f32 [%p], %f2; ret; }}"""
    out = np.zeros(32, np.float32)
    run_ptx(template.format(to="_, %f2, _, _"), "k", 1, 32, out)
    assert (out == 9).all()
