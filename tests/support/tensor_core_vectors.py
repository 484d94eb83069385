"""Sums that tensor cores of GPUs made, and the same sums by the instruction in the emulator.

`SAMPLE` holds some of the vectors of Khattak & Mikaitis; tests/data/README.md names the source.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import ptx_emulator as emulator
from tests.support.nvrtc_helper import compile_ptx
from tests.support.paths import ROOT
from tests.support.wgmma_kernels import HEAD, gemm, stored, sums_of

Array = np.ndarray[Any, Any]
SAMPLE = ROOT / "tests" / "data" / "tensor_core_vectors.npz"

TARGETS = {
    "A2": "sm_86",
    "A100": "sm_80",
    "Ada": "sm_89",
    "L40S": "sm_89",
    "H100": "sm_90a",
    "H200": "sm_90a",
    "B200": "sm_100",
}
KINDS: dict[str, tuple[str, Any]] = {
    "fp16": ("f16", np.float16),
    "bf16": ("bf16", ml_dtypes.bfloat16),
    "tf32": ("tf32", np.float32),
    "E4M3": ("e4m3", ml_dtypes.float8_e4m3fn),
    "E5M2": ("e5m2", ml_dtypes.float8_e5m2),
}


class Vectors(NamedTuple):
    """Vectors of one GPU, operand type and form of the result: d = a . b + c, as float32.

    Attributes:
        a, b: (count, k); ``c``, ``d``: (count,).
    """

    gpu: str
    kind: str
    half: bool
    a: Array
    b: Array
    c: Array
    d: Array


def vectors_of(path: Path) -> list[Vectors]:
    """All vectors of a file that the emulator's instructions can make.

    V100's instruction, m8n8k4, is none of them, and how B200 adds 8-bit floats is not known.
    """
    found = []
    with np.load(path) as arrays:
        for name in arrays.files:
            gpu, kind, letter, *result = name.split("_")
            known = gpu in TARGETS and (gpu, kind[0]) != ("B200", "E")
            if letter == "d" and known:
                a, b, c = (arrays[f"{gpu}_{kind}_{operand}"] for operand in "abc")
                found.append(Vectors(gpu, kind, result == ["fp16"], a, b, c, arrays[name]))
    return found


def emulated(v: Vectors) -> Array:
    """The results of the emulator (count,) as float32."""
    if v.gpu in ("H100", "H200") and v.kind in ("E4M3", "E5M2") and not v.half:
        return by_wgmma(v)
    return by_mma(v)


# ---- mma.sync: eight vectors to a warp, whose results lie on the diagonal of D


def by_mma(v: Vectors, times: int = 1, sums: str = "hardware") -> Array:
    """The results of ``times`` instructions that add the same product, (count,) as float32."""
    name, dtype = KINDS[v.kind]
    count, k = v.a.shape
    per_register = 4 // np.dtype(dtype).itemsize
    lane = np.arange(32)
    a = v.a.reshape(-1, 8, k).astype(dtype)
    b = v.b.reshape(-1, 8, k).astype(dtype)
    chunks = k // (4 * per_register)
    # A lane has per_register consecutive k of each chunk of its row; rows 8 to 15 are zero.
    at = 4 * per_register * np.arange(chunks)[:, None] + per_register * (lane % 4)
    at = at[..., None] + np.arange(per_register)
    rows = np.broadcast_to((lane // 4)[None, :, None], at.shape)
    words = [np.ascontiguousarray(m[:, rows, at]).view(np.uint32)[..., 0] for m in (a, b)]
    left = np.stack([words[0], np.zeros_like(words[0])], axis=2).reshape(-1, 2 * chunks, 32)
    type_ = "f16" if v.half else "f32"
    start = np.zeros((len(a), 8, 8), np.float16 if v.half else np.float32)
    start[:, range(8), range(8)] = v.c.reshape(-1, 8)
    # The accumulators of rows 0 to 7 come first, columns 2t and 2t + 1.
    pairs = start.reshape(len(a), 8, 4, 2).reshape(len(a), 32, 2)
    c = pairs.view(np.uint32) if v.half else pairs
    c = np.ascontiguousarray(c.swapaxes(1, 2)).view(np.uint32)
    c = np.concatenate([c, np.zeros_like(c)], axis=1)
    operands = [left, words[1], c]
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.{type_}.{name}.{name}.{type_}"
    counts = [operand.shape[1] for operand in operands]
    text = _mma_ptx(opcode, TARGETS[v.gpu], times, *counts)
    flat = [np.ascontiguousarray(operand) for operand in operands]
    emulator.launch(text, "k", len(a), 32, flat, sums=sums)
    out = flat[2][:, : c.shape[1] // 2]
    values = np.ascontiguousarray(out.swapaxes(1, 2)).view(start.dtype).reshape(len(a), 8, 8)
    return values[:, range(8), range(8)].reshape(count).astype(np.float32)


def _mma_ptx(opcode: str, target: str, times: int, a: int, b: int, c: int) -> str:
    """A kernel k(a, b, c) of a warp per block: fragments are loaded, multiplied, and c stored.

    Operands are [blocks, registers, 32] words.
    """

    def names(letter: str, count: int) -> str:
        return "{" + ", ".join(f"%{letter}{i}" for i in range(count)) + "}"

    lines = []
    for letter, count in (("a", a), ("b", b), ("c", c)):
        lines += [
            f"ld.param.u64 %p{letter}, [{letter}];",
            f"mad.wide.u32 %p{letter}, %block, {128 * count}, %p{letter};",
            f"mad.wide.u32 %p{letter}, %lane, 4, %p{letter};",
            *(f"ld.global.b32 %{letter}{i}, [%p{letter}+{128 * i}];" for i in range(count)),
        ]
    product = f"{opcode} {names('c', c)}, {names('a', a)}, {names('b', b)}, {names('c', c)};"
    lines += [product] * times
    lines += [f"st.global.b32 [%pc+{128 * i}], %c{i};" for i in range(c)]
    body = "\n  ".join(lines)
    return f""".version 8.7
.target {target}
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c) {{
  .reg .b32 %a<{a}>, %b<{b}>, %c<{c}>, %block, %lane; .reg .b64 %pa, %pb, %pc;
  mov.u32 %block, %ctaid.x; mov.u32 %lane, %tid.x;
  {body}
  ret;
}}"""


# ---- wgmma: 64 vectors to a warpgroup, C is zero


@functools.cache
def _wgmma_ptx(name: str, type_: str) -> str:
    flags = (1, 1, 0, 0) if name in ("f16", "bf16") else (1, 1)
    return compile_ptx(HEAD + gemm("k", 64, kinds=(name, name), sums=type_, flags=flags), "sm_90a")


def by_wgmma(v: Vectors) -> Array:
    """The results (count,) as float32 of as many instructions along k as the vectors are long."""
    name, dtype = KINDS[v.kind]
    count, depth = v.a.shape
    padded = np.zeros((2, -(-count // 64) * 64, depth), dtype)
    padded[0, :count], padded[1, :count] = v.a, v.b
    found = []
    for a, b in padded.reshape(2, -1, 64, depth).swapaxes(0, 1):
        left, right = stored(a, 32), stored(b, 32)
        where = np.stack([left.descriptors(), right.descriptors(left.image.size)], axis=1)
        sizes = [np.int32(part.image.size) for part in (left, right)]
        out = np.zeros((128, 32), np.float16 if v.half else np.float32)
        args = [left.image, sizes[0], right.image, sizes[1], out, where, np.int32(len(where))]
        shared = left.image.size + right.image.size
        ptx = _wgmma_ptx(name, "f16" if v.half else "f32")
        emulator.launch(ptx, "k", 1, 128, args, shared, sums="hardware")
        found.append(np.diagonal(sums_of(out, 64)))
    return np.concatenate(found)[:count].astype(np.float32)
