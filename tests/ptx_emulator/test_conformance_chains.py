"""Random sequences of mma.sync over shared registers, against the same sequence of numpy products.

The emulator computes a chain of products as one larger product. Sequences that
mix shapes, copy, reset, change or convert accumulators half way must give what one step after the
other gives. All numbers are small integers, so every result is exact.
"""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import Array, run_ptx
from tests.ptx_emulator.test_conformance_matrix import (
    A_K16,
    A_TF32,
    B_16BIT,
    B_TF32,
    C_ANY,
    F32,
    Index,
    from_lanes,
    to_lanes,
)
from tests.support.tiers import one_in

PARTS = 3  # registers hold three matrices of each kind: A 16 x depth, B depth x 8, C 16 x 8
WARPS = 2
# dtype, depth of the larger product (the other one has half of it), layouts of A and B
KINDS: dict[str, tuple[np.dtype[Any], int, Index, Index]] = {
    "f16": (np.dtype(np.float16), 16, A_K16, B_16BIT),
    "bf16": (np.dtype(ml_dtypes.bfloat16), 16, A_K16, B_16BIT),
    "tf32": (F32, 8, A_TF32, B_TF32),
}


def registers(name: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"%{name}{first + i}" for i in range(count)) + "}"


class Sequence:
    """PTX lines, and the same steps on matrices a[warp, i], b[warp, i], c[warp, i]."""

    def __init__(self, seed: int, kind: str) -> None:
        self.draw = random.Random(seed)
        self.kind, self.depth = kind, KINDS[kind][1]
        rng = np.random.default_rng(seed)
        shape = (WARPS, PARTS)
        self.a = rng.integers(-2, 3, (*shape, 16, self.depth)).astype(np.float64)
        self.b = rng.integers(-2, 3, (*shape, self.depth, 8)).astype(np.float64)
        self.c = rng.integers(-4, 5, (*shape, 16, 8)).astype(np.float64)
        self.lines: list[str] = []

    def part(self) -> int:
        return self.draw.randrange(PARTS)

    def product(self) -> None:
        d, s, i, j = self.part(), self.part(), self.part(), self.part()
        s = d if self.draw.random() < 0.7 else s
        who = self.draw.choice([slice(None)] * 4 + [slice(0, 1), slice(1, 2)])
        half = self.draw.choice([None, None, 0, 1])
        depth, a, b = self.depth, registers("a", 4 * i, 4), registers("b", 2 * j, 2)
        rows = slice(0, depth)
        if half is not None:
            depth //= 2
            a, b = registers("a", 4 * i + 2 * half, 2), registers("b", 2 * j + half, 1)
            rows = slice(depth * half, depth * half + depth)
        left, right = self.a[who, i][:, :, rows], self.b[who, j][:, rows]
        self.c[who, d] = left @ right + self.c[who, s]
        types = f"f32.{self.kind}.{self.kind}.f32"
        c, into = registers("c", 4 * s, 4), registers("c", 4 * d, 4)
        line = f"mma.sync.aligned.m16n8k{depth}.row.col.{types} {into}, {a}, {b}, {c};"
        if who != slice(None):  # one warp goes round the product
            skip = f"SKIP{len(self.lines)}"
            line = f"@{'!' if who.start == 0 else ''}%first bra {skip}; {line} {skip}:"
        self.lines.append(line)

    def copy(self) -> None:
        d, s = self.part(), self.part()
        self.c[:, d] = self.c[:, s]
        self.lines += [f"mov.f32 %c{4 * d + i}, %c{4 * s + i};" for i in range(4)]

    def reset(self) -> None:
        d = self.part()
        self.c[:, d] = 0
        self.lines += [f"mov.f32 %c{4 * d + i}, 0f00000000;" for i in range(4)]

    def bump(self) -> None:
        d, i = self.part(), self.draw.randrange(4)
        rows, columns = C_ANY(i)
        self.c[:, d, rows, columns] += 1
        self.lines.append(f"add.f32 %c{4 * d + i}, %c{4 * d + i}, 0f3F800000;")

    def pack(self) -> None:
        """Half of an A from an accumulator, clamped so that its numbers stay small."""
        d, i, half = self.part(), self.part(), self.draw.randrange(2)
        clamped = np.clip(self.c[:, d], -3, 3)
        self.a[:, i, :, 8 * half : 8 * half + 8] = clamped
        for r in range(4):
            self.lines.append(f"min.f32 %t{r}, %c{4 * d + r}, 0f40400000;")
            self.lines.append(f"max.f32 %t{r}, %t{r}, 0fC0400000;")
        for r in range(2):
            to = f"%a{4 * i + 2 * half + r}"
            self.lines.append(f"cvt.rn.{self.kind}x2.f32 {to}, %t{2 * r + 1}, %t{2 * r};")

    def move(self) -> None:
        d, s = self.part(), self.part()
        self.b[:, d] = self.b[:, s]
        self.lines += [f"mov.b32 %b{2 * d + i}, %b{2 * s + i};" for i in range(2)]

    def grow(self, steps: int) -> None:
        actions = [self.product] * 12 + [self.copy, self.reset, self.bump, self.move]
        actions += [self.pack] if self.kind != "tf32" else []
        for _ in range(steps):
            self.draw.choice(actions)()

    def text(self) -> str:
        counts = {"a": 4 * PARTS, "b": 2 * PARTS, "c": 4 * PARTS}
        load = "".join(
            f"ld.param.u64 %p{n}, [p{n}]; mad.wide.u32 %p{n}, %i, {4 * k}, %p{n};"
            + "".join(f"ld.global.b32 %{n}{r}, [%p{n}+{4 * r}];" for r in range(k))
            for n, k in counts.items()
        )
        store = "".join(f"st.global.f32 [%pc+{4 * r}], %c{r};" for r in range(counts["c"]))
        return f""".visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc) {{
            .reg .b32 %i, %a<{counts["a"]}>, %b<{counts["b"]}>; .reg .f32 %c<{counts["c"]}>, %t<4>;
            .reg .b64 %pa, %pb, %pc; .reg .pred %first;
            mov.u32 %i, %tid.x; setp.lt.u32 %first, %i, 32; {load}
            {" ".join(self.lines)}
            {store} ret; }}"""


def lanes(matrices: Array, kind: np.dtype[Any], index: Index) -> Array:
    warps = [[to_lanes(m.astype(kind), index) for m in warp] for warp in matrices]
    return np.concatenate([np.concatenate(parts, axis=1) for parts in warps])


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("seed", one_in(4, range(24)))
def test_a_random_sequence_of_products_equals_its_steps(seed: int, kind: str) -> None:
    sequence = Sequence(seed, kind)
    dtype, _, index_a, index_b = KINDS[kind]
    a, b = lanes(sequence.a, dtype, index_a), lanes(sequence.b, dtype, index_b)
    c = lanes(sequence.c, F32, C_ANY)
    sequence.grow(4 + seed)
    run_ptx(sequence.text(), "k", 1, 32 * WARPS, a, b, c)
    got = c.reshape(WARPS, 32, PARTS, 4)
    for warp in range(WARPS):
        for part in range(PARTS):
            words = np.ascontiguousarray(got[warp, :, part])
            matrix = from_lanes(words, (16, 8), F32, C_ANY)
            assert (matrix == sequence.c[warp, part]).all(), (warp, part)
