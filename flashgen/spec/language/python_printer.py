"""Expressions as Python text, for messages and comments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter

from flashgen.spec.language.float_operations import NAN, FloatPower, FloatProduct, FloatSum
from flashgen.spec.language.symbols import SCORE


def python_text(expr: sympy.Basic) -> str:
    """``expr`` with the operators of a mod: ``q - k``, ``q // 64``, ``(q >= k) & (k < 8)``."""
    return str(_Printer().doprint(expr))


def written_order(total: sympy.Expr) -> list[sympy.Expr]:
    """The terms of a sum in reading order.

    Positive terms come first, the score before all others, and a constant comes last unless the
    sum would then begin with a minus sign.
    """
    return _ranked(total.as_ordered_terms())


def terms_in_order(total: FloatSum) -> list[sympy.Expr]:
    """The terms of a sum of floats in the order in which they are added.

    The first two, whose order does not matter, are in reading order.
    """
    for inner, term in (total.args, total.args[::-1]):
        if isinstance(inner, FloatSum):
            return [*terms_in_order(inner), term]
    return _ranked(list(total.args))


def factors_in_order(product: FloatProduct) -> list[sympy.Expr]:
    """The factors of a product of floats in the order in which they are multiplied.

    The first two, whose order does not matter, are in reading order.
    """
    for inner, factor in (product.args, product.args[::-1]):
        if isinstance(inner, FloatProduct):
            return [*factors_in_order(inner), factor]
    factors = {_as_power(factor): factor for factor in product.args}
    ordered = sympy.Mul(*map(_as_power, product.args), evaluate=False).as_ordered_factors()
    return [factors[factor] for factor in ordered]


def _as_power(expr: sympy.Expr) -> sympy.Expr:
    """A power of floats as a power of sympy, which comes first in a product."""
    return sympy.Pow(*expr.args, evaluate=False) if isinstance(expr, FloatPower) else expr


def is_subtracted(term: sympy.Expr) -> bool:
    """Whether a term of a sum is written after a minus sign."""
    return bool(term.could_extract_minus_sign()) and not isinstance(term, sympy.Add)


def _ranked(terms: list[sympy.Expr]) -> list[sympy.Expr]:
    leads = any(not t.is_number and not is_subtracted(t) for t in terms)

    def rank(term: sympy.Expr) -> tuple[int, bool]:
        negative = is_subtracted(term)
        if term.is_number:
            return (2 if leads or negative else 0), True
        return (1 if negative else 0), SCORE not in term.free_symbols

    return sorted(terms, key=rank)


def _by_sign(sign: str) -> Callable[[Any, Any], str]:
    """The method that prints ``a sign b``."""
    return lambda self, expr: str(self._divided(expr, sign))


class _Printer(StrPrinter):  # type: ignore[misc]
    def _print_Let(self, expr: Any) -> str:
        return "..."  # a part of an expression that is too large to read

    def _print_Integer(self, expr: Any) -> str:
        # Whole numbers beyond 64 bits are literals of floats.
        return str(expr.p) if abs(expr.p) < 2**63 else repr(float(expr.p))

    def _print_Add(self, expr: Any, order: Any = None) -> str:
        return self._written(written_order(expr))

    def _written(self, terms: list[sympy.Expr]) -> str:
        level = PRECEDENCE["Add"]
        text: str = self.parenthesize(terms[0], level, strict=True)
        for term in terms[1:]:
            negative = is_subtracted(term)
            part = self.parenthesize(-term if negative else term, level)
            text += f" - {part}" if negative else f" + {part}"
        return text

    def _divided(self, expr: Any, sign: str) -> str:
        level = PRECEDENCE["Mul"]
        a, b = expr.args
        dividend = self.parenthesize(a, level, strict=True)
        return f"({dividend} {sign} {self.parenthesize(b, level)})"

    def _print_Infinity(self, expr: Any) -> str:
        return "inf"

    def _print_NegativeInfinity(self, expr: Any) -> str:
        return "-inf"

    def _print_AsFloat(self, expr: Any) -> str:
        return str(self._print(expr.args[0]))

    def _print_FloatSum(self, expr: Any) -> str:
        return "nan" if expr == NAN else self._written(terms_in_order(expr))

    def _print_FloatProduct(self, expr: Any) -> str:
        a, b = expr.args
        if a == b:
            return str(self._print_Pow(sympy.Pow(a, 2, evaluate=False)))
        return str(self._print_Mul(sympy.Mul(*map(_as_power, expr.args), evaluate=False)))

    def _print_FloatQuotient(self, expr: Any) -> str:
        above, below = expr.args
        level = PRECEDENCE["Mul"]
        return f"{self.parenthesize(above, level, strict=True)}/{self.parenthesize(below, level)}"

    def _print_FloatPower(self, expr: Any) -> str:
        return str(self._print_Pow(sympy.Pow(*expr.args, evaluate=False)))

    _print_FloorDiv, _print_FloorMod = _by_sign("//"), _by_sign("%")
    _print_BitAnd, _print_BitOr, _print_BitXor = _by_sign("&"), _by_sign("|"), _by_sign("^")
    _print_ShiftLeft, _print_ShiftRight = _by_sign("<<"), _by_sign(">>")

    def _print_Relational(self, expr: Any) -> str:
        return f"{self._print(expr.lhs)} {expr.rel_op} {self._print(expr.rhs)}"

    def _print_And(self, expr: Any) -> str:
        return " & ".join(self._bracketed(arg) for arg in expr.args)

    def _print_Or(self, expr: Any) -> str:
        return " | ".join(self._bracketed(arg) for arg in expr.args)

    def _print_Not(self, expr: Any) -> str:
        return f"~{self._bracketed(expr.args[0])}"

    def _bracketed(self, expr: Any) -> str:
        text: str = self._print(expr)
        return text if isinstance(expr, sympy.Symbol) else f"({text})"

    def _print_Piecewise(self, expr: Any) -> str:
        *branches, (last, _) = expr.args
        text: str = self._print(last)
        for value, condition in reversed(branches):
            text = f"where({self._print(condition)}, {self._print(value)}, {text})"
        return text

    def _print_Function(self, expr: Any) -> str:
        name = expr.func.__name__.lower()
        return f"{name}({', '.join(map(self._print, expr.args))})"

    def _print_Element(self, expr: Any) -> str:
        name = self._print(expr.tensor)
        return f"{name}[{', '.join(map(self._print, expr.indices))}]" if expr.indices else name

    def _extreme(self, expr: Any) -> str:
        indices = list(map(self._print, expr.others))
        lo, hi = map(self._print, expr.ends)
        indices.insert(expr.axis, f"{lo}..{hi}")
        name = {"Least": "min", "Greatest": "max"}[expr.func.__name__]
        return f"{name}({self._print(expr.tensor)}[{', '.join(indices)}])"

    _print_Least = _print_Greatest = _extreme
    _print_Abs = _print_Function
