"""What C++ text is made of: precedence, signs, names of functions, literals."""

from __future__ import annotations

import sympy

from ..analysis import evaluate
from ..errors import RenderError
from ..expr import Floor, Log2, Sigmoid
from ..expr.literal import LARGEST_LITERAL, float32_literal

# C++ precedence, higher binds tighter.
ATOM, UNARY, TIMES, PLUS, SHIFT, LESS, EQUAL, MASK, AND, OR, CHOICE = range(16, 5, -1)

Text = tuple[str, int]

SIGNS = {
    sympy.StrictLessThan: "<",
    sympy.LessThan: "<=",
    sympy.StrictGreaterThan: ">",
    sympy.GreaterThan: ">=",
    sympy.Equality: "==",
    sympy.Unequality: "!=",
}

HELPERS = frozenset(
    (
        *("floor_div", "floor_mod", "float_mod", "square", "power", "sign", "rcp", "fast_sqrt"),
        "rounded_power",
        *("fast_tanh", "sigmoid", "fast_sigmoid", "sine", "cosine", "nearest_int"),
    )
)
"""The device functions of templates/math.cuh.j2."""

# Class, name at float32, name at float16 and bfloat16.
FUNCTIONS = (
    (sympy.exp, "expf", "expf"),
    (sympy.log, "logf", "logf"),
    (Log2, "log2f", "log2f"),
    (sympy.tanh, "tanhf", "fast_tanh"),
    (Sigmoid, "sigmoid", "fast_sigmoid"),
    (sympy.Abs, "fabsf", "fabsf"),
    (Floor, "floorf", "floorf"),
    (sympy.sin, "sine", "sine"),
    (sympy.cos, "cosine", "cosine"),
    (sympy.sign, "sign", "sign"),
)


def inside(text: Text, level: int) -> str:
    """The text, in brackets if it binds less tightly than ``level``."""
    return text[0] if text[1] >= level else f"({text[0]})"


def literal(expr: sympy.Expr) -> Text:
    value = float(evaluate(expr, {}))
    if abs(value) > LARGEST_LITERAL:
        raise RenderError(
            "a constant that float32 cannot hold",
            where=str(expr),
            numbers=f"{value:.8g}; the largest finite float32 is {LARGEST_LITERAL:.8g}",
            way_out="smaller constants in the spec",
        )
    text = float32_literal(value)
    return text, UNARY if text.startswith("-") else ATOM


def unknown(expr: sympy.Basic) -> RenderError:
    return RenderError(
        f"no CUDA for {expr.func.__name__}",
        where=str(expr)[:200],
        numbers=f"functions known: {', '.join(sorted(kind.__name__ for kind, _, _ in FUNCTIONS))}",
        way_out="an expression of the functions of flashgen",
    )
