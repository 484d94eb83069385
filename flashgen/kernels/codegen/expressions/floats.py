"""Float expressions as C++: sums of integers are exact and converted, products are in float."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import sympy

from flashgen.kernels.codegen.expressions.cpp_text import (
    ATOM,
    FUNCTIONS,
    TIMES,
    UNARY,
    Text,
    inside,
    literal,
    unknown,
)
from flashgen.kernels.codegen.expressions.integers import IntegerPrinter
from flashgen.kernels.codegen.expressions.predicates import JUMPS, is_of_integers
from flashgen.shared.dtypes import FLOAT32_LEAST
from flashgen.spec.language.bit_functions import BitFunction
from flashgen.spec.language.float_operations import (
    AsFloat,
    FloatPower,
    FloatProduct,
    FloatQuotient,
    FloatSum,
)
from flashgen.spec.language.integer_limits import fits
from flashgen.spec.language.lets import contains
from flashgen.spec.language.operations import LARGEST_REPEATED, is_fraction_power
from flashgen.spec.language.python_printer import factors_in_order, terms_in_order, written_order
from flashgen.spec.language.symbols import PRODUCT, SCORE, K, Q, is_int
from flashgen.spec.language.sympy_functions import (
    FloorDiv,
    FloorMod,
    Maximum,
    Minimum,
    Select,
    branches_of,
)
from flashgen.spec.language.tensor_elements import Element, TensorRead

_HALF = sympy.Rational(1, 2)


class FloatPrinter(IntegerPrinter):
    """The part of `CPrinter` that prints floats."""

    @contextmanager
    def _predicate(self, active: bool = True, *, fuses: bool = True) -> Iterator[None]:
        """A context in which nothing is approximate, if ``active`` is true.

        Args:
            fuses: whether a product could be fused with a sum, so that products are rounded first.
        """
        before = self._in_predicate, self._rounds
        self._in_predicate = before[0] or active
        self._rounds = before[1] or (active and fuses)
        try:
            yield
        finally:
            self._in_predicate, self._rounds = before

    def index(self, expr: sympy.Expr) -> str:
        """An index as an int. An index beyond int32 is clamped and stays outside the tensor."""
        if not is_int(expr):
            with self._predicate():
                return f"int({self._float(expr)[0]})"
        text = self._int(expr)[0]
        return self._call("nearest_int", text)[0] if self._is_wide(expr) else text

    def _float(self, expr: sympy.Expr) -> Text:
        if expr.is_number:
            return literal(expr)
        if isinstance(expr, Element) and not is_int(expr):
            return self.element(expr)
        if is_int(expr) and fits(expr) and (self._in_predicate or not _has_product(expr)):
            return self._call("float", self._int(expr)[0])
        if isinstance(expr, AsFloat):
            return self._float(expr.args[0])
        if isinstance(expr, sympy.Symbol):
            return self._name(expr)
        if isinstance(expr, FloatSum):
            return self._float_sum(expr, terms_in_order(expr))
        if isinstance(expr, sympy.Add):
            return self._float_sum(expr, written_order(expr))
        if isinstance(expr, FloatProduct):
            return self._product([self._float(factor) for factor in factors_in_order(expr)])
        if isinstance(expr, FloatQuotient):
            return self._quotient(*expr.args)
        if isinstance(expr, sympy.Mul):
            return self._float_product(expr)
        if isinstance(expr, sympy.Pow | FloatPower):
            return self._float_power(expr)
        if isinstance(expr, sympy.Piecewise | Select):
            return self._float_choice(expr)
        if is_int(expr) and isinstance(expr, FloorDiv | FloorMod | BitFunction):
            return self._call("float", self._int(expr)[0])
        return self._float_function(expr)

    def _float_choice(self, expr: sympy.Expr) -> Text:
        """A choice among values that are all computed, which needs no branch.

        A tensor is read where the choice takes its element alone: its index may be wrong elsewhere.
        """
        branches, last = branches_of(expr)
        later = [last, branches[0][0], *(part for branch in branches[1:] for part in branch)]
        atoms = all((part.args[0] if isinstance(part, AsFloat) else part).is_Atom for part in later)
        if atoms or any(contains(part, TensorRead) for part in later):
            return self._choice(expr, self._float)
        text = self._float(last)
        for value, condition in reversed(branches):
            test = self._condition(condition)[0]
            text = self._call("selected", test, self._float(value)[0], text[0])
        return text

    def _float_sum(self, expr: sympy.Expr, terms: list[sympy.Expr]) -> Text:
        scores = (term for term in terms if term == SCORE or PRODUCT in term.args)
        beside_score = self.score_is_product and any(scores)
        return self._terms(terms, self._terms_beside_score() if beside_score else self._term)

    def _term(self, expr: sympy.Expr, first: bool) -> Text:
        return self._float(expr)

    def _terms_beside_score(self) -> Callable[[sympy.Expr, bool], Text]:
        """The printer of the terms of a sum with the score, which is itself a product.

        One product can be fused with the sum. It should be the score: other products are often the
        same for several scores. The first of the others is therefore rounded.
        """
        rounded: list[sympy.Expr] = []

        def term(expr: sympy.Expr, first: bool) -> Text:
            products = sympy.Mul | FloatProduct | FloatQuotient
            is_product = isinstance(expr, products) and sum(not a.is_number for a in expr.args) > 1
            if not is_product or rounded or expr.has(SCORE, PRODUCT):
                return self._float(expr)
            rounded.append(expr)
            with self._predicate():
                return self._float(expr)

        return term

    def _float_product(self, expr: sympy.Expr) -> Text:
        numerator, denominator = [], []
        constant = Fraction(1)
        for factor in expr.as_ordered_factors():
            if factor.is_Rational:
                constant *= Fraction(int(factor.p), int(factor.q))
            elif (
                factor.is_Pow and factor.exp.is_Rational and factor.exp < 0 and factor.exp != -_HALF
            ) and not (self._approximates and is_fraction_power(factor)):
                denominator.append(factor.base**-factor.exp)
            else:
                numerator.append(factor)
        if constant == -1 and numerator:
            inner = self._ratio(numerator, denominator)
            return "-" + inside(inner, UNARY), UNARY
        if constant != 1 or not numerator:
            numerator.insert(0, sympy.Rational(constant.numerator, constant.denominator))
        return self._ratio(numerator, denominator)

    def _quotient(self, above: sympy.Expr, below: sympy.Expr) -> Text:
        factor = 1 / below if below.is_Rational else None
        exact = factor is not None and _is_power_of_two(factor)
        if factor is not None and (exact or not self._in_predicate) and factor >= FLOAT32_LEAST:
            return self._product([literal(factor), self._float(above)])
        if self._approximates and not is_of_integers(below, self._integer_lets):
            return self._call("fast_quotient", self._float(above)[0], self._float(below)[0])
        return self._ratio([above], [below])

    @property
    def _approximates(self) -> bool:
        """Whether functions may be approximate: their errors are below the operands' rounding."""
        return self.fast and not self._in_predicate

    def _ratio(self, numerator: list[sympy.Expr], denominator: list[sympy.Expr]) -> Text:
        parts = [self._float(factor) for factor in numerator]
        if not denominator:
            return self._product(parts)
        below = self._float(sympy.Mul(*denominator))
        if self._approximates:
            reciprocal = self._call("rcp", below[0])
            if len(numerator) == 1 and numerator[0] == 1:
                return reciprocal
            return self._product([*parts, reciprocal])
        above = inside(self._product(parts), TIMES)
        return f"{above} / {inside(below, TIMES + 1)}", TIMES

    def _product(self, parts: list[Text]) -> Text:
        if len(parts) == 1:
            return parts[0]
        if self._rounds or self.rounds_products:
            return self._nested("__fmul_rn", [text for text, _ in parts])
        text = inside(parts[0], TIMES)
        return " * ".join([text, *(inside(part, TIMES + 1) for part in parts[1:])]), TIMES

    def _float_power(self, power: sympy.Expr) -> Text:
        base, exponent = power.args
        if exponent == _HALF:
            return self._root(base)
        if exponent == -_HALF and not self._in_predicate:
            return self._call("rsqrtf", self._float(base)[0])
        if self._approximates and is_fraction_power(power):
            return self._call("fast_power", self._float(base)[0], literal(exponent)[0])
        if exponent.is_Rational and exponent < 0:
            below = FloatPower(base, -exponent)
            return self._quotient(sympy.S.One, below)
        if exponent.is_Integer and exponent <= LARGEST_REPEATED:
            rounded = self._rounds or self.rounds_products
            repeated = self._rounded_power if rounded else self._repeated
            return repeated(self._float(base), int(exponent))
        if exponent.is_Rational and exponent.q == 2 and is_int(base):
            whole = self._float(FloatPower(base, exponent - _HALF))
            return self._product([whole, self._root(base)])
        if base == 2:
            return self._power_of_two(exponent)
        if base.is_Rational and base.is_positive:
            binary = sympy.Rational(str(sympy.log(base, 2).evalf(17)))
            return self._power_of_two(FloatProduct(exponent, binary))
        return self._call("powf", self._float(base)[0], self._float(exponent)[0])

    def _power_of_two(self, exponent: sympy.Expr) -> Text:
        """A power of two: fast where each score has its own, else `exp2f`, as scores share it."""
        fast = self._approximates and not exponent.free_symbols.isdisjoint((SCORE, Q, K))
        return self._call("fast_exp2" if fast else "exp2f", self._float(exponent)[0])

    def _rounded_power(self, base: Text, exponent: int) -> Text:
        if exponent == 1:
            return base
        return f"rounded_power<{exponent}>({base[0]})", ATOM

    def _root(self, base: sympy.Expr) -> Text:
        if self._approximates:
            return self._call("fast_sqrt", self._float(base)[0])
        return self._call("sqrtf", self._float(base)[0])

    def _float_function(self, expr: sympy.Expr) -> Text:
        with self._predicate(isinstance(expr, JUMPS)):
            texts = [self._float(arg) for arg in expr.args]
        args = [text for text, _ in texts]
        if isinstance(expr, Minimum | sympy.Min):
            return self._nested("minimum", args)
        if isinstance(expr, Maximum | sympy.Max):
            return self._nested("maximum", args)
        if isinstance(expr, FloorDiv):
            return self._call("float_div", *args)
        if isinstance(expr, FloorMod):
            return self._call("float_mod", *args)
        for kind, exact, fast in FUNCTIONS:
            if isinstance(expr, kind):
                return self._call(fast if self._approximates else exact, *args)
        raise unknown(expr)


def _has_product(expr: sympy.Expr) -> bool:
    """True if the expression multiplies integers, which is computed in float."""
    for part in sympy.preorder_traversal(expr):
        if isinstance(part, sympy.Pow):
            return True
        if isinstance(part, sympy.Mul) and sum(not arg.is_number for arg in part.args) > 1:
            return True
        if isinstance(part, FloorDiv | FloorMod | TensorRead):
            return False
    return False


def _is_power_of_two(x: sympy.Rational) -> bool:
    return x > 0 and all(int(part).bit_count() == 1 for part in (x.p, x.q))
