"""Whether the integers of a kernel's expressions are within int32 in a call.

A kernel is printed with 32-bit integers wherever the sizes, offsets and scalars of some call keep
every intermediate value within int32. It records the expressions for which other calls that are
accepted would not; a call that exceeds int32 takes another form of the kernel, with 64-bit integers
for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import sympy

from flashgen.dtypes import INT32_MAX, POSITION_LIMIT
from flashgen.language import python_text
from flashgen.language.integer_limits import Limits, limits
from flashgen.signature import WHOLE

# Threads compute positions past the end of their tile, which they do not use.
_PAST_THE_END = 1024


@dataclass
class AssumedBlock:
    """The expressions of one block of code that a kernel takes to be within int32.

    Attributes:
        lets: the integers of the block that have names.
        assumed: the expressions, in order.
    """

    lets: list[tuple[sympy.Symbol, sympy.Expr]] = field(default_factory=list)
    assumed: dict[sympy.Expr, None] = field(default_factory=dict)


class CallRanges(NamedTuple):
    """The least and the greatest value in a call of each name that expressions use, in order."""

    names: tuple[str, ...]
    ends: tuple[Limits, ...]

    @staticmethod
    def of(
        sizes: Mapping[str, int],
        offsets: Mapping[str, int | None],
        scalars: Mapping[str, int | float],
        of_sequences: bool = False,
    ) -> CallRanges:
        """
        Args:
            sizes: batch, heads, seq_q, seq_k.
            offsets: q_offset and k_offset; None where only the device knows them.
            of_sequences: whether sequences have lengths of their own, up to these.
        """
        found: dict[str, Limits] = {name: (size, size) for name, size in sizes.items()}
        found |= {"b": (0, sizes["batch"] - 1), "h": (0, sizes["heads"] - 1)}
        for axis in ("q", "k"):
            offset, length = offsets[f"{axis}_offset"], sizes[f"seq_{axis}"]
            most = -POSITION_LIMIT, POSITION_LIMIT
            first, last = most if offset is None else (offset, offset)
            found[f"{axis}_offset"] = first, last
            ends = first - _PAST_THE_END, last + length + _PAST_THE_END
            found |= dict.fromkeys((axis, f"{axis}_lo", f"{axis}_hi"), ends)
            if of_sequences:
                found[f"seq_{axis}"] = 0, length
        found |= {n: (int(x), int(x)) for n, x in scalars.items() if not isinstance(x, float)}
        if of_sequences and WHOLE[3] in found:
            found[WHOLE[3]] = found["seq_k"]
        return CallRanges(tuple(found), tuple(found.values()))

    def rounded(self) -> CallRanges:
        """Wider ranges with powers of two as their ends, which many calls share."""
        return CallRanges(self.names, tuple((_below(lo), -_below(-hi)) for lo, hi in self.ends))


def _below(number: int) -> int:
    """A number that is not larger and of the same sign: 1, 0 or the opposite of a power of two."""
    return -(1 << (-number).bit_length()) if number < 0 else min(number, 1)


def sizes_of_parts(
    expr: sympy.Expr,
    known: Mapping[sympy.Symbol, Limits],
    memo: dict[sympy.Expr, Limits] | None = None,
) -> int:
    """The largest magnitude of an integer expression and of its partial sums and products.

    ``known`` and ``memo`` are those of `limits`.
    """

    def size(part: sympy.Expr) -> int:
        return max(map(abs, limits(part, known, memo)))

    if isinstance(expr, sympy.Add):
        return sum(map(size, expr.args))
    if isinstance(expr, sympy.Mul):
        product = 1
        for arg in expr.args:
            product *= max(1, size(arg))
        return product
    return size(expr)


def beyond_int32(blocks: Iterable[AssumedBlock], ranges: CallRanges) -> str:
    """The first expression that may exceed int32 in a call, with the reason; "" where none may."""
    given = dict(zip(ranges.names, ranges.ends, strict=True))
    for block in blocks:
        exprs = [*(value for _, value in block.lets), *block.assumed]
        lets = {symbol for symbol, _ in block.lets}
        free: set[sympy.Symbol] = set().union(*(expr.free_symbols for expr in exprs))
        known = {s: given[s.name] for s in free - lets if s.name in given}
        for symbol, value in block.lets:
            known[symbol] = limits(value, known)
        whole = dict(block.lets)
        for expr in block.assumed:
            size = sizes_of_parts(expr, known)
            if size > INT32_MAX:
                while not lets.isdisjoint(expr.free_symbols):
                    expr = expr.xreplace(whole)
                return f"{python_text(expr)} can reach {size:,}"
    return ""
