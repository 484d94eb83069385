"""Random mods over the whole language, up to 40 operations deep, with shared subexpressions.

A mod is a sequence of steps, each an operation on results of earlier ones, mostly of the last, so
that depth grows with the steps. Bounds keep the error rule meaningful: integers stay in 50 bits
for all positions and scalars that a call may have; floats, and the Lipschitz constants of what
they are made of, stay small, since a chaotic expression has no result in float32. Where a function
jumps (comparisons, sign), its argument is an integer or a captured float away from the jump, which
every precision decides alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import flashgen as fg

Value = Any  # a traced value
DEEPEST = 40

IDS = fg.Tensor("ids", ("batch", "tokens"), "int32")
FLAGS = fg.Tensor("flags", ("heads", "seq_k"), "bool")
EDGES = fg.Tensor("edges", (5,), "int32")
TABLE = fg.Tensor("table", ("places",), "float32", grad=True)
GATE = fg.Tensor("gate", ("heads",), "float32", grad=True)
ROWS = fg.Tensor("rows", ("batch", "seq_q"), "float16", grad=True)
WIDTH = fg.Scalar("width", "int32", minimum=1)
SLOPE = fg.Scalar("slope", "float32")


class Number(NamedTuple):
    """An integer with its range, or a float with a bound of its absolute value.

    ``slope`` bounds the derivative of a float with respect to the score and each capture.
    """

    value: Value
    low: float
    high: float
    slope: float = 0.0
    depth: int = 0

    @property
    def size(self) -> float:
        return max(abs(self.low), abs(self.high))


@dataclass
class Mod:
    """The results so far of one mod, and the random numbers that choose the next."""

    random: random.Random
    integers: list[Number]
    floats: list[Number] = field(default_factory=list)
    conditions: list[Value] = field(default_factory=list)

    def pick(self, pool: list[Number]) -> Number:
        """One of the last two results as often as any; none that is as deep as allowed."""
        some = pool[-2:] if self.random.random() < 0.5 else pool
        number = self.random.choice(some)
        return number if number.depth < DEEPEST - 3 else pool[0]

    # ---- integers

    def small(self) -> Number:
        """A positive integer that may be a divisor or a distance of a shift."""
        if self.random.random() < 0.3:
            return Number(WIDTH, 1, 2**30)
        value = self.random.choice([1, 2, 3, 5, 16, 31])
        return Number(value, value, value)

    def bounded(self) -> Number:
        """An integer whose product with a scalar stays in 64 bits."""
        number = self.pick(self.integers)
        if number.size <= 2**31:
            return number
        return Number(number.value % 97, 0, 96, depth=number.depth + 1)

    def integer_step(self) -> None:
        a, b, d = self.bounded(), self.bounded(), self.small()
        size = a.size + b.size
        power = 2 ** int(size).bit_length()
        value, low, high = self.random.choice(
            [
                lambda: (a.value + b.value, -size, size),
                lambda: (a.value - b.value, -size, size),
                lambda: (a.value * d.value, -a.size * d.high, a.size * d.high),
                lambda: (a.value // d.value, -a.size, a.size),
                lambda: (a.value % d.value, 0, d.high),
                lambda: (fg.minimum(a.value, b.value), -size, size),
                lambda: (fg.maximum(a.value, b.value), -size, size),
                lambda: (fg.clamp(a.value, -11, 60), -11, 60),
                lambda: (fg.abs(a.value), 0, a.size),
                lambda: (fg.sign(a.value), -1, 1),
                lambda: (a.value & b.value, -power, power),
                lambda: (a.value | b.value, -power, power),
                lambda: (a.value ^ b.value, -power, power),
                lambda: (a.value << 2, -4 * a.size, 4 * a.size),
                lambda: (a.value >> (d.value & 31), -a.size, a.size),
                lambda: (fg.popcount(a.value), 0, 32),
                lambda: (fg.where(self.condition(), a.value, b.value), -size, size),
            ]
        )()
        depth = max(a.depth, b.depth) + 1
        self.integers.append(Number(value, low, high, depth=depth))

    # ---- conditions

    def condition(self) -> Value:
        """A comparison of integers, a captured bool, or a combination of earlier ones."""
        kind = self.random.random()
        if kind < 0.1:
            made = FLAGS[self.integers[1].value, self.integers[3].value]
        elif kind < 0.2:
            made = GATE[self.integers[1].value] > 0.25  # its elements keep away from 0.25
        elif kind < 0.6 or not self.conditions:
            compare: Callable[[Value, Value], Value] = self.random.choice(
                [
                    lambda a, b: a < b,
                    lambda a, b: a <= b,
                    lambda a, b: a == b,
                    lambda a, b: a != b,
                    lambda a, b: a >= b,
                ]
            )
            made = compare(self.pick(self.integers).value, self.pick(self.integers).value)
        else:
            a, b = self.random.choice(self.conditions), self.random.choice(self.conditions)
            made = self.random.choice(
                [lambda: a & b, lambda: a | b, lambda: a ^ b, lambda: ~a, lambda: fg.where(a, b, a)]
            )()
        self.conditions.append(made)
        return made

    # ---- floats

    def float_step(self) -> None:
        a, b = self.pick(self.floats), self.pick(self.floats)
        x, y = a.value, b.value
        size, slope = a.size + b.size, a.slope + b.slope
        product = a.size * b.slope + b.size * a.slope
        value, bound, steep = self.random.choice(
            [
                lambda: (x + y, size, slope),
                lambda: (x - y, size, slope),
                lambda: (x * y, a.size * b.size, product),
                lambda: (x / (2 + fg.abs(y)), a.size / 2, slope * (1 + a.size) / 2),
                lambda: (x * SLOPE, a.size, a.slope),
                lambda: (fg.minimum(x, y + 0.125), size + 1, slope),
                lambda: (fg.maximum(x, y - 0.125), size + 1, slope),
                lambda: (fg.where(self.condition(), x, y), size, slope),
                lambda: (fg.clamp(x, -2, 1.5), min(a.size, 2), a.slope),
                lambda: (fg.abs(x + 0.375), a.size + 1, a.slope),
                lambda: (fg.tanh(x), 1, a.slope),
                lambda: (fg.sin(x), 1, a.slope),
                lambda: (fg.cos(x), 1, a.slope),
                lambda: (fg.sigmoid(x), 1, a.slope),
                lambda: (fg.erf(x), 1, 1.2 * a.slope),
                lambda: (fg.erfc(x), 2, 1.2 * a.slope),
                lambda: (fg.exp(-fg.abs(x + 0.375)), 1, a.slope),
                lambda: (fg.exp2(fg.minimum(x, 1.25)), 3, 2 * a.slope),
                lambda: (fg.expm1(fg.minimum(x, 0.75)), 2, 3 * a.slope),
                lambda: (fg.log1p(fg.abs(x + 0.375)), a.size, a.slope),
                lambda: (fg.log(1 + x * x), a.size, a.slope),
                lambda: (fg.log2(2 + x * x), a.size + 1, a.slope),
                lambda: (fg.sqrt(1 + x * x), a.size + 1, a.slope),
                lambda: (fg.rsqrt(1 + x * x), 1, a.slope),
                lambda: (fg.atan2(x, 2 + fg.abs(y)), 1, slope),
                lambda: ((1 + fg.tanh(x)) ** 2, 4, 4 * a.slope),
                lambda: (x + 0.01 * (self.pick(self.integers).value % 97), a.size + 1, a.slope),
            ]
        )()
        # Factors are powers of two, which add no rounding.
        while bound > 2 or steep > 2:
            value, bound, steep = 0.5 * value, bound / 2, steep / 2
        self.floats.append(Number(value, -bound, bound, steep, max(a.depth, b.depth) + 1))


def _begun(seed: int, b: Value, h: Value, q: Value, k: Value) -> Mod:
    """A mod that has done its integer steps."""
    positions = [Number(at, 0, 2**28) for at in (b, h, q, k)]
    reads = [
        Number(IDS[b, q], -(2**31), 2**31),
        Number(IDS[b, k], -(2**31), 2**31),
        Number(EDGES[k % 7], -(2**31), 2**31),
        Number(fg.seq_k, 0, 2**28),
    ]
    mod = Mod(random.Random(seed), positions + reads)
    for _ in range(mod.random.choice([2, 6, 20, 40])):
        mod.integer_step()
        if mod.random.random() < 0.3:
            mod.condition()
    return mod


def random_mask(seed: int) -> Callable[..., Value]:
    """A mask_mod that keeps at least the diagonal, and half as often the lower triangle."""

    def mask_mod(b: Value, h: Value, q: Value, k: Value) -> Value:
        mod = _begun(seed, b, h, q, k)
        for _ in range(mod.random.randint(1, 12)):
            kept = mod.condition()
        return kept | ((q == k) if mod.random.random() < 0.5 else (q >= k) & (q - k < WIDTH + 60))

    return mask_mod


def random_score(seed: int) -> Callable[..., Value]:
    """A score_mod of a score that is divided by 2 first."""

    def score_mod(score: Value, b: Value, h: Value, q: Value, k: Value) -> Value:
        mod = _begun(seed, b, h, q, k)
        place = mod.integers[-1].value
        mod.floats = [
            Number(0.25 * score, -2, 2, 0.25),
            Number(GATE[h], -2, 2, 1),
            Number(TABLE[q - k + 60], -2, 2, 1),
            Number(TABLE[place], -2, 2, 1),
            Number(ROWS[b, q], -2, 2, 1),
            Number(0.25 * score, -2, 2, 0.25),
        ]
        for _ in range(mod.random.choice([3, 10, 25, 45])):
            mod.float_step()
        last = mod.floats[-1].value
        return mod.random.choice([lambda: score + last, lambda: score * last, lambda: last])()

    return score_mod


def captures(seed: int, batch: int, heads: int, seq_q: int, seq_k: int) -> dict[str, Any]:
    """Tensors and scalars of a call, as keyword arguments of the oracle."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return 2 * torch.rand(shape, generator=generator) - 1

    gate = uniform(heads)
    return {
        "tensors": {
            "ids": torch.randint(9, (batch, max(seq_q, seq_k)), generator=generator).int(),
            "flags": uniform(heads, seq_k) > 0,
            "edges": torch.tensor([-20, -3, 0, 7, 40], dtype=torch.int32),
            "table": uniform(120),
            "gate": torch.where((gate - 0.25).abs() < 0.01, 0.5, gate),
            "rows": uniform(batch, seq_q).half(),
        },
        "scalars": {"width": 1 + seed % 40, "slope": 0.75},
    }
