"""Tracing a mod: one call with symbols turns a Python function into an expression."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy

from flashgen.shared.dtypes import is_bool
from flashgen.shared.errors import FlashgenError, SpecError
from flashgen.spec.language import advice
from flashgen.spec.language.comparisons import FloatEqual
from flashgen.spec.language.float_functions import Abs, Atan, Erf, Erfc, Exp, Sigmoid, Tanh
from flashgen.spec.language.float_operations import (
    AsFloat,
    FloatProduct,
    FloatQuotient,
    FloatSum,
    plain,
)
from flashgen.spec.language.lets import Let, distinct, lets_of, parts_of, substituted
from flashgen.spec.language.operators import as_condition
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.symbols import (
    LOWEST_LITERAL,
    SCORE,
    WEIGHT,
    B,
    H,
    K,
    Q,
    is_condition,
    is_int,
)
from flashgen.spec.language.sympy_functions import Floor, Maximum, Minimum, Round, Select
from flashgen.spec.language.traced import Capture, Traced, Value, as_expr
from flashgen.spec.language.user_source import (
    SourceLines,
    lines_of,
    refuse,
    shown_path,
    user_line_in,
)

Mod = Callable[..., object]


@dataclass(frozen=True)
class TracedMod:
    """The result of tracing a mod.

    Attributes:
        expr: an expression over B, H, Q, K (and SCORE), sizes and scalars; a Boolean for a mask,
            else real.
        captures: every scalar (sizes included) and tensor that the mod uses, in order of first use.
        lines: its location in the user's source.
    """

    expr: sympy.Basic
    captures: tuple[Capture, ...]
    lines: SourceLines


def trace_mask(mask_mod: Mod) -> TracedMod:
    """Trace ``mask_mod(b, h, q, k)``: a condition that is true where the score is kept.

    The signature is FlexAttention's; a mod need not use all arguments. A mask may be always true or
    always false.

    Raises:
        SpecError: the function cannot be traced; the message names the user's file and line.
    """
    trace = _run(mask_mod, "mask_mod", ("b", "h", "q", "k"), (B, H, Q, K))
    trace = replace(trace, expr=as_condition(trace.expr))
    if not is_condition(trace.expr):
        raise SpecError(
            "mask_mod returns a number, not a condition",
            where=str(trace.lines),
            numbers=f"returned {python_text(trace.expr)}",
            way_out="a comparison, as in q >= k; score_mod changes scores",
        )
    if SCORE in trace.expr.free_symbols:
        raise SpecError(
            "mask_mod uses the score",
            where=str(trace.lines),
            numbers=f"returned {python_text(trace.expr)}",
            way_out="a mask of b, h, q, k only: empty tiles are skipped before scores are computed",
        )
    return trace


def trace_score(score_mod: Mod) -> TracedMod:
    """Trace ``score_mod(score, b, h, q, k)``: the score that goes into the softmax.

    A score_mod may ignore the score, for instance in a layer without queries whose scores are a
    captured bias; its derivative by the score is then 0.

    Raises:
        SpecError: the function cannot be traced; the message names the user's file and line.
    """
    trace = _traced_number(score_mod, "score_mod")
    return replace(trace, expr=_removing(trace.expr))


def trace_weight(weight_mod: Mod) -> TracedMod:
    """Trace ``weight_mod(score, b, h, q, k)``: the weight of a kept key, any real number.

    Raises:
        SpecError: the function cannot be traced; the message names the user's file and line.
    """
    return _traced_number(weight_mod, "weight_mod")


def trace_statistic(mod: Mod) -> TracedMod:
    """Trace ``function(score, weight, b, h, q, k)``: what a kept key adds to a statistic.

    Raises:
        SpecError: the function cannot be traced; the message names the user's file and line.
    """
    return _traced_number(mod, "the function of a statistic", "weight")


def _traced_number(mod: Mod, role: str, *other_names: str) -> TracedMod:
    """
    Args:
        other_names: "weight", if the mod takes the weight after the score.
    """
    names = ("score", *other_names, "b", "h", "q", "k")
    trace = _run(mod, role, names, (SCORE, *([WEIGHT] if other_names else []), B, H, Q, K))
    if is_condition(trace.expr):
        raise SpecError(
            f"{role} returns a condition, not a number",
            where=str(trace.lines),
            numbers=f"returned {python_text(trace.expr)}",
            way_out="mask_mod for conditions, or fg.where(condition, score, other) for a number",
        )
    return trace


def weighed(
    score: sympy.Expr, weight: sympy.Expr, removed: sympy.Expr = sympy.S.Zero
) -> sympy.Expr:
    """The weight of a score, and 0 where the score_mod has removed the score.

    Args:
        score: the modified score, an expression over SCORE.
        weight: the weight, an expression over SCORE, which stands for the modified score.
        removed: the value in place of the weight of a removed score.
    """
    value = Let(score) if score.args else score
    weighed_score = substituted(weight, {SCORE: value})
    if not _may_be_infinite(score):
        return weighed_score
    return sympy.Piecewise(
        (removed, FloatEqual(value, -sympy.oo)), (weighed_score, True), evaluate=False
    )


_KEEP_FINITE = (
    *(AsFloat, FloatSum, FloatProduct, Minimum, Maximum, Select, sympy.Piecewise),
    *(Exp, Tanh, Sigmoid, Erf, Erfc, Atan, Abs, Floor, Round),
)
"""Functions of finite arguments that are not -inf, but for an overflow."""


def _may_be_infinite(score: sympy.Expr) -> bool:
    """Whether a modified score may be -inf for a finite score: its weight is 0 then."""
    return not all(map(_keeps_finite, distinct(*parts_of(score))))


def _keeps_finite(part: sympy.Basic) -> bool:
    if is_condition(part) or part == SCORE:
        return True
    if part.is_number:
        return bool(part.is_finite)
    if isinstance(part, FloatQuotient):
        return bool(part.args[1].is_number)
    return is_int(part) or isinstance(part, (Let, sympy.Mul, *_KEEP_FINITE))


_PASSED_ON = (FloatSum, sympy.Min, sympy.Max, Minimum, Maximum)
"""Functions whose value is -inf where the argument that decides it is."""


def _removing(score: sympy.Basic) -> sympy.Basic:
    """The score with -inf for each literal of `LOWEST_LITERAL` or less that it can be or contain.

    Additive masks use such literals, among them the lowest number of a dtype. In a condition or a
    product a literal keeps its value. Each part is looked at once, however often it is used.
    """
    results: dict[sympy.Basic, sympy.Basic] = {}
    for let in lets_of(score):  # parts before what uses them, so that recursion stays shallow
        value = _removed(let.value, results)
        results[let] = let if value == let.value else Let(value)
    return _removed(score, results)


def _removed(score: sympy.Basic, results: dict[sympy.Basic, sympy.Basic]) -> sympy.Basic:
    """`_removing` for one expression; ``results`` has the results of its parts so far."""
    if score not in results:
        results[score] = _removed_anew(score, results)
    return results[score]


def _removed_anew(score: sympy.Basic, results: dict[sympy.Basic, sympy.Basic]) -> sympy.Basic:
    if score.is_number and not is_condition(score):
        number = plain(score)
        return -sympy.oo if number.is_Rational and number <= LOWEST_LITERAL else score
    if isinstance(score, sympy.Piecewise):
        pairs = [(_removed(value, results), condition) for value, condition in score.args]
        return score if pairs == list(score.args) else sympy.Piecewise(*pairs, evaluate=False)
    if isinstance(score, Select):
        parts = (score.args[0], *(_removed(part, results) for part in score.args[1:]))
    elif isinstance(score, _PASSED_ON):
        parts = tuple(_removed(part, results) for part in score.args)
    else:
        return score
    return score if parts == score.args else score.func(*parts)


def _run(
    mod: Mod, role: str, names: tuple[str, ...], symbols: tuple[sympy.Symbol, ...]
) -> TracedMod:
    if not callable(mod):
        raise SpecError(
            f"{role} is not a function",
            where=role,
            numbers=f"given a {type(mod).__name__}",
            way_out=_definition(role, names),
        )
    lines = lines_of(mod, "")
    _check_arity(mod, role, names, lines)
    try:
        returned = mod(*(Value(symbol) for symbol in symbols))
    except FlashgenError:
        raise
    except Exception as error:
        raise _wrapped(error, role, lines) from error
    if not (isinstance(returned, Traced | numbers.Real) or is_bool(returned)):
        raise SpecError(
            f"{role} does not return a number or a condition",
            where=str(lines),
            numbers=f"returned a {type(returned).__name__}",
            way_out="a return statement with "
            + ("a condition, as in return q >= k" if role == "mask_mod" else "a number"),
        )
    expr = as_expr(returned)
    captures = returned.captures if isinstance(returned, Traced) else ()
    if not lines.text:
        lines = SourceLines(lines.file, lines.line, python_text(expr))
    return TracedMod(expr, captures, lines)


def _definition(role: str, names: tuple[str, ...]) -> str:
    return f"def {role.split()[-1]}({', '.join(names)}): ..."


def _check_arity(mod: Mod, role: str, names: tuple[str, ...], lines: SourceLines) -> None:
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*names)
    except TypeError:
        raise SpecError(
            f"{role} does not take {len(names)} arguments by position",
            where=str(lines),
            numbers=f"it takes {signature}; it is called with ({', '.join(names)})",
            way_out=_definition(role, names),
        ) from None


def _wrapped(error: Exception, role: str, lines: SourceLines) -> SpecError:
    where, way_out = str(lines), advice.LANGUAGE
    line = user_line_in(error)
    if line is not None:
        where, way_out = f"{shown_path(line[0])}:{line[1]}", advice.for_call(*line)
    if isinstance(error, NameError):
        way_out = "define the name, or use fg.Scalar(name) or fg.Tensor(name, dims) for an argument"
    return SpecError(
        f"{role} raised {type(error).__name__}: {error}",
        where=where,
        numbers=f"while it was traced with symbols in place of numbers, {role} at {lines}",
        way_out=way_out,
    )


class PickledMod:
    """A mask_mod or score_mod in the form of its traced expression; callable like the function.

    A pickled spec holds it in place of the user's function. A lambda, a closure or a function of a
    spec file cannot be pickled by reference, and a function that can may have changed when it is
    loaded. Kernels depend only on the traced expression.

    Attributes:
        trace: the result of tracing the function.
    """

    def __init__(self, trace: TracedMod) -> None:
        self.trace = trace

    def __repr__(self) -> str:
        return f"<mod from {self.trace.lines}>"

    def __reduce__(self) -> tuple[object, ...]:
        trace = self.trace
        trees: dict[sympy.Basic, Any] = {}
        lets = []
        for index, let in enumerate(lets_of(trace.expr)):
            lets.append(_taken_apart(let.value, trees))
            trees[let] = _LetAt(index)
        tree = _taken_apart(trace.expr, trees)
        return _rebuilt, (tuple(lets), tree, trace.captures, trace.lines)

    def __call__(self, *arguments: object) -> Traced:
        """The result for the symbols (score,) b, h, q, k; other arguments are an error."""
        symbols = (SCORE, B, H, Q, K)[-len(arguments) :]
        exprs = tuple(map(as_expr, arguments))
        if exprs != symbols:
            refuse(
                "a mod from a pickle can only be called with its own symbols",
                numbers=f"called with ({', '.join(map(python_text, exprs))})",
                way_out="the original function, for a call with other arguments",
            )
        return Value(self.trace.expr, self.trace.captures)


@dataclass(frozen=True)
class _Node:
    """A node of an expression. ``plain``: its class reproduces it from its parts."""

    kind: type[sympy.Basic]
    parts: tuple[Any, ...]
    plain: bool


@dataclass(frozen=True)
class _LetAt:
    """A Let, by its index in the order in which Lets are made again."""

    index: int


def _taken_apart(expr: sympy.Basic, trees: dict[sympy.Basic, Any]) -> Any:
    """The tree of an expression; sympy's own pickling would rewrite conditions of a Piecewise."""
    if not expr.args:
        return trees.get(expr, expr)
    if expr not in trees:
        parts = tuple(_taken_apart(part, trees) for part in expr.args)
        trees[expr] = _Node(expr.func, parts, expr.func(*expr.args) == expr)
    return trees[expr]


def _put_together(node: Any, lets: list[Let]) -> sympy.Basic:
    if isinstance(node, _LetAt):
        return lets[node.index]
    if not isinstance(node, _Node):
        return node
    parts = [_put_together(part, lets) for part in node.parts]
    return node.kind(*parts) if node.plain else node.kind(*parts, evaluate=False)


def _rebuilt(
    values: tuple[Any, ...], tree: Any, captures: tuple[Capture, ...], lines: SourceLines
) -> PickledMod:
    lets: list[Let] = []
    for value in values:
        lets.append(Let(_put_together(value, lets)))
    return PickledMod(TracedMod(_put_together(tree, lets), captures, lines))
