"""mma.sp and wgmma with .sp: matrices of which two of each four elements of a row are stored.

Where the metadata lies is that of CUTLASS's `reorder_meta` (tools/util/host_reorder.h) for the
longer instructions. Of the shorter ones, whose metadata are half as many, the ISA's figures say it.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashgen.shared.errors import EmulatorError
from ptx_emulator import launch
from tests.ptx_emulator.test_conformance import Array, run_ptx
from tests.support.nvrtc_helper import compile_ptx
from tests.support.wgmma_kernels import HEAD, fragments_of, stored, sums_of

G, T = np.arange(32) // 4, np.arange(32) % 4
TYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "s8": np.int8,
    "u8": np.uint8,
    "f32": np.float32,
    "s32": np.int32,
}
# Shape, types, selector, and registers of A
FORMS = [
    ("m16n8k16", "f32.f16.f16.f32", 0, 2),
    ("m16n8k16", "f16.f16.f16.f16", 3, 2),
    ("m16n8k32", "f32.f16.f16.f32", 0, 4),
    ("m16n8k32", "f32.bf16.bf16.f32", 1, 4),
    ("m16n8k8", "f32.tf32.tf32.f32", 2, 2),
    ("m16n8k16", "f32.tf32.tf32.f32", 1, 4),
    ("m16n8k32", "s32.s8.u8.s32", 1, 2),
    ("m16n8k64", "s32.u8.s8.s32", 0, 4),
    ("m16n8k64", "f32.e4m3.e4m3.f32", 0, 4),
]


def pruned(
    rng: np.random.Generator, depth: int, of: int, per: int, rows: int = 16
) -> tuple[Array, Array, Array]:
    """A matrix with ``per`` of each ``of`` elements, these, and their places, ascending.

    The second ``of`` elements of row 5 are zeros, both of which have place 0.
    """
    order = rng.random((rows, depth // of, of)).argsort(axis=-1)[..., :per]
    places = np.sort(order, axis=-1)
    a = np.zeros((rows, depth // of, of))
    np.put_along_axis(a, places, rng.integers(1, 5, places.shape).astype(float), axis=-1)
    a[5, 1], places[5, 1] = 0, 0
    stored = np.take_along_axis(a, places, axis=-1).reshape(rows, -1)
    return a.reshape(rows, depth), stored, places


def metadata(places: Array, unit: int, selector: int, long: bool) -> Array:
    """The register of each lane; ``places`` (16, chunks, 2) of units of ``unit`` bytes."""
    nibbles = places[..., 0] | places[..., 1] << 2
    per_element = 4 if unit == 2 else 8
    shifts = 4 * np.arange(per_element)
    elements = (nibbles.reshape(16, -1, per_element) << shifts).sum(axis=-1)  # (16, columns)
    lanes = np.full(32, 0xFFFFFFFF, np.uint32)
    if not long:
        if unit == 2:
            lanes[selector::4] = elements[:8, 0] | elements[8:, 0] << 16
        else:
            lanes[2 * selector :: 4], lanes[2 * selector + 1 :: 4] = (
                elements[:8, 0],
                elements[8:, 0],
            )
        return lanes
    group, interweave = (32, 4) if unit == 2 else (16, 2)
    memory = np.zeros(2 * group, np.int64)  # columns interleaved by two
    for m in range(16 * selector, 16 * selector + 16):
        for k in range(2):
            row, column = m % 8 * interweave + m % group // 8, k
            if row % 2 == 0 and column % 2 == 1:
                row, column = row + 1, column - 1
            elif row % 2 == 1 and column % 2 == 0:
                row, column = row - 1, column + 1
            memory[2 * row + column] = elements[m % 16, k]
    words = memory.astype(f"u{unit if unit == 2 else 4}").view(np.uint32)
    used = 2 * selector + np.arange(2) if unit == 2 else np.arange(4)
    lanes.reshape(8, 4)[:, used] = words.reshape(8, 4)[:, used]
    return lanes


def words_of(rows: Array, kind: Any) -> Array:
    return np.ascontiguousarray(rows.astype(kind)).view(np.uint32).reshape(len(rows), -1)


def multiply(shape: str, types: str, selector: int, count: int, ordered: bool = True) -> None:
    rng = np.random.default_rng(count + selector)
    kind_d, kind_a, kind_b, _ = types.split(".")
    depth = int(shape.split("k")[1])
    halves = kind_a == "tf32"  # one of two elements of 32 bits: two of four halves
    a, stored, places = pruned(rng, depth, *((2, 1) if halves else (4, 2)))
    if halves:
        places = np.concatenate([2 * places, 2 * places + 1], axis=-1)
    if not ordered:
        places[3, 0] = places[3, 0, ::-1]
    unit = 1 if np.dtype(TYPES[kind_a]).itemsize == 1 else 2
    b = rng.integers(0, 4, (depth, 8)).astype(float)
    c = rng.integers(-9, 9, (16, 8)).astype(float)
    left, right = words_of(stored, TYPES[kind_a]), words_of(b.T, TYPES[kind_b])
    registers_a = [left[8 * h + G, 4 * j + T] for j in range(count // 2) for h in range(2)]
    registers_b = [right[G, 4 * j + T] for j in range(count)]
    sums = TYPES[kind_d]
    pairs = words_of(c, sums)
    if kind_d == "f16":
        registers_c = [pairs[8 * h + G, T] for h in range(2)]
    else:
        registers_c = [pairs[8 * (i // 2) + G, 2 * T + i % 2] for i in range(4)]
    parts = [*registers_a, *registers_b, metadata(places, unit, selector, count == 4), *registers_c]
    data = np.stack(parts, axis=1).astype(np.uint32)
    names = [f"%r{i}" for i in range(data.shape[1])]
    fields = np.split(np.array(names), np.cumsum([count, count, 1]))
    texts = ["{" + ", ".join(part) + "}" for part in fields]
    loads = "".join(f"ld.global.b32 {name}, [%p+{4 * i}];" for i, name in enumerate(names))
    store = "".join(f"st.global.b32 [%p+{4 * names.index(name)}], {name};" for name in fields[3])
    run_ptx(
        f""".visible .entry k(.param .u64 p) {{ .reg .b32 %r<{len(names)}>, %t; .reg .b64 %p;
        ld.param.u64 %p, [p]; mov.u32 %t, %tid.x; mad.wide.u32 %p, %t, {4 * len(names)}, %p; {loads}
        mma.sp::ordered_metadata.sync.aligned.{shape}.row.col.{types}
        {texts[3]}, {texts[0]}, {texts[1]}, {texts[3]}, {fields[2][0]}, {selector};
        {store} ret; }}""",
        "k", 1, 32, data,
    )  # fmt: skip
    got = np.ascontiguousarray(data[:, 2 * count + 1 :])
    want = np.zeros((16, 8))
    for half in range(2):
        pair = got[:, half : half + 1] if kind_d == "f16" else got[:, 2 * half : 2 * half + 2]
        values = np.ascontiguousarray(pair).view(sums)
        for side in range(2):
            want[8 * half + G, 2 * T + side] = values[:, side]
    assert (want == a @ b + c).all()


@pytest.mark.parametrize(("shape", "types", "selector", "count"), FORMS)
def test_sparse_products_are_those_of_the_whole_matrix(
    shape: str, types: str, selector: int, count: int
) -> None:
    multiply(shape, types, selector, count)


def test_places_of_ordered_metadata_ascend() -> None:
    with pytest.raises(EmulatorError, match="row 3 of A, pair 0"):
        multiply(*FORMS[2], ordered=False)


ORDINARY = pruned
# Types, instruction's k, A in registers, B MN-major, selector, span of the swizzles
WARPGROUPS = [
    ("f16", 32, False, False, 0, 128),
    ("f16", 32, True, True, 1, 64),
    ("tf32", 16, False, False, 1, 64),
    ("s8", 64, True, False, 0, 128),
    ("e4m3", 64, False, False, 0, 16),
]


def warpgroup_kernel(kind: str, depth: int, fragments: bool, turned: bool, selector: int) -> str:
    """A kernel of one warpgroup that adds products of 64 x k and k x 16, ``steps`` of them."""
    sums, letter, of = ("s32", "r", "int") if kind == "s8" else ("f32", "f", "float")
    outs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(8))
    a = "{%9, %10, %11, %12}" if fragments else "%8"
    flags = "" if kind == "s8" else ", 1, 1"
    if kind == "f16":
        flags += f", {int(turned)}" if fragments else f", 0, {int(turned)}"
    return f"""{HEAD}
extern "C" __global__ void __launch_bounds__(128) k(
    const uint4* a, int bytes_a, const uint4* b, int bytes_b, const u64* where,
    const u32* fragments, const u32* metadata, {of}* out, int steps) {{
  extern __shared__ __align__(1024) unsigned char smem[];
  fill((uint4*)smem, a, bytes_a);
  fill((uint4*)(smem + bytes_a), b, bytes_b);
  PROXY_FENCE; __syncthreads();
  {of} d[8];
  for (int i = 0; i < 8; ++i) d[i] = 0;
  for (int s = 0; s < steps; ++s) {{
    const u32* f = fragments + 4 * (s * 128 + threadIdx.x);
    u32 f0 = f[0], f1 = f[1], f2 = f[2], f3 = f[3], e = metadata[s * 128 + threadIdx.x];
    asm volatile("" : "+r"(f0), "+r"(f1), "+r"(f2), "+r"(f3) :: "memory");
    FENCE;
    asm volatile("wgmma.mma_async.sp.sync.aligned.m64n16k{depth}.{sums}.{kind}.{kind} "
      "{{%0, %1, %2, %3, %4, %5, %6, %7}}, {a}, %13, %14, {selector}, 1{flags};"
      : {outs} : "l"(where[2 * s]), "r"(f0), "r"(f1), "r"(f2), "r"(f3), "l"(where[2 * s + 1]),
        "r"(e) : "memory");
    COMMIT; WAIT(0);
  }}
  for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = d[i];
}}
"""


@pytest.mark.parametrize(("kind", "depth", "fragments", "turned", "selector", "span"), WARPGROUPS)
def test_sparse_products_of_a_warpgroup_are_those_of_the_whole_matrix(
    kind: str, depth: int, fragments: bool, turned: bool, selector: int, span: int
) -> None:
    rng, steps = np.random.default_rng(depth), 2
    halves = kind == "tf32"
    a, left, places = pruned(rng, depth * steps, *((2, 1) if halves else (4, 2)), rows=64)
    left = left.astype(TYPES[kind])
    if halves:
        places = np.concatenate([2 * places, 2 * places + 1], axis=-1)
    b = rng.integers(0, 4, (16, depth * steps)).astype(TYPES[kind])
    image_a, image_b = stored(left, span), stored(b, span, turned)
    offset = len(image_a.image)
    where = np.stack([image_a.descriptors(), image_b.descriptors(offset)[::2]], axis=1)
    unit = min(left.itemsize, 2)
    metadata_of_warps = [
        metadata(places[16 * w : 16 * w + 16, chunks], unit, selector, True)
        for chunks in (slice(0, places.shape[1] // 2), slice(places.shape[1] // 2, None))
        for w in range(4)
    ]
    out = np.zeros((128, 8), np.int32 if kind == "s8" else np.float32)
    registers = np.ascontiguousarray(fragments_of(left).reshape(128, steps, 4).swapaxes(0, 1))
    launch(
        compile_ptx(warpgroup_kernel(kind, depth, fragments, turned, selector), "sm_90a"),
        "k", 1, 128,
        [image_a.image, np.int32(offset), image_b.image, np.int32(len(image_b.image)), where,
         registers, np.concatenate(metadata_of_warps), out, np.int32(steps)],
        shared_bytes=offset + len(image_b.image),
    )  # fmt: skip
    assert (sums_of(out, 16) == a @ b.astype(float).T).all()


def test_a_sparse_product_reads_more_of_b_than_a_swizzle_of_32_bytes_has() -> None:
    with pytest.raises(EmulatorError, match="64 bytes of each row are read"):
        test_sparse_products_of_a_warpgroup_are_those_of_the_whole_matrix(
            "f16", 32, False, False, 0, 32
        )


def test_two_elements_that_are_not_zero_have_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_place(*arguments: Any, **options: Any) -> tuple[Array, Array, Array]:
        a, units, places = ORDINARY(*arguments, **options)
        places[7, 1] = 2
        return a, units, places

    monkeypatch.setattr(f"{__name__}.pruned", one_place)
    with pytest.raises(EmulatorError, match="row 7 of A, pair 1: places 2 and 2"):
        multiply(*FORMS[2])
    with pytest.raises(EmulatorError, match="row 7 of A, pair 1: places 2 and 2"):
        test_sparse_products_of_a_warpgroup_are_those_of_the_whole_matrix(*WARPGROUPS[0])
