"""The printer of sympy expressions as readable CUDA C++.

Integers stay integers: int where the ranges of values allow it, int64 elsewhere. In a float context
sums of integers are computed exactly and converted, and products are computed in float. Predicates
(predicates.py) are rounded operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy
from sympy.core.relational import Relational

from flashgen.kernels.codegen.expressions.cpp_text import (
    AND,
    ATOM,
    EQUAL,
    LESS,
    OR,
    PLUS,
    UNARY,
    Text,
    inside,
    unknown,
)
from flashgen.kernels.codegen.expressions.floats import FloatPrinter
from flashgen.kernels.codegen.expressions.let_names import let_names
from flashgen.kernels.codegen.expressions.predicates import lets_of_integers, predicate_lets
from flashgen.kernels.codegen.integer_ranges import AssumedBlock
from flashgen.spec.analysis.sharing import CodeBlock, is_costly, is_divisibility
from flashgen.spec.language.divisors import is_data
from flashgen.spec.language.float_operations import FloatSum
from flashgen.spec.language.integer_limits import limits
from flashgen.spec.language.symbols import APART, K, Q, is_condition, is_int

_SIGNS = ((">=", 0), (">", -1), ("<", 0), ("<=", -1))
"""Comparisons with the sign of a number."""


class CPrinter(FloatPrinter):
    """Prints expressions for one kernel.

    Args:
        names: the C++ text of each symbol, a primary expression; the symbol's name where missing.
        dtype: the operands' dtype; "float16" and "bfloat16" allow fast approximations.
        wide: whether integers have 64 bits wherever some accepted call needs them. Otherwise they
            have 32 bits wherever some call has small enough numbers.

    Attributes:
        multipliers: C++ of the multiplier and shift of each symbol by which kernels divide fast.
        inverses: C++ of the inverse and limit of each of these symbols, for tests for multiples.
        assumptions: the integers that must be within int32 where integers are not wide, by block.
        evaluates_all: whether conditions are joined by ``&`` and ``|`` where all of them are cheap.
            The compiler turns ``&&`` and ``||`` into selections, which cost more instructions.
        score_is_product: whether kernels multiply the score by the scale where they pass it.
        rounds_products: whether every product of floats is rounded. Otherwise the compiler chooses
            which products it fuses with sums, and may choose differently in another kernel.
        tensors: the tensors that the text reads, each by a function ``read_<name>(p, i, ...)``.
        extremes: (tensor, axis, true for the minimum) for each min/max table that the text reads,
            by a function ``least_<name>_<axis>(p, lo, hi, ...)`` or ``greatest_...``.
    """

    def expr(self, expr: sympy.Basic) -> str:
        """C++ text of the expression's own kind: bool, an integer type or float."""
        return self._any(expr)[0]

    def float(self, expr: sympy.Expr) -> str:
        """C++ text of type float for any numeric expression."""
        return self._float(expr)[0]

    def joined(self, conditions: Iterable[sympy.Basic], operator: str) -> str:
        """C++ text of the conditions joined by ``&&``, ``||``, ``&`` or ``|``, in this order."""
        parts = [self._condition(condition) for condition in conditions]
        if len(parts) == 1:
            return parts[0][0]
        # C++ needs no brackets around && inside ||, or comparisons inside & and |, but readers do.
        level = UNARY if operator in ("&", "|") else EQUAL
        return f" {operator} ".join(inside(part, level) for part in parts)

    def ctype(self, expr: sympy.Basic) -> str:
        """ "bool", "int", "int64" or "float": the type of the printed text."""
        if is_condition(expr):
            return "bool"
        if is_int(expr):
            return "int64" if self._is_wide(expr) else "int"
        return "float"

    def lets(self, block: CodeBlock, *, nested: bool = False) -> list[str]:
        """One declaration per shared subexpression, without indentation.

        It records the types of the names, which printing the results of the block needs later.

        Args:
            nested: whether the block is inside the last block that was not nested, whose names it
                may use.
        """
        self.begin(block, nested=nested)
        return [self.let(symbol, value) for symbol, value in block.lets]

    def begin(self, block: CodeBlock, *, nested: bool = False) -> None:
        """Names the shared subexpressions of a block, for `let`; ``nested`` as in `lets`."""
        self._limits.clear()
        self._smallest_limits.clear()
        self._widths.clear()
        for symbol in [*self._nested_lets, *(() if nested else self._lets)]:
            del self.names[symbol]  # names and their types are local to their block
            self._bounds.pop(symbol, None)
            self._smallest.pop(symbol, None)
            self._wide.discard(symbol)
            self._data.discard(symbol)
        names = let_names(block, self.names)
        self._lets, self._nested_lets = (self._lets, names) if nested else (names, {})
        self.names |= names
        self._predicates = predicate_lets(block)
        self._integer_lets = lets_of_integers(block)
        outer = self.assumptions[-1].lets if nested else ()
        self.assumptions.append(AssumedBlock([*outer]))

    def let_type(self, symbol: sympy.Symbol, value: sympy.Basic) -> str:
        """As `ctype`; a let is a float where its integers may overflow."""
        is_float = not is_condition(symbol) and not symbol.is_integer
        return "float" if is_float else self.ctype(value)

    def let(self, symbol: sympy.Symbol, value: sympy.Basic) -> str:
        """The declaration of one shared subexpression of the block that `begin` was given."""
        kind = self.let_type(symbol, value)
        with self._predicate(symbol in self._predicates):
            text = self.float(value) if kind == "float" else self.expr(value)
            if symbol == APART:
                text = self._call("difference", *(self._name(s)[0] for s in (Q, K)))[0]
            line = f"const {kind} {self.names[symbol]} = {text};"
        if kind in ("int", "int64"):
            self._bounds[symbol] = limits(value, self._bounds, self._limits)
            self._smallest[symbol] = limits(value, self._smallest, self._smallest_limits)
            self.assumptions[-1].lets.append((symbol, value))
        if kind == "int64":
            self._wide.add(symbol)
        if is_data(value) or not value.free_symbols.isdisjoint(self._data):
            self._data.add(symbol)
        return line

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
        if isinstance(expr, sympy.And | sympy.Or):
            operator, level = ("&&", AND) if isinstance(expr, sympy.And) else ("||", OR)
            if self.evaluates_all and not is_costly(expr):
                operator, level = operator[0], OR
            return self.joined(expr.args, operator), level
        if isinstance(expr, Relational):
            return self._relation(expr)
        raise unknown(expr)

    def _relation(self, expr: Relational) -> Text:
        if expr.lhs.is_number and not expr.rhs.is_number:
            expr = expr.reversed
        left, right, sign = expr.lhs, expr.rhs, expr.rel_op
        divides = self._divides(*left.args) if is_divisibility(expr) else None
        if divides is not None:
            return divides if sign == "==" else ("!" + divides[0], UNARY)
        if self.evaluates_all and left == APART and (sign, right) in _SIGNS:
            text = self._call("is_natural", self._name(left)[0])
            return text if sign[0] == ">" else ("!" + text[0], UNARY)
        within = self._within(expr)
        if within is not None:
            return within
        if is_int(left) and is_int(right):
            a, b = self._int(left), self._int(right)
        else:
            with self._predicate(fuses=expr.has(sympy.Add, FloatSum)):
                a, b = self._float(left), self._float(right)
        level = EQUAL if sign in ("==", "!=") else LESS
        return f"{inside(a, PLUS)} {sign} {inside(b, PLUS)}", level

    def _within(self, expr: Relational) -> Text | None:
        """A comparison of an absolute value with a number from 0 on; None for all others."""
        if not isinstance(expr.lhs, sympy.Abs):
            expr = expr.reversed
        size, most, sign = expr.lhs, expr.rhs, expr.rel_op
        if not isinstance(size, sympy.Abs) or not (is_int(size) and is_int(most)):
            return None
        if sign not in ("<=", ">", "<", ">="):
            return None
        most = most if sign in ("<=", ">") else most - 1
        if self._least(most) < 0 or self._is_wide(size) or self._is_wide(most):
            return None
        text = self._call("within", self._int(size.args[0])[0], self._int(most)[0])
        return text if sign[0] == "<" else ("!" + text[0], UNARY)
