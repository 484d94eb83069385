"""Random programs, generated twice: as CUDA for the compiler and the emulator, and as Python.

A program is a few stages of per-thread code (nested branches, loops with their own trip counts,
break and continue, a shared slot, a local array, calls) with an exchange between the threads after
each: a shuffle inside the warp, or shared memory across the block. All numbers are 32-bit unsigned.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import run
from tests.support.tiers import one_in, slow

MASK = 0xFFFFFFFF
THREADS, PROGRAMS, STAGES = 96, 16, 2
NAMES = ["a", "b", "c", "d"]


class Writer:
    """Grows one program; every statement is added to the C text and to the Python text."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.c: list[str] = []
        self.py: list[str] = []
        self.loops = 0

    def add(self, depth: int, c: str, py: str) -> None:
        self.c += ["    " * depth + c] if c else []
        self.py += ["    " * depth + py] if py else []

    def expression(self, depth: int = 0) -> tuple[str, str]:
        draw = self.draw
        if depth > 1 or draw.random() < 0.25:
            leaf = draw.choice(
                [*NAMES, "t", "n", str(draw.randrange(1, 50)), "i0" if self.loops else "t"]
            )
            return (f"{leaf}u" if leaf.isdigit() else leaf), leaf
        (c1, p1), (c2, p2) = self.expression(depth + 1), self.expression(depth + 1)
        shift = draw.randrange(1, 31)
        return draw.choice([
            (f"({c1} + {c2})", f"({p1} + {p2} & M)"),
            (f"({c1} - {c2})", f"({p1} - {p2} & M)"),
            (f"({c1} * {c2})", f"({p1} * {p2} & M)"),
            (f"({c1} ^ {c2})", f"({p1} ^ {p2})"),
            (f"({c1} & ~{c2})", f"({p1} & (M ^ {p2}))"),
            (f"({c1} << {shift} | {c2} >> {32 - shift})",
             f"({p1} << {shift} & M | {p2} >> {32 - shift})"),
            (f"({c1} % ({c2} | 1u))", f"({p1} % ({p2} | 1))"),
            (f"(unsigned)((int){c1} >> {shift})", f"(signed({p1}) >> {shift} & M)"),
            (f"({c1} < {c2} ? {c2} : {c1} + 1u)", f"({p2} if {p1} < {p2} else {p1} + 1 & M)"),
            (f"__umulhi({c1}, {c2})", f"({p1} * {p2} >> 32)"),
            (f"(unsigned)__popc({c1})", f"({p1}).bit_count()"),
            (f"shrink({c1}, {c2})", f"shrink({p1}, {p2})"),
        ])  # fmt: skip

    def condition(self) -> tuple[str, str]:
        c, p = self.expression(1)
        k, r = self.draw.randrange(2, 6), self.draw.randrange(2)
        return f"{c} % {k}u == {r}u", f"{p} % {k} == {r}"

    def block(self, depth: int, inside_loop: bool, size: int) -> None:
        draw = self.draw
        for _ in range(size):
            kind = draw.random()
            if kind < 0.5 or depth > 3:
                name, (c, p) = draw.choice(NAMES), self.expression()
                self.add(depth, f"{name} = {c};", f"{name} = {p}")
            elif kind < 0.6:
                c, p = self.expression(1)
                at, k = draw.choice(["t & 7", "a & 7", "b >> 29"]), draw.randrange(8)
                self.add(depth, f"own[{at}] += {c};", f"own[{at}] = own[{at}] + {p} & M")
                self.add(depth, f"c ^= own[d + {k} & 7];", f"c ^= own[d + {k} & 7]")
            elif kind < 0.85:
                c, p = self.condition()
                self.add(depth, f"if ({c}) {{", f"if {p}:")
                self.block(depth + 1, inside_loop, draw.randrange(1, 4))
                if draw.random() < 0.6:
                    self.add(depth, "} else {", "else:")
                    self.block(depth + 1, inside_loop, draw.randrange(1, 4))
                self.add(depth, "}", "")
                if inside_loop and draw.random() < 0.4:
                    c, p = self.condition()
                    word = draw.choice(["break", "continue"])
                    self.add(depth, f"if ({c}) {word};", f"if {p}: {word}")
            else:
                c, p = self.expression(2)
                i = f"i{self.loops}"
                self.loops += 1
                self.add(depth, f"for (unsigned {i} = 0; {i} < {c} % 6u; ++{i}) {{", f"{i} = -1")
                self.add(depth, "", "while True:")
                self.add(depth + 1, "", f"{i} += 1")
                self.add(depth + 1, "", f"if not {i} < {p} % 6: break")
                self.block(depth + 1, True, draw.randrange(1, 4))
                self.add(depth, "}", "")
                self.loops -= 1


def build(seed: int) -> tuple[str, list[Callable[..., tuple[int, ...]]]]:
    """The text of the kernel and one Python function per stage."""
    texts, stages = [], []
    for stage in range(STAGES):
        writer = Writer(1000 * seed + stage)
        writer.block(1, False, 4)
        exchange = (
            f"a ^= __shfl_xor_sync(~0u, b, {1 << stage + 1});"
            if stage % 2 == 0
            else "__syncthreads(); slot[t] = b; __syncthreads(); a ^= slot[(t * 5u + 3u) % 96u];"
        )
        texts += [*writer.c, "    " + exchange]
        body = "\n".join(writer.py)
        source = f"def stage(t, n, a, b, c, d, own):\n{body}\n    return a, b, c, d\n"
        space: dict[str, Any] = {"M": MASK, "shrink": shrink, "signed": signed}
        exec(source, space)
        stages.append(space["stage"])
    names = ", ".join(NAMES)
    text = textwrap.dedent(f"""
        extern "C" __global__ void program{seed}(const unsigned* in, uint4* out, unsigned n) {{
            __shared__ unsigned slot[96];
            unsigned t = threadIdx.x, a = in[blockIdx.x * 96 + t], b = t * 3u, c = a >> 5, d = n;
            unsigned own[8] = {{0, 1, 2, 3, 4, 5, 6, 7}};
        """) + "\n".join(texts)
    return text + f"\n    out[blockIdx.x * 96 + t] = make_uint4({names});\n}}\n", stages


def signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def shrink(x: int, y: int) -> int:
    while x > y and x & 3:
        x = x // 3 if x & 4 else x >> 1
    return x ^ y


SHRINK = """
__device__ __noinline__ unsigned shrink(unsigned x, unsigned y) {
    while (x > y && (x & 3u)) x = x & 4u ? x / 3u : x >> 1;
    return x ^ y;
}
"""
BUILT = {seed: build(seed) for seed in range(PROGRAMS)}
SOURCE = SHRINK + "".join(text for text, _ in BUILT.values())


def expected(seed: int, given: list[int], n: int) -> list[tuple[int, ...]]:
    rows = [(x, t * 3, x >> 5, n) for t, x in enumerate(given)]
    own = [list(range(8)) for _ in rows]
    for number, stage in enumerate(BUILT[seed][1]):
        rows = [stage(t, n, *row, own[t]) for t, row in enumerate(rows)]
        b = [row[1] for row in rows]
        for t, row in enumerate(rows):
            other = t ^ (1 << number + 1) if number % 2 == 0 else (t * 5 + 3) % 96
            rows[t] = (row[0] ^ b[other], *row[1:])
    return rows


@pytest.mark.parametrize("order", [slow(None), 1])
@pytest.mark.parametrize("seed", one_in(2, range(PROGRAMS)))
def test_a_random_program_gives_what_python_gives(seed: int, order: int | None) -> None:
    rng = np.random.default_rng(seed)
    given = rng.integers(0, 1 << 32, 2 * THREADS, np.uint32) >> rng.integers(0, 28, 2 * THREADS)
    given = given.astype(np.uint32)
    out = np.zeros((2 * THREADS, 4), np.uint32)
    run(SOURCE, f"program{seed}", (2,), (THREADS,), given, out, np.uint32(11), seed=order)
    for block in range(2):
        part = slice(block * THREADS, (block + 1) * THREADS)
        want = expected(seed, given[part].tolist(), 11)
        assert out[part].tolist() == [list(row) for row in want]
