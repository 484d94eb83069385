"""Integer divisors that can be 0.

A division of integers by 0 has one meaning on every path. A divisor made of positions that can be 0
is an error in the spec. A divisor made of scalars and sizes that is 0 is an error in the call.
Where an element of a captured tensor, or the length of a packed sequence, makes a divisor 0, the
quotient and the remainder are 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import sympy

from flashgen.spec.language.integer_limits import LIMITS_INSIDE, Limits, limits
from flashgen.spec.language.lets import Let, atoms_of, contains
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.symbols import SCORE, SEQ_K, SEQ_Q, B, H, K, Q, is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod
from flashgen.spec.language.tensor_elements import TensorRead
from flashgen.spec.language.user_source import refuse

POSITIONS = frozenset((B, H, Q, K))


def is_power_of_two(number: sympy.Expr) -> bool:
    """Whether a divisor is a power of two, for which integers are shifted or masked."""
    return bool(number.is_Integer and number > 0 and int(number) & (int(number) - 1) == 0)


def may_be_zero(expr: sympy.Expr, bounds: Mapping[sympy.Symbol, Limits] | None = None) -> bool:
    """False only if an integer expression is 0 for no element of a call.

    Args:
        bounds: bounds of further symbols, such as names of common subexpressions.
    """
    if isinstance(expr, sympy.Mul):
        return any(may_be_zero(factor, bounds) for factor in expr.args)
    if isinstance(expr, sympy.Pow):
        return may_be_zero(expr.base, bounds)
    if isinstance(expr, sympy.Piecewise):
        return any(may_be_zero(value, bounds) for value in _values_at_zero(expr))
    if isinstance(expr, sympy.Add):
        constant, rest = expr.as_coeff_Add()
        step = math.gcd(*(int(term.as_coeff_Mul()[0]) for term in sympy.Add.make_args(rest)))
        if constant % step != 0:
            return False
    low, high = limits(expr, {**LIMITS_INSIDE, **(bounds or {})})
    return low <= 0 <= high


def _values_at_zero(choice: sympy.Piecewise) -> Iterator[sympy.Expr]:
    """The values of a choice that may be 0 as far as their conditions tell."""
    before = sympy.true
    for value, condition in choice.args:
        chosen = sympy.And(before, condition)
        if value.is_number or chosen.subs(value, 0) != sympy.false:
            yield value
        before = sympy.And(before, sympy.Not(condition))


def is_data(expr: sympy.Basic) -> bool:
    """True for elements of captured tensors and for lengths, which are data in packed sequences: no
    check before the launch knows them."""
    return contains(expr, TensorRead) or not expr.free_symbols.isdisjoint((SEQ_Q, SEQ_K))


def check_divisors(result: sympy.Basic, *operands: sympy.Basic) -> None:
    """Checks the divisions that an operator adds to its operands.

    Raises:
        SpecError: positions can make a divisor 0.
    """
    before = {part for operand in operands for part in operand.atoms(FloorDiv, FloorMod)}
    for division in result.atoms(FloorDiv, FloorMod) - before:
        for factor in sympy.Mul.make_args(division.args[1]) if is_int(division) else ():
            bare = not contains(factor, TensorRead)
            if bare and POSITIONS & factor.free_symbols and may_be_zero(factor):
                refuse(
                    f"{'//' if isinstance(division, FloorDiv) else '%'} by positions that can be 0",
                    numbers=f"{python_text(division)}; {python_text(factor)} is 0 at some position",
                    way_out=f"a divisor of 1 or more, as in fg.maximum({python_text(factor)}, 1)",
                )


def divisions_by_zero(expr: sympy.Basic) -> list[tuple[sympy.Expr, sympy.Basic]]:
    """Each division whose divisor the numbers of a call can make 0, with the condition for it.

    The condition is over scalars and sizes. It includes the conditions of the choices around the
    division, so that a branch that a call does not choose may divide by 0.
    """
    divisions = atoms_of(expr, FloorDiv, FloorMod)
    if not any(map(_may_divide_by_zero, divisions)):
        return []
    divided: dict[tuple[sympy.Expr, sympy.Basic], None] = {}
    seen: set[tuple[sympy.Basic, sympy.Basic]] = set()
    waiting: list[tuple[sympy.Basic, sympy.Basic]] = [(expr, sympy.true)]

    def visit(part: sympy.Basic, guard: sympy.Basic) -> None:
        if guard == sympy.false:
            return
        if isinstance(part, Let):
            waiting.append((part.value, guard))
            return
        if isinstance(part, sympy.Piecewise):
            for value, condition in part.args:
                visit(condition, guard)
                visit(value, sympy.And(guard, _call_condition(condition)))
                guard = sympy.And(guard, _call_condition(sympy.Not(condition)))
            return
        for arg in part.args:
            others = [other for other in part.args if other is not arg]
            if isinstance(part, sympy.And):
                visit(arg, sympy.And(guard, *map(_call_condition, others)))
            elif isinstance(part, sympy.Or):
                negated = map(sympy.Not, others)
                visit(arg, sympy.And(guard, *map(_call_condition, negated)))
            else:
                visit(arg, guard)
        if isinstance(part, FloorDiv | FloorMod) and _may_divide_by_zero(part):
            reached = sympy.And(guard, sympy.Eq(part.args[1], 0))
            if reached != sympy.false:
                divided[part, reached] = None

    while waiting:
        part_and_guard = waiting.pop()
        if part_and_guard not in seen:
            seen.add(part_and_guard)
            visit(*part_and_guard)
    return list(divided)


def _may_divide_by_zero(division: sympy.Expr) -> bool:
    """True for a division of integers whose divisor the numbers of a call can make 0."""
    divisor = division.args[1]
    is_of_call = bool(divisor.free_symbols) and is_int(division) and _is_of_call(divisor)
    return is_of_call and may_be_zero(divisor)


def _call_condition(condition: sympy.Basic) -> sympy.Basic:
    """A condition on scalars and sizes as it is; true in place of any other."""
    return condition if _is_of_call(condition) and _is_plain(condition) else sympy.true


def _is_of_call(expr: sympy.Basic) -> bool:
    return not contains(expr, TensorRead) and expr.free_symbols.isdisjoint({*POSITIONS, SCORE})


def _is_plain(condition: sympy.Basic) -> bool:
    """True if all numbers that a condition compares are computed in integers."""
    compared = (side for relation in atoms_of(condition, sympy.Rel) for side in relation.args)
    return all(map(is_int, compared))
