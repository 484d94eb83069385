"""sympy expressions as CUDA C++ that a person can read.

Integers stay integers: int32 where the admitted ranges allow it, long long where they do not. Where
a float is wanted, sums of integers are formed exactly and converted, products are formed in float.
What decides (decisions.py) is rounded operation by operation.
"""

from __future__ import annotations

import sympy
from sympy.core.relational import Relational

from ..analysis import Block
from ..expr import is_condition, is_int
from ..expr.limits import limits
from .decisions import deciding_lets
from .floats import FloatPrinter
from .text import AND, ATOM, EQUAL, LESS, OR, PLUS, SIGNS, UNARY, Text, inside, unknown


class CPrinter(FloatPrinter):
    """Prints expressions for one kernel.

    Args:
        names: the C++ text of each symbol, a primary expression; a symbol's own name by default.
        dtype: of the operands; "float16" and "bfloat16" allow fast approximations.

    Attributes:
        helpers: names of the device functions that the printed text calls.
        tensors: those that the printed text reads, each by a function ``read_<name>(p, i, ...)``.
        extremes: (tensor, axis, whether the least) that it asks for, each by a function
            ``least_<name>_<axis>(p, lo, hi, ...)`` or ``greatest_...``.
    """

    def expr(self, expr: sympy.Basic) -> str:
        """C++ text of the kind that the expression has: bool, an integer type or float."""
        return self._any(expr)[0]

    def float(self, expr: sympy.Expr) -> str:
        """C++ text of type float, of any number."""
        return self._float(expr)[0]

    def ctype(self, expr: sympy.Basic) -> str:
        """ "bool", "int", "long long" or "float": the type of the printed text."""
        if is_condition(expr):
            return "bool"
        if is_int(expr):
            return "long long" if self._is_wide(expr) else "int"
        return "float"

    def lets(self, block: Block) -> list[str]:
        """One declaration per shared subexpression, without indentation.

        What it notes of their types is for the printing of the block's results, after this.
        """
        lines = []
        self._known.clear()
        self._wide.clear()  # another block's t0 is another variable
        deciding = deciding_lets(block)
        for symbol, value in block.lets:
            kind = self.ctype(value)
            with self._deciding(symbol in deciding):
                lines.append(f"const {kind} {symbol.name} = {self.expr(value)};")
            if kind in ("int", "long long"):
                self._known[symbol] = limits(value, self._known)
            if kind == "long long":
                self._wide.add(symbol)
        return lines

    def _any(self, expr: sympy.Basic) -> Text:
        if is_condition(expr):
            return self._condition(expr)
        return self._int(expr) if is_int(expr) else self._float(expr)

    # Conditions.

    def _condition(self, expr: sympy.Basic) -> Text:
        if isinstance(expr, sympy.Symbol):
            return self._name(expr)
        if expr in (sympy.true, sympy.false):
            return str(bool(expr)).lower(), ATOM
        if isinstance(expr, sympy.Not):
            return "!" + inside(self._condition(expr.args[0]), UNARY), UNARY
        if isinstance(expr, sympy.And):
            return " && ".join(inside(self._condition(arg), EQUAL) for arg in expr.args), AND
        if isinstance(expr, sympy.Or):
            # Brackets around && inside || are not needed, and every reader wants them.
            parts = [self._condition(arg) for arg in expr.args]
            return " || ".join(inside(part, EQUAL) for part in parts), OR
        if isinstance(expr, Relational):
            return self._relation(expr)
        raise unknown(expr)

    def _relation(self, expr: Relational) -> Text:
        if expr.lhs.is_number and not expr.rhs.is_number:
            expr = expr.reversed
        left, right, sign = expr.lhs, expr.rhs, SIGNS[type(expr)]
        if is_int(left) and is_int(right):
            a, b = self._int(left), self._int(right)
        else:
            with self._deciding(left.has(sympy.Add) or right.has(sympy.Add)):
                a, b = self._float(left), self._float(right)
        level = EQUAL if sign in ("==", "!=") else LESS
        return f"{inside(a, PLUS)} {sign} {inside(b, PLUS)}", level
