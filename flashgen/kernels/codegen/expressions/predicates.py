"""Predicates: comparisons of floats, floors and indices, where rounding must not vary.

The compiler fuses a product and a sum into a multiply-add in some places and not in others. A value
may then differ in its last bit, but a predicate must have one result in all warps and kernels: if
two warps disagree on skipping a tile, one waits for a tile that is never loaded, and if the forward
and the backward pass disagree on a key, the gradients are wrong. Predicates are therefore rounded
operation by operation.
"""

from __future__ import annotations

from collections.abc import Set

import sympy
from sympy.core.relational import Relational

from flashgen.spec.analysis.sharing import CodeBlock
from flashgen.spec.language.symbols import DISTANCE, is_condition
from flashgen.spec.language.sympy_functions import Floor, FloorDiv, FloorMod, Round
from flashgen.spec.language.tensor_elements import TensorRead

# Functions with jumps, where a difference in the last bit changes the result.
JUMPS = (Floor, Round, FloorDiv, FloorMod, sympy.sign)


def predicate_lets(block: CodeBlock) -> set[sympy.Symbol]:
    """The shared subexpressions that predicates use, directly or through others."""
    values = dict(block.lets)
    used: set[sympy.Symbol] = set()
    waiting: list[sympy.Basic] = [
        part
        for expr in (*values.values(), *block.results)
        for part in sympy.preorder_traversal(expr)
        if isinstance(part, (*JUMPS, Relational, TensorRead))
    ]
    while waiting:
        new = (waiting.pop().free_symbols & values.keys()) - used
        used |= new
        waiting += [values[symbol] for symbol in new]
    return used


def lets_of_integers(block: CodeBlock) -> set[sympy.Symbol]:
    """The shared subexpressions that are made of integers and literals alone."""
    symbols: set[sympy.Symbol] = set()
    for symbol, value in block.lets:
        if is_of_integers(value, symbols):
            symbols.add(symbol)
    return symbols


def is_of_integers(expr: sympy.Basic, symbols: Set[sympy.Symbol]) -> bool:
    """Whether an expression depends on no float of a call, whose size may be anything.

    Args:
        symbols: further symbols that depend on none.
    """
    allowed = symbols | {DISTANCE}
    return all(
        symbol.is_integer or is_condition(symbol) or symbol in allowed
        for symbol in expr.free_symbols
    )
