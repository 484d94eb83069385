"""sympy expressions as CUDA C++ that a person can read.

Integers stay integers: int32 where the admitted ranges allow it, long long where they do not. Where
a float is wanted, sums of integers are formed exactly and converted, products are formed in float.

What decides (decisions.py) is rounded operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction

import sympy
from sympy.core.relational import Relational

from ..analysis import Block
from ..expr import (
    Element,
    Extreme,
    FloorDiv,
    FloorMod,
    Least,
    Maximum,
    Minimum,
    TensorSymbol,
    is_condition,
    is_int,
)
from ..expr.element import Reading
from ..expr.functions import Choice
from ..expr.gather import gather
from ..expr.limits import Limits, fits, limits
from ..expr.shown import written_order
from .decisions import JUMPS, deciding_lets
from .text import (
    AND,
    ATOM,
    CHOICE,
    EQUAL,
    FUNCTIONS,
    HELPERS,
    LESS,
    MASK,
    OR,
    PLUS,
    SHIFT,
    SIGNS,
    TIMES,
    UNARY,
    Text,
    inside,
    literal,
    unknown,
)

INT32_MAX = 2**31 - 1
_HALF = sympy.Rational(1, 2)


class CPrinter:
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

    def __init__(
        self, names: Mapping[sympy.Symbol, str] | None = None, dtype: str = "float32"
    ) -> None:
        self.names = dict(names or {})
        self.fast = dtype != "float32"
        self.helpers: set[str] = set()
        self.tensors: set[TensorSymbol] = set()
        self.extremes: set[tuple[TensorSymbol, int, bool]] = set()
        self._known: dict[sympy.Symbol, Limits] = {}
        self._wide: set[sympy.Symbol] = set()
        self._decides = False

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

    @contextmanager
    def _deciding(self, here: bool = True) -> Iterator[None]:
        """Products of floats printed inside are not merged with sums, if ``here`` or around."""
        before, self._decides = self._decides, self._decides or here
        try:
            yield
        finally:
            self._decides = before

    def _any(self, expr: sympy.Basic) -> Text:
        if is_condition(expr):
            return self._condition(expr)
        return self._int(expr) if is_int(expr) else self._float(expr)

    def _name(self, symbol: sympy.Symbol) -> Text:
        return self.names.get(symbol, symbol.name), ATOM

    def _call(self, name: str, *args: str, helper: bool = True) -> Text:
        if helper:
            self.helpers.add(name)
        return f"{name}({', '.join(args)})", ATOM

    def element(self, expr: Element) -> Text:
        """One element of a captured tensor: of type int, long long or float, as the tensor is."""
        self.tensors.add(expr.tensor)
        indices = [self.index(index) for index in expr.indices]
        return f"read_{expr.tensor.name}({', '.join(['p', *indices])})", ATOM

    def extreme(self, expr: Extreme) -> Text:
        """The least or greatest of a range of elements: of type int or long long."""
        least = isinstance(expr, Least)
        self.extremes.add((expr.tensor, expr.axis, least))
        indices = [self.index(index) for index in (*expr.ends, *expr.others)]
        name = f"{'least' if least else 'greatest'}_{expr.tensor.name}_{expr.axis}"
        return f"{name}({', '.join(['p', *indices])})", ATOM

    def index(self, expr: sympy.Expr) -> str:
        """An index as an int: one beyond int32 is as far outside the tensor as int32 can say."""
        if not is_int(expr):
            with self._deciding():
                return f"int({self._float(expr)[0]})"
        text = self._int(expr)[0]
        return self._call("nearest_int", text)[0] if self._is_wide(expr) else text

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

    # Integers.

    def _is_wide(self, expr: sympy.Expr) -> bool:
        """True when the printed text has type long long."""
        if isinstance(expr, sympy.Symbol):
            return expr in self._wide
        if isinstance(expr, Reading):
            return bool(expr.tensor.dtype == "int64")
        if self._overflows(expr):
            return True
        if isinstance(expr, sympy.Piecewise):
            return any(self._is_wide(value) for value, _ in expr.args)
        if isinstance(expr, Choice):
            return any(self._is_wide(value) for value in expr.args[1:])
        return any(self._is_wide(arg) for arg in expr.args)

    def _overflows(self, expr: sympy.Expr) -> bool:
        """True when the expression or a partial sum or product of it may leave int32."""
        if isinstance(expr, sympy.Add):
            return sum(self._size(arg) for arg in expr.args) > INT32_MAX
        if isinstance(expr, sympy.Mul):
            size = 1
            for arg in expr.args:
                size *= max(1, self._size(arg))
            return size > INT32_MAX
        return self._size(expr) > INT32_MAX

    def _size(self, expr: sympy.Expr) -> int:
        lo, hi = limits(expr, self._known)
        return max(abs(lo), abs(hi))

    def _int(self, expr: sympy.Expr, wide: bool = False) -> Text:
        """Integer text; of type long long when ``wide``."""
        text = self._narrow(expr)
        if not wide or self._is_wide(expr):
            return text
        if expr.is_Integer:
            return f"{text[0]}LL", text[1]
        return f"(long long){inside(text, UNARY)}", UNARY

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
        if isinstance(expr, sympy.Piecewise | Choice):
            return self._choice(expr, lambda e: self._int(e, wide))
        if isinstance(expr, FloorDiv | FloorMod):
            return self._division(expr, wide)
        args = [self._int(arg, wide)[0] for arg in expr.args]
        if isinstance(expr, sympy.Abs):
            return self._call("llabs" if wide else "abs", *args, helper=False)
        if isinstance(expr, sympy.sign):
            return self._call("sign", *args)
        if isinstance(expr, Minimum | sympy.Min | Maximum | sympy.Max):
            name = "min" if isinstance(expr, Minimum | sympy.Min) else "max"
            return self._nested(name, args)
        raise unknown(expr)

    def _nested(self, name: str, args: list[str]) -> Text:
        text = args[0]
        for arg in args[1:]:
            text = self._call(name, text, arg, helper=False)[0]
        return text, ATOM

    def _sum(self, expr: sympy.Expr, print_term: Callable[[sympy.Expr, bool], Text]) -> Text:
        terms = [(arg.could_extract_minus_sign(), arg) for arg in written_order(expr)]
        text = inside(print_term(terms[0][1], True), PLUS)
        for negative, term in terms[1:]:
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
        self.helpers.add("power")
        return f"power<{exponent}>({base[0]})", ATOM

    def _rounded_power(self, base: Text, exponent: int) -> Text:
        if exponent < 2:
            return ("1", ATOM) if exponent == 0 else base
        self.helpers.add("rounded_power")
        return f"rounded_power<{exponent}>({base[0]})", ATOM

    def _division(self, expr: sympy.Expr, wide: bool) -> Text:
        a, b = expr.args
        quotient = isinstance(expr, FloorDiv)
        power_of_two = b.is_Integer and b > 0 and int(b) & (int(b) - 1) == 0
        text = self._int(a, wide)
        if power_of_two and quotient:
            # An arithmetic shift rounds down, for negative numbers too.
            return f"{inside(text, UNARY)} >> {int(b).bit_length() - 1}", SHIFT
        if power_of_two:
            return f"{inside(text, UNARY)} & {int(b) - 1}", MASK
        if limits(a, self._known)[0] >= 0 and limits(b, self._known)[0] > 0:
            sign = "/" if quotient else "%"
            return (
                f"{inside(text, TIMES)} {sign} {inside(self._int(b, wide), TIMES + 1)}",
                TIMES,
            )
        return self._call("floor_div" if quotient else "floor_mod", text[0], self._int(b, wide)[0])

    def _choice(self, expr: sympy.Expr, print_value: Callable[[sympy.Expr], Text]) -> Text:
        if isinstance(expr, Choice):
            branches, last = [(expr.args[1], expr.args[0])], expr.args[2]
        else:
            *branches, (last, _) = expr.args
        text = inside(print_value(last), CHOICE)
        for value, condition in reversed(branches):
            test = inside(self._condition(condition), OR)
            text = f"{test} ? {inside(print_value(value), CHOICE + 1)} : {text}"
        return text, CHOICE

    # Floats.

    def _float(self, expr: sympy.Expr) -> Text:
        if expr.is_number:
            return literal(expr)
        if isinstance(expr, Element) and not is_int(expr):
            return self.element(expr)
        if is_int(expr) and not _has_product(expr) and fits(expr):
            return self._call("float", self._int(expr)[0], helper=False)
        if isinstance(expr, sympy.Symbol):
            return self._name(expr)
        if isinstance(expr, sympy.Add):
            return self._float_sum(expr)
        if isinstance(expr, sympy.Mul):
            return self._float_product(expr)
        if isinstance(expr, sympy.Pow):
            return self._float_power(expr.base, expr.exp)
        if isinstance(expr, sympy.Piecewise | Choice):
            return self._choice(expr, self._float)
        if is_int(expr) and isinstance(expr, FloorDiv | FloorMod):
            return self._call("float", self._int(expr)[0], helper=False)
        return self._float_function(expr)

    def _float_sum(self, expr: sympy.Expr) -> Text:
        gathered = gather(expr, lambda e: not _has_product(e), INT32_MAX)
        if gathered is None:
            return self._sum(expr, lambda e, first: self._float(e))
        whole = sympy.Dummy("whole", real=True)
        self.names[whole] = self._call("float", self._int(gathered.total)[0], helper=False)[0]
        text = self._float(sympy.Add(*gathered.others, gathered.common * whole))
        del self.names[whole]
        return text

    def _float_product(self, expr: sympy.Expr) -> Text:
        numerator, denominator = [], []
        constant = Fraction(1)
        for factor in expr.as_ordered_factors():
            if factor.is_Rational:
                constant *= Fraction(int(factor.p), int(factor.q))
            elif (
                factor.is_Pow and factor.exp.is_Rational and factor.exp < 0 and factor.exp != -_HALF
            ):
                denominator.append(factor.base**-factor.exp)
            else:
                numerator.append(factor)
        if constant == -1 and numerator:
            inner = self._ratio(numerator, denominator)
            return "-" + inside(inner, UNARY), UNARY
        if constant != 1 or not numerator:
            numerator.insert(0, sympy.Rational(constant.numerator, constant.denominator))
        return self._ratio(numerator, denominator)

    def _ratio(self, numerator: list[sympy.Expr], denominator: list[sympy.Expr]) -> Text:
        parts = [self._float(factor) for factor in numerator]
        if not denominator:
            return self._product(parts)
        below = self._float(sympy.Mul(*denominator))
        if self.fast:
            reciprocal = self._call("rcp", below[0])
            if len(numerator) == 1 and numerator[0] == 1:
                return reciprocal
            return self._product([*parts, reciprocal])
        above = inside(self._product(parts), TIMES)
        return f"{above} / {inside(below, TIMES + 1)}", TIMES

    def _product(self, parts: list[Text]) -> Text:
        if self._decides:
            return self._nested("__fmul_rn", [text for text, _ in parts])
        if len(parts) == 1:
            return parts[0]
        text = inside(parts[0], TIMES)
        return " * ".join([text, *(inside(part, TIMES + 1) for part in parts[1:])]), TIMES

    def _float_power(self, base: sympy.Expr, exponent: sympy.Expr) -> Text:
        if exponent == _HALF:
            return self._root(base)
        if exponent == -_HALF:
            return self._call("rsqrtf", self._float(base)[0], helper=False)
        if exponent.is_Rational and exponent < 0:
            return self._ratio([sympy.S.One], [base**-exponent])
        if exponent.is_Integer:
            repeated = self._rounded_power if self._decides else self._repeated
            return repeated(self._float(base), int(exponent))
        if exponent.is_Rational and exponent.q == 2:
            whole = self._float_power(base, exponent - _HALF)
            return self._product([whole, self._root(base)])
        if base == 2:
            return self._call("exp2f", self._float(exponent)[0], helper=False)
        if base.is_number and base.is_positive:
            scaled = self._float(exponent * sympy.Rational(str(sympy.log(base, 2).evalf(17))))
            return self._call("exp2f", scaled[0], helper=False)
        return self._call("powf", self._float(base)[0], self._float(exponent)[0], helper=False)

    def _root(self, base: sympy.Expr) -> Text:
        if self.fast:
            return self._call("fast_sqrt", self._float(base)[0])
        return self._call("sqrtf", self._float(base)[0], helper=False)

    def _float_function(self, expr: sympy.Expr) -> Text:
        with self._deciding(isinstance(expr, JUMPS)):
            return self._function_of_floats(expr)

    def _function_of_floats(self, expr: sympy.Expr) -> Text:
        args = [self._float(arg)[0] for arg in expr.args]
        if isinstance(expr, Minimum | sympy.Min):
            return self._nested("fminf", args)
        if isinstance(expr, Maximum | sympy.Max):
            return self._nested("fmaxf", args)
        if isinstance(expr, FloorDiv):
            # A true division: the product with a reciprocal can fall short of a whole number.
            above, below = (self._float(arg) for arg in expr.args)
            ratio = f"{inside(above, TIMES)} / {inside(below, TIMES + 1)}"
            return self._call("floorf", ratio, helper=False)
        if isinstance(expr, FloorMod):
            return self._call("float_mod", *args)
        for kind, exact, fast in FUNCTIONS:
            if isinstance(expr, kind):
                name = fast if self.fast else exact
                return self._call(name, *args, helper=name in HELPERS)
        raise unknown(expr)


def _has_product(expr: sympy.Expr) -> bool:
    """True when integers are multiplied by each other: such a product is formed in float."""
    for part in sympy.preorder_traversal(expr):
        if isinstance(part, sympy.Pow):
            return True
        if isinstance(part, sympy.Mul) and sum(not arg.is_number for arg in part.args) > 1:
            return True
        if isinstance(part, FloorDiv | FloorMod | Reading):
            return False
    return False
