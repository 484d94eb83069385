"""Elements of C++ text: operator precedence, signs, function names, literals."""

from __future__ import annotations

import math
import re
from ctypes import c_float

import sympy

from flashgen.shared.dtypes import FLOAT32_MAX
from flashgen.shared.errors import RenderError
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.language import float_functions
from flashgen.spec.language.float_functions import Abs
from flashgen.spec.language.sympy_functions import Floor, Round

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
            "difference",
            "divides",
            "is_natural",
            "within",
            "fast_div",
            "fast_mod",
            "fast_floor_div",
            "fast_floor_mod",
            "signed_floor_div",
            "signed_floor_mod",
            "float_div",
            "float_mod",
            "minimum",
            "maximum",
            "selected",
            "square",
            "power",
            "sign",
            "rcp",
            "fast_quotient",
            "fast_sqrt",
        ),
        "rounded_power",
        *(
            "int64",
            "fast_tanh",
            "fast_exp",
            "fast_exp2",
            "fast_log",
            "fast_log2",
            "fast_power",
            "sigmoid",
            "fast_sigmoid",
            "sine",
            "cosine",
            "nearest_int",
        ),
        "shifted_left",
        "filled",
        "random_bits",
    )
)
"""The device functions of templates/common/math.cuh.j2."""

# The class of the function, its name for float32, its name for float16 and bfloat16.
FUNCTIONS = (
    (Abs, "fabsf", "fabsf"),
    (Floor, "floorf", "floorf"),
    (Round, "rintf", "rintf"),
    (sympy.sign, "sign", "sign"),
    *((record, *record.cuda) for record in float_functions.FUNCTIONS.values()),
)

CALLED = HELPERS.union(
    ("powf", "exp2f", "sqrtf", "rsqrtf", "min", "max", "abs", "llabs", "float"),
    *((exact, fast) for _, exact, fast in FUNCTIONS),
)
"""Functions that printed expressions call; no variable beside a call has its name."""

KEYWORDS = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
    char32_t class compl concept const consteval constexpr constinit const_cast continue co_await
    co_return co_yield decltype default delete do double dynamic_cast else enum explicit export
    extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
    nullptr operator or or_eq private protected public register reinterpret_cast requires restrict
    return short signed sizeof static static_assert static_cast struct switch template this
    thread_local throw true try typedef typeid typename typeof union unsigned using virtual void
    volatile wchar_t while xor xor_eq
    """.split()  # noqa: SIM905
)
"""The words of C and C++ that name no variable."""

MACRO = re.compile(r"_|[A-Z][A-Z0-9]+(?:_|\Z)")
"""How a name begins that may be a macro of the compiler, of CUDA or of the kernel."""


def inside(text: Text, level: int) -> str:
    """The text, in brackets if it binds less tightly than ``level``."""
    return text[0] if text[1] >= level else f"({text[0]})"


def literal(expr: sympy.Expr) -> Text:
    value = float(evaluate(expr, {}))
    if FLOAT32_MAX < abs(value) < math.inf:
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
    if not math.isfinite(value):  # C++ has no literals of these
        bits = "7fc00000" if math.isnan(value) else "7f800000" if value > 0 else "ff800000"
        return f"__int_as_float(0x{bits})"
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
