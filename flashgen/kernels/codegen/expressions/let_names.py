"""Readable names for the shared subexpressions of emitted functions."""

from __future__ import annotations

import re
from collections.abc import Mapping

import sympy
from sympy.core.relational import Relational

from flashgen.kernels.codegen.expressions.cpp_text import CALLED, KEYWORDS, MACRO
from flashgen.spec.analysis.sharing import CodeBlock
from flashgen.spec.language.comparisons import FLOAT_RELATIONS
from flashgen.spec.language.float_operations import AsFloat, FloatProduct, FloatQuotient, FloatSum
from flashgen.spec.language.python_printer import (
    factors_in_order,
    is_subtracted,
    terms_in_order,
    written_order,
)
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod, Maximum, Minimum, Select
from flashgen.spec.language.tensor_elements import Element, Extreme, Least

LONGEST_NAME = 32
_LET = re.compile(r"t[0-9]+")
# Names begin with a letter. Long numbers, such as the largest position, describe nothing.
_IDENTIFIER = re.compile(r"[A-Za-z](?:(?![0-9]{6})\w)*")

# Besides the functions that expressions call, a function of a spec has these names of its own: its
# parameters, the places in windows, and the functions that read tensors.
_TAKEN = KEYWORDS.union("ijklmnrs", ("p", "inside", "place"))
_TAKEN_PREFIX = re.compile(
    rf"{MACRO.pattern}|(?:read|sum_of)_|(?:least|greatest)_\w*_[0-9]+\Z|by[0-9]+_first_"
    r"|(?:score|mask|partials|tile)_(?:head|query|key)\Z"
)

_RELATIONS = {
    sympy.StrictLessThan: "below",
    sympy.LessThan: "at_most",
    sympy.StrictGreaterThan: "above",
    sympy.GreaterThan: "at_least",
    sympy.Equality: "is",
    sympy.Unequality: "is_not",
}
_RELATIONS |= {FLOAT_RELATIONS[kind]: word for kind, word in _RELATIONS.items()}


def let_names(block: CodeBlock, outer: Mapping[sympy.Symbol, str]) -> dict[sympy.Symbol, str]:
    """A C++ name for each shared subexpression, derived from its expression.

    A subexpression without a short description is named t0, t1, ...

    Args:
        outer: the names of other symbols, also of an enclosing block.
    """
    names: dict[sympy.Symbol, str] = {}
    described = {s: name for s, name in outer.items() if _LET.fullmatch(s.name)}
    used = {*CALLED, *_TAKEN, *outer.values()}
    indexed = _indices(block)
    unnamed = 0
    for symbol, value in block.lets:
        name = _name(value, described) or indexed.get(symbol)
        if name is None or not _may_be_used(name, used):
            while f"t{unnamed}" in used:
                unnamed += 1
            name = f"t{unnamed}"
        names[symbol] = described[symbol] = name
        used.add(name)
    return names


def _may_be_used(name: str, used: set[str]) -> bool:
    free = name not in used and _TAKEN_PREFIX.match(name) is None
    return free and len(name) <= LONGEST_NAME and _IDENTIFIER.fullmatch(name) is not None


def _indices(block: CodeBlock) -> dict[sympy.Symbol, str]:
    """Names of the subexpressions that are indices of tensors."""
    exprs = (*(value for _, value in block.lets), *block.results)
    elements = {element for expr in exprs for element in expr.atoms(Element)}
    return {
        index: f"{element.tensor.name}_index"
        for element in sorted(elements, key=sympy.default_sort_key)
        for index in element.indices
        if isinstance(index, sympy.Symbol)
    }


def _name(expr: sympy.Basic, names: dict[sympy.Symbol, str]) -> str | None:
    """The description of an expression as an identifier, None where there is no short one."""

    def name_of(part: sympy.Basic) -> str | None:
        return _name(part, names)

    def join(*parts: str | None) -> str | None:
        return None if any(part is None for part in parts) else "_".join(map(str, parts))

    if isinstance(expr, sympy.Symbol):
        name = names.get(expr, expr.name)
        return None if _LET.fullmatch(name) else name
    if expr.is_Integer:
        return str(expr) if expr >= 0 else None
    if isinstance(expr, FloorDiv):
        return join(name_of(expr.args[0]), "div", name_of(expr.args[1]))
    if isinstance(expr, FloorMod):
        return join(name_of(expr.args[0]), "mod", name_of(expr.args[1]))
    if isinstance(expr, Element):
        parts = [name_of(index) for index in expr.indices]
        return join(expr.tensor.name, *([p for p in parts if p not in ("b", "h")] or parts))
    if isinstance(expr, Extreme):
        ends = _common_name(*map(name_of, expr.ends))
        return join("least" if isinstance(expr, Least) else "greatest", expr.tensor.name, ends)
    if isinstance(expr, AsFloat):
        return name_of(expr.args[0])
    if isinstance(expr, FloatQuotient):
        return join(name_of(expr.args[0]), "over", name_of(expr.args[1]))
    if isinstance(expr, FloatProduct):
        factors = [name_of(factor) for factor in factors_in_order(expr)]
        return join(factors[0], "times", factors[1]) if len(factors) == 2 else None
    if isinstance(expr, sympy.Add) and len(expr.args) <= 3:
        return _sum(written_order(expr), names)
    if isinstance(expr, FloatSum) and len(terms_in_order(expr)) <= 3:
        return _sum(terms_in_order(expr), names)
    if isinstance(expr, sympy.Mul) and len(expr.as_ordered_factors()) == 2:
        factor, rest = expr.as_coeff_Mul()
        if factor.is_Rational and factor.p == 1 and factor.q > 1:
            return join(name_of(rest), "over", str(factor.q))
        first, second = expr.as_ordered_factors()
        return join(name_of(first), "times", name_of(second))
    if isinstance(expr, Minimum | Maximum):
        return _extremum(expr, names)
    if isinstance(expr, Select):
        return _choice(name_of(expr.args[1]), name_of(expr.args[2]))
    if isinstance(expr, Relational):
        left, right = name_of(expr.lhs), name_of(expr.rhs)
        if isinstance(expr, sympy.Eq):
            same = _common_name(left, right)
            if same is not None:
                return f"same_{same}"
        return join(left, _RELATIONS[type(expr)], right)
    if isinstance(expr, sympy.Not):
        return join("not", name_of(expr.args[0]))
    if len(expr.args) == 1 and isinstance(expr, sympy.Function):
        symbols = [symbol.name for symbol in expr.free_symbols - names.keys()]
        inner = name_of(expr.args[0]) or (f"of_{symbols[0]}" if len(symbols) == 1 else None)
        return join(expr.func.__name__.lower(), inner)
    return None


def _sum(terms: list[sympy.Expr], names: dict[sympy.Symbol, str]) -> str | None:
    text = ""
    for index, term in enumerate(terms):
        negative = is_subtracted(term)
        name = _name(-term if negative else term, names)
        if name is None or (negative and index == 0):
            return None
        text += name if index == 0 else f"_{'minus' if negative else 'plus'}_{name}"
    return text


def _extremum(expr: sympy.Expr, names: dict[sympy.Symbol, str]) -> str | None:
    """``clamped_x`` for a named value between two bounds, else ``min_a_b`` or ``max_a_b``."""
    inner = [arg for arg in expr.args if isinstance(arg, Minimum | Maximum)]
    if len(expr.args) != 2:
        return None
    if not inner:
        parts = [_name(arg, names) for arg in expr.args]
        kind = "min" if isinstance(expr, Minimum) else "max"
        return None if None in parts else f"{kind}_{parts[0]}_{parts[1]}"
    if len(inner) != 1:
        return None
    for sign, start in ((1, "clamped"), (-1, "minus_clamped")):
        clamped = [part for part in inner[0].args if sign * part in names]
        name = _name(sign * clamped[0], names) if len(clamped) == 1 else None
        if name is not None:
            return f"{start}_{name}"
    return None


def _choice(value: str | None, other: str | None) -> str | None:
    """``least_x`` or ``greatest_x`` for the end of a range of x, else both alternatives."""
    for end, start in (("_lo_", "least"), ("_hi_", "greatest")):
        if value is not None and end in value:
            return f"{start}_{value.replace(end, '_', 1)}"
    return None if value is None or other is None else f"{value}_or_{other}"


def _common_name(low: str | None, high: str | None) -> str | None:
    """The common name of two ends of a range: q_div_width of q_lo_div_width and q_hi_div_width."""
    if low is None or high is None:
        return None
    name = low.replace("_lo", "", 1)
    return name if name != low and name == high.replace("_hi", "", 1) else None
