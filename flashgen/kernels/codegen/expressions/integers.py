"""Integer expressions as C++: int where the ranges of values allow it, int64 elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import sympy

from flashgen.kernels.codegen.expressions.cpp_text import (
    ATOM,
    CHOICE,
    MASK,
    OR,
    PLUS,
    SHIFT,
    TIMES,
    UNARY,
    Text,
    inside,
    unknown,
)
from flashgen.kernels.codegen.integer_ranges import AssumedBlock, sizes_of_parts
from flashgen.shared.dtypes import INT32_MAX, OPERANDS
from flashgen.shared.fast_division import inverse_of
from flashgen.spec.language.bit_functions import (
    BitAnd,
    BitFunction,
    BitOr,
    Filled,
    Popcount,
    RandomBits,
    ShiftLeft,
    ShiftRight,
)
from flashgen.spec.language.divisors import is_data, is_power_of_two, may_be_zero
from flashgen.spec.language.integer_limits import Limits, limits
from flashgen.spec.language.python_printer import is_subtracted, written_order
from flashgen.spec.language.sympy_functions import (
    FloorDiv,
    FloorMod,
    Maximum,
    Minimum,
    Select,
    branches_of,
)
from flashgen.spec.language.tensor_elements import Element, Extreme, Least, TensorRead, TensorSymbol


class _Smallest(dict[sympy.Symbol, Limits]):
    """Limits of symbols in a call with the smallest numbers; only other limits are stored."""

    def __contains__(self, symbol: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return True

    def __missing__(self, symbol: sympy.Symbol) -> Limits:
        return (1, 1) if symbol.is_positive else (0, 0)


class IntegerPrinter(ABC):
    """The part of `CPrinter` that prints integers, and the state that all parts share."""

    def __init__(
        self,
        names: Mapping[sympy.Symbol, str] | None = None,
        dtype: str = "float32",
        *,
        wide: bool = True,
    ) -> None:
        self.names = dict(names or {})
        self.wide = wide
        self.multipliers: dict[sympy.Symbol, str] = {}
        self.inverses: dict[sympy.Symbol, str] = {}
        self.assumptions: list[AssumedBlock] = [AssumedBlock()]
        self.fast = OPERANDS[dtype].approximates
        self.tensors: set[TensorSymbol] = set()
        self.extremes: set[tuple[TensorSymbol, int, bool]] = set()
        self._bounds: dict[sympy.Symbol, Limits] = {}
        self._smallest = _Smallest()
        self._limits: dict[sympy.Expr, Limits] = {}
        self._smallest_limits: dict[sympy.Expr, Limits] = {}
        self._widths: dict[sympy.Expr, bool] = {}
        self._lets: dict[sympy.Symbol, str] = {}
        self._nested_lets: dict[sympy.Symbol, str] = {}
        self._wide: set[sympy.Symbol] = set()
        self._data: set[sympy.Symbol] = set()
        self._predicates: set[sympy.Symbol] = set()
        self._integer_lets: set[sympy.Symbol] = set()
        self._in_predicate = False
        self._rounds = False
        self.evaluates_all = False
        self.score_is_product = False
        self.rounds_products = False

    @abstractmethod
    def index(self, expr: sympy.Expr) -> str:
        """An index as an int."""

    @abstractmethod
    def _condition(self, expr: sympy.Basic) -> Text: ...

    def _name(self, symbol: sympy.Symbol) -> Text:
        return self.names.get(symbol, symbol.name), ATOM

    def _call(self, name: str, *args: str) -> Text:
        return f"{name}({', '.join(args)})", ATOM

    def element(self, expr: Element) -> Text:
        """One element of a captured tensor, of type int, int64 or float like the tensor."""
        self.tensors.add(expr.tensor)
        indices = [self.index(index) for index in expr.indices]
        return f"read_{expr.tensor.name}({', '.join(['p', *indices])})", ATOM

    def extreme(self, expr: Extreme) -> Text:
        """The minimum or maximum of a range of elements, of type int or int64."""
        least = isinstance(expr, Least)
        self.extremes.add((expr.tensor, expr.axis, least))
        indices = [self.index(index) for index in (*expr.ends, *expr.others)]
        name = f"{'least' if least else 'greatest'}_{expr.tensor.name}_{expr.axis}"
        return f"{name}({', '.join(['p', *indices])})", ATOM

    def _is_wide(self, expr: sympy.Expr) -> bool:
        """True if the printed text has type int64."""
        if expr not in self._widths:
            self._widths[expr] = self._find_width(expr)
        return self._widths[expr]

    def _find_width(self, expr: sympy.Expr) -> bool:
        if isinstance(expr, sympy.Symbol):
            return expr in self._wide
        if isinstance(expr, TensorRead):
            return bool(expr.tensor.dtype == "int64")
        if isinstance(expr, Filled | Popcount | RandomBits):
            return False
        if self._overflows(expr):
            return True
        if isinstance(expr, ShiftRight) and limits(expr.args[1])[1] > 31:
            return True  # farther than int32 can be shifted
        if isinstance(expr, sympy.Piecewise):
            return any(self._is_wide(value) for value, _ in expr.args)
        if isinstance(expr, Select):
            return any(self._is_wide(value) for value in expr.args[1:])
        return any(self._is_wide(arg) for arg in expr.args)

    def _overflows(self, expr: sympy.Expr) -> bool:
        """True if the expression, or a partial sum or product of it, may overflow int32.

        Unless integers are to be wide, it may overflow only where even the smallest numbers of a
        call do, as elements of tensors.
        """
        if sizes_of_parts(expr, self._bounds, self._limits) <= INT32_MAX:
            return False
        if sizes_of_parts(expr, self._smallest, self._smallest_limits) > INT32_MAX:
            return True
        self.assumptions[-1].assumed[expr] = None
        return self.wide

    def _least(self, expr: sympy.Expr) -> int:
        return limits(expr, self._bounds, self._limits)[0]

    def _int(self, expr: sympy.Expr, wide: bool = False) -> Text:
        """Integer text; of type int64 if ``wide``."""
        text = self._narrow(expr)
        if not wide or self._is_wide(expr):
            return text
        if expr.is_Integer:
            return f"{text[0]}LL", text[1]
        return self._call("int64", text[0])

    def _narrow(self, expr: sympy.Expr) -> Text:
        if isinstance(expr, sympy.Symbol):
            return self._name(expr)
        if expr.is_Integer:
            suffix = "LL" if abs(int(expr)) > INT32_MAX else ""
            return f"{int(expr)}{suffix}", ATOM if expr >= 0 else UNARY
        if isinstance(expr, Element):
            return self.element(expr)
        if isinstance(expr, Extreme):
            return self.extreme(expr)
        wide = self._is_wide(expr)
        if isinstance(expr, sympy.Add):
            return self._sum(expr, lambda e, first: self._int(e, wide and first))
        if isinstance(expr, sympy.Mul):
            return self._int_product(expr, wide)
        if isinstance(expr, sympy.Pow):
            return self._int_power(expr, wide)
        if isinstance(expr, sympy.Piecewise | Select):
            return self._choice(expr, lambda e: self._int(e, wide))
        if isinstance(expr, FloorDiv | FloorMod):
            return self._division(expr, wide)
        if isinstance(expr, BitFunction):
            return self._bits(expr, wide)
        args = [self._int(arg, wide)[0] for arg in expr.args]
        if isinstance(expr, sympy.Abs):
            return self._call("llabs" if wide else "abs", *args)
        if isinstance(expr, sympy.sign):
            return self._call("sign", *args)
        if isinstance(expr, Minimum | sympy.Min | Maximum | sympy.Max):
            name = "min" if isinstance(expr, Minimum | sympy.Min) else "max"
            return self._nested(name, args)
        raise unknown(expr)

    def _bits(self, expr: sympy.Expr, wide: bool) -> Text:
        if isinstance(expr, Popcount):
            return self._call("__popc", self._call("unsigned", self._int(expr.args[0])[0])[0])
        if isinstance(expr, Filled):
            return self._call("filled", self._int(expr.args[0])[0])
        if isinstance(expr, RandomBits):
            return self._call("random_bits", *(self._int(arg)[0] for arg in expr.args))
        if isinstance(expr, ShiftLeft):
            arguments = self._int(expr.args[0], wide)[0], self._int(expr.args[1])[0]
            return self._call("shifted_left", *arguments)
        if isinstance(expr, ShiftRight):
            x, n = self._int(expr.args[0], wide), self._int(expr.args[1])
            return f"{inside(x, UNARY)} >> {inside(n, UNARY)}", SHIFT
        sign = "&" if isinstance(expr, BitAnd) else "|" if isinstance(expr, BitOr) else "^"
        a, b = (inside(self._int(arg, wide), UNARY) for arg in expr.args)
        return f"{a} {sign} {b}", OR

    def _nested(self, name: str, args: list[str]) -> Text:
        text = args[0]
        for arg in args[1:]:
            text = self._call(name, text, arg)[0]
        return text, ATOM

    def _sum(self, expr: sympy.Expr, print_term: Callable[[sympy.Expr, bool], Text]) -> Text:
        return self._terms(written_order(expr), print_term)

    def _terms(
        self, terms: list[sympy.Expr], print_term: Callable[[sympy.Expr, bool], Text]
    ) -> Text:
        text = inside(print_term(terms[0], True), PLUS)
        for term in terms[1:]:
            negative = is_subtracted(term)
            part = print_term(-term if negative else term, False)
            text += (" - " if negative else " + ") + inside(part, PLUS + 1)
        return text, PLUS

    def _int_product(self, expr: sympy.Expr, wide: bool) -> Text:
        coefficient, rest = expr.as_coeff_Mul()
        if coefficient == -1:
            return "-" + inside(self._int(rest, wide), UNARY), UNARY
        factors = [*([coefficient] if coefficient != 1 else []), *rest.as_ordered_factors()]
        parts = [self._int(factor, wide and i == 0) for i, factor in enumerate(factors)]
        text = inside(parts[0], TIMES)
        return " * ".join([text, *(inside(part, TIMES + 1) for part in parts[1:])]), TIMES

    def _int_power(self, expr: sympy.Expr, wide: bool) -> Text:
        base, exponent = expr.args
        text = self._int(base, wide)
        return self._repeated(text, int(exponent))

    def _repeated(self, base: Text, exponent: int) -> Text:
        if exponent == 0:
            return "1", ATOM
        if base[1] == ATOM and base[0].isidentifier() and exponent <= 3:
            return " * ".join([base[0]] * exponent), TIMES
        if exponent == 2:
            return self._call("square", base[0])
        return f"power<{exponent}>({base[0]})", ATOM

    def _division(self, expr: sympy.Expr, wide: bool) -> Text:
        a, b = expr.args
        quotient = isinstance(expr, FloorDiv)
        text = self._int(a, wide)
        if is_power_of_two(b) and quotient:
            # An arithmetic shift rounds down, for negative numbers too.
            return f"{inside(text, UNARY)} >> {int(b).bit_length() - 1}", SHIFT
        if is_power_of_two(b):
            return f"{inside(text, UNARY)} & {int(b) - 1}", MASK
        if b in self.multipliers and not wide:
            return self._fast_division(text[0], expr, quotient)
        if (expr.natural or self._least(a) >= 0) and self._least(b) > 0:
            sign = "/" if quotient else "%"
            if expr.natural and b.is_Integer and not wide:  # signed, it would be corrected
                number = self._call("unsigned", text[0])[0]
                return self._call("int", f"{number} {sign} {b}u")
            return (
                f"{inside(text, TIMES)} {sign} {inside(self._int(b, wide), TIMES + 1)}",
                TIMES,
            )
        name = "floor_div" if quotient else "floor_mod"
        by_data = is_data(b) or not b.free_symbols.isdisjoint(self._data)
        if by_data and may_be_zero(b, self._bounds):
            name += "_or_0"
        return self._call(name, text[0], self._int(b, wide)[0])

    def _fast_division(self, text: str, expr: sympy.Expr, quotient: bool) -> Text:
        """A division by a scalar of the call, by the multiplier that the host makes."""
        a, b = expr.args
        positive = self._least(b) > 0
        natural = positive and (expr.natural or self._least(a) >= 0)
        kind = "fast_" if natural else "fast_floor_" if positive else "signed_floor_"
        divisor = [] if positive and quotient else [self._name(b)[0]]
        name = f"{kind}{'div' if quotient else 'mod'}"
        return self._call(name, text, *divisor, self.multipliers[b])

    def _divides(self, a: sympy.Expr, b: sympy.Expr) -> Text | None:
        """Whether a scalar of the call or a constant divides a number; None for other divisors."""
        inverse = self.inverses.get(b)
        if b.is_Integer and not is_power_of_two(b) and abs(b) <= INT32_MAX:
            inverse = f"{inverse_of(int(b))}LL"
        if inverse is None or self._is_wide(a) or self._is_wide(b):
            return None
        return self._call("divides", self._int(b)[0], self._int(a)[0], inverse)

    def _choice(self, expr: sympy.Expr, print_value: Callable[[sympy.Expr], Text]) -> Text:
        branches, last = branches_of(expr)
        text = inside(print_value(last), CHOICE)
        for value, condition in reversed(branches):
            test = inside(self._condition(condition), OR)
            text = f"{test} ? {inside(print_value(value), CHOICE + 1)} : {text}"
        return text, CHOICE
