"""Mods restored from a pickle, which a pickled spec holds in place of the user's functions.

A lambda, a closure or a function of a spec file cannot be pickled by reference, and a function that
can may have changed when it is loaded. Kernels depend only on the traced expression, so that is
what a pickle contains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.language.python_printer import python_text
from flashgen.language.symbols import SCORE, B, H, K, Q
from flashgen.language.traced import Capture, Traced, Value, as_expr
from flashgen.language.tracing import TracedMod
from flashgen.language.user_source import SourceLines, refuse


class PickledMod:
    """A mask_mod or score_mod in the form of its traced expression; callable like the function.

    Attributes:
        trace: the result of tracing the function.
    """

    def __init__(self, trace: TracedMod) -> None:
        self.trace = trace

    def __repr__(self) -> str:
        return f"<mod from {self.trace.lines}>"

    def __reduce__(self) -> tuple[object, ...]:
        trace = self.trace
        return _rebuilt, (_taken_apart(trace.expr, {}), trace.captures, trace.lines)

    def __call__(self, *arguments: object) -> Traced:
        """The result for the symbols (score,) b, h, q, k; other arguments are an error."""
        symbols = (SCORE, B, H, Q, K)[-len(arguments) :]
        given = tuple(map(as_expr, arguments))
        if given != symbols:
            refuse(
                "a mod from a pickle can only be called with its own symbols",
                numbers=f"called with ({', '.join(map(python_text, given))})",
                way_out="the original function, for a call with other arguments",
            )
        return Value(self.trace.expr, self.trace.captures)


@dataclass(frozen=True)
class _Node:
    """A node of an expression. ``plain``: its class reproduces it from its parts."""

    kind: type[sympy.Basic]
    parts: tuple[Any, ...]
    plain: bool


def _taken_apart(expr: sympy.Basic, known: dict[sympy.Basic, Any]) -> Any:
    """The tree of an expression; sympy's own pickling would rewrite conditions of a Piecewise."""
    if not expr.args:
        return expr
    if expr not in known:
        parts = tuple(_taken_apart(part, known) for part in expr.args)
        known[expr] = _Node(expr.func, parts, expr.func(*expr.args) == expr)
    return known[expr]


def _put_together(node: Any) -> sympy.Basic:
    if not isinstance(node, _Node):
        return node
    parts = [_put_together(part) for part in node.parts]
    return node.kind(*parts) if node.plain else node.kind(*parts, evaluate=False)


def _rebuilt(tree: Any, captures: tuple[Capture, ...], lines: SourceLines) -> PickledMod:
    return PickledMod(TracedMod(_put_together(tree), captures, lines))
