"""Elements of C++ text: operator precedence, signs, function names, literals."""

from __future__ import annotations

from ctypes import c_float

import sympy

from flashgen.analysis import evaluate
from flashgen.dtypes import FLOAT32_MAX
from flashgen.errors import RenderError
from flashgen.language import Atan2, Erf, Erfc, Expm1, Floor, Log1p, Log2, Round, Sigmoid
from flashgen.language.traced import MINUS_INFINITY

# Levels of C++ operator precedence; a higher level binds tighter.
ATOM, UNARY, TIMES, PLUS, SHIFT, LESS, EQUAL, MASK, AND, OR, CHOICE = range(16, 5, -1)

Text = tuple[str, int]

HELPERS = frozenset(
    (
        *(
            "floor_div",
            "floor_mod",
            "floor_div_or_0",
            "floor_mod_or_0",
            "fast_div",
            "fast_mod",
            "fast_floor_div",
            "fast_floor_mod",
            "signed_floor_div",
            "signed_floor_mod",
            "float_mod",
            "square",
            "power",
            "sign",
            "rcp",
            "fast_sqrt",
        ),
        "rounded_power",
        *(
            "int64",
            "fast_tanh",
            "fast_log",
            "fast_log2",
            "sigmoid",
            "fast_sigmoid",
            "sine",
            "cosine",
            "nearest_int",
        ),
        "shifted_left",
    )
)
"""The device functions of templates/common/math.cuh.j2."""

# The class of the function, its name for float32, its name for float16 and bfloat16.
FUNCTIONS = (
    (sympy.exp, "expf", "expf"),
    (sympy.log, "logf", "fast_log"),
    (Log2, "log2f", "fast_log2"),
    (sympy.tanh, "tanhf", "fast_tanh"),
    (Sigmoid, "sigmoid", "fast_sigmoid"),
    (sympy.Abs, "fabsf", "fabsf"),
    (Floor, "floorf", "floorf"),
    (Round, "rintf", "rintf"),
    (Erf, "erff", "erff"),
    (Erfc, "erfcf", "erfcf"),
    (Log1p, "log1pf", "log1pf"),
    (Expm1, "expm1f", "expm1f"),
    (Atan2, "atan2f", "atan2f"),
    (sympy.sin, "sine", "sine"),
    (sympy.cos, "cosine", "cosine"),
    (sympy.sign, "sign", "sign"),
)

CALLED = HELPERS.union(
    ("fminf", "fmaxf", "powf", "exp2f", "sqrtf", "rsqrtf", "min", "max", "abs", "llabs", "float"),
    *((exact, fast) for _, exact, fast in FUNCTIONS),
)
"""Functions that printed expressions call; no variable beside a call has its name."""


def inside(text: Text, level: int) -> str:
    """The text, in brackets if it binds less tightly than ``level``."""
    return text[0] if text[1] >= level else f"({text[0]})"


def literal(expr: sympy.Expr) -> Text:
    if expr == MINUS_INFINITY:
        return "__int_as_float(0xff800000)", ATOM
    value = float(evaluate(expr, {}))
    if abs(value) > FLOAT32_MAX:
        raise RenderError(
            "float32 cannot hold a constant of the spec",
            where=str(expr),
            numbers=f"{value:.8g}; the largest finite float32 is {FLOAT32_MAX:.8g}",
            way_out="smaller constants in the spec",
        )
    text = float32_literal(value)
    return text, UNARY if text.startswith("-") else ATOM


def float32_literal(value: float) -> str:
    """The shortest C++ literal of the float32 nearest to ``value``."""
    if value != value:
        return "__int_as_float(0x7fc00000)"  # NaN has no literal
    exact = c_float(value).value
    text = next(t for d in range(17) if c_float(float(t := f"{exact:.{d}e}")).value == exact)
    mantissa, exponent = text.split("e")
    if not -5 < int(exponent) < 9:
        return f"{mantissa}e{int(exponent)}f"
    digits = max(1, len(mantissa.partition(".")[2]) - int(exponent))
    return f"{float(text):.{digits}f}f"


def unknown(expr: sympy.Basic) -> RenderError:
    return RenderError(
        f"{expr.func.__name__} has no CUDA equivalent",
        where=str(expr)[:200],
        numbers=f"functions known: {', '.join(sorted(kind.__name__ for kind, _, _ in FUNCTIONS))}",
        way_out="an expression of the functions of flashgen",
    )
