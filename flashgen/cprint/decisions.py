"""What decides: a comparison of floats, a floor, an index.

Left to itself, the compiler merges a product into a sum in one place and not in another. A value
may differ by its last bit, but two warps or two kernels that ask one question must get one answer:
a tile that one of them skips and the other waits for would never come, and a key that the forward
pass keeps and the backward pass does not would have a gradient of its own.
"""

from __future__ import annotations

import sympy
from sympy.core.relational import Relational

from ..analysis import Block
from ..expr import Floor, FloorDiv, FloorMod
from ..expr.element import Reading

# Functions with jumps: two answers to one question differ by more than rounding.
JUMPS = (Floor, FloorDiv, FloorMod, sympy.sign)


def deciding_lets(block: Block) -> set[sympy.Symbol]:
    """The shared subexpressions from which something is decided, perhaps through others."""
    values = dict(block.lets)
    found: set[sympy.Symbol] = set()
    waiting: list[sympy.Basic] = [
        part
        for expr in (*values.values(), *block.results)
        for part in sympy.preorder_traversal(expr)
        if isinstance(part, (*JUMPS, Relational, Reading))
    ]
    while waiting:
        new = (waiting.pop().free_symbols & values.keys()) - found
        found |= new
        waiting += [values[symbol] for symbol in new]
    return found
