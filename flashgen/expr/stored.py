"""Mods that have been read: what a pickled spec holds in place of the user's functions.

A lambda, a closure or a function of a spec file cannot be pickled by reference, and a function that
can may have changed by the time it is found again. The expression that was read from it is all that
a kernel depends on, so that is what travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from .shown import shown
from .source import SourceLines
from .symbols import SCORE, B, H, K, Q
from .trace import Trace
from .traced import Capture, Traced, Value, as_expr, refuse


class StoredMod:
    """A mask_mod or score_mod known by its expression; callable like the function it was.

    Attributes:
        trace: what was read from the function.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __repr__(self) -> str:
        return f"<mod from {self.trace.lines}>"

    def __reduce__(self) -> tuple[object, ...]:
        trace = self.trace
        return _rebuilt, (_taken_apart(trace.expr, {}), trace.captures, trace.lines)

    def __call__(self, *arguments: object) -> Traced:
        """What the function returned for the symbols (score,) b, h, q, k, and for no others."""
        symbols = (SCORE, B, H, Q, K)[-len(arguments) :]
        given = tuple(map(as_expr, arguments))
        if given != symbols:
            refuse(
                "a mod that was pickled is known by its expression alone",
                numbers=f"called with ({', '.join(map(shown, given))})",
                way_out="the function itself, to call it with other arguments than its own",
            )
        return Value(self.trace.expr, self.trace.captures)


@dataclass(frozen=True)
class _Node:
    """An expression taken apart. ``plain`` says whether its class gives it back from its parts."""

    kind: type[sympy.Basic]
    parts: tuple[Any, ...]
    plain: bool


def _taken_apart(expr: sympy.Basic, known: dict[sympy.Basic, Any]) -> Any:
    """sympy's own pickling makes every node anew, and a Piecewise turns its conditions around."""
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


def _rebuilt(tree: Any, captures: tuple[Capture, ...], lines: SourceLines) -> StoredMod:
    return StoredMod(Trace(_put_together(tree), captures, lines))
