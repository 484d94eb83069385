"""Whether the integers of a kernel's expressions are within int32 in a call.

The same form of a kernel takes positions to be 0 or more where its mask divides them, which spares
the correction that rounds down.

A kernel is printed with 32-bit integers wherever the sizes, offsets and scalars of some call keep
every intermediate value within int32. It records the expressions for which other calls that are
accepted would not; a call that exceeds int32 takes another form of the kernel, with 64-bit integers
for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import sympy

from flashgen.shared.call import CallRanges
from flashgen.shared.dtypes import INT32_MAX
from flashgen.spec.language.integer_limits import Limits, limits
from flashgen.spec.language.python_printer import python_text


@dataclass
class AssumedBlock:
    """The assumptions of a kernel about the integers of one block of code.

    Attributes:
        lets: the integers of the block that have names.
        assumed: the expressions that are within int32, in order.
        natural: the offsets that are not negative.
    """

    lets: list[tuple[sympy.Symbol, sympy.Expr]] = field(default_factory=list)
    assumed: dict[sympy.Expr, None] = field(default_factory=dict)
    natural: tuple[str, ...] = ()

    @property
    def assumes(self) -> bool:
        """Whether there are assumptions."""
        return bool(self.assumed or self.natural)


def sizes_of_parts(
    expr: sympy.Expr,
    bounds: Mapping[sympy.Symbol, Limits],
    memo: dict[sympy.Expr, Limits] | None = None,
) -> int:
    """The largest magnitude of an integer expression and of its partial sums and products.

    ``bounds`` and ``memo`` are as for `limits`.
    """

    def size(part: sympy.Expr) -> int:
        return max(map(abs, limits(part, bounds, memo)))

    if isinstance(expr, sympy.Add):
        return sum(map(size, expr.args))
    if isinstance(expr, sympy.Mul):
        product = 1
        for arg in expr.args:
            product *= max(1, size(arg))
        return product
    return size(expr)


def beyond_int32(blocks: Iterable[AssumedBlock], ranges: CallRanges) -> str:
    """The first assumption that may not hold in a call, in words; "" where all hold."""
    call_bounds = dict(zip(ranges.names, ranges.ends, strict=True))
    for block in blocks:
        for offset in block.natural:
            if call_bounds[offset][0] < 0:
                return f"{offset} can be negative"
        exprs = [*(value for _, value in block.lets), *block.assumed]
        lets = {symbol for symbol, _ in block.lets}
        free: set[sympy.Symbol] = set().union(*(expr.free_symbols for expr in exprs))
        bounds = {s: call_bounds[s.name] for s in free - lets if s.name in call_bounds}
        for symbol, value in block.lets:
            bounds[symbol] = limits(value, bounds)
        let_values = dict(block.lets)
        for expr in block.assumed:
            size = sizes_of_parts(expr, bounds)
            if size > INT32_MAX:
                while not lets.isdisjoint(expr.free_symbols):
                    expr = expr.xreplace(let_values)
                return f"{python_text(expr)} can reach {size:,}"
    return ""
