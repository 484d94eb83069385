"""Random masks and scores as trees, with three evaluations: traced by flashgen, direct, and eager.

The direct evaluation uses neither flashgen nor sympy, but exact Python integers and fractions; the
eager one runs PyTorch's operations on tensors, with the meaning of IEEE 754 and of narrow integers.
"""

from __future__ import annotations

import math
import operator
import random
from fractions import Fraction
from typing import Any

import torch
from hypothesis import strategies as st

import flashgen as fg

# A tree is a name of a leaf, a number, or a tuple (operation, subtree, ...).
Tree = Any

SCALARS = {
    "width": fg.Scalar("width", "int32"),
    "step": fg.Scalar("step", "int32", minimum=1),
    "flag": fg.Scalar("flag", "bool"),
    "slope": fg.Scalar("slope", "float32"),
}
SIZES = {"heads": fg.heads, "seq_q": fg.seq_q, "seq_k": fg.seq_k}

_ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_FLOORED = {"//": operator.floordiv, "%": operator.mod}
_COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_LOGIC = {"&": operator.and_, "|": operator.or_, "^": operator.xor}
_SHIFTS = {"<<": operator.lshift, ">>": operator.rshift, "**": operator.pow}
_OPERATORS = {**_ARITHMETIC, **_FLOORED, **_COMPARISONS, **_LOGIC, **_SHIFTS}


class Undefined(Exception):
    """A division by 0, a root of a negative number or the like somewhere in the tree."""


def traced(tree: Tree, leaves: dict[str, Any]) -> Any:
    """The tree through flashgen's operators; ``leaves`` has the traced b, h, q, k."""
    if isinstance(tree, str):
        return leaves[tree]
    if not isinstance(tree, tuple):
        return tree
    name, *rest = tree
    args = [traced(arg, leaves) for arg in rest]
    if name in _OPERATORS:
        return _OPERATORS[name](*args)
    if name == "~":
        return not args[0] if isinstance(args[0], bool) else ~args[0]
    if name == "neg":
        return -args[0]
    return getattr(fg, name)(*args)


def direct(tree: Tree, values: dict[str, Any]) -> Any:
    """The tree's value in exact Python arithmetic. Raises Undefined for a division by 0."""
    if isinstance(tree, str):
        return values[tree]
    if isinstance(tree, float):
        return Fraction(repr(tree))
    if not isinstance(tree, tuple):
        return tree
    name, *rest = tree
    args = [direct(arg, values) for arg in rest]
    if name in ("/", "//", "%") and args[1] == 0:
        raise Undefined
    if name == "/":
        return Fraction(args[0]) / Fraction(args[1])
    if name in _OPERATORS:
        return _OPERATORS[name](*args)
    if name == "~":
        return not args[0]
    try:
        return _FUNCTIONS[name](*args)
    except (ValueError, OverflowError):
        raise Undefined from None


_FUNCTIONS = {
    "abs": abs,
    "minimum": min,
    "maximum": max,
    "where": lambda c, a, b: a if c else b,
    "popcount": lambda x: (x & 0xFFFFFFFF).bit_count(),
    "floor": math.floor,
    "exp": math.exp,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "log": math.log,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "sin": math.sin,
    "cos": math.cos,
}

_LEAVES = st.sampled_from(
    ["q", "k", "q", "k", "q", "k", "h", "b", "width", "step", "seq_k", "heads"]
)
_CONSTANTS = st.integers(-9, 9)
_DIVISORS = st.one_of(st.integers(1, 6), st.sampled_from([-3, "step", "width", "seq_k", 2, 4]))


def _number(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(st.sampled_from(["+", "-", "-", "-"]), inner, inner),
        st.tuples(st.just("*"), st.one_of(_CONSTANTS, st.just("width")), inner),
        st.tuples(st.just("*"), inner, inner),
        st.tuples(st.sampled_from(["//", "%"]), inner, _DIVISORS),
        st.tuples(st.just("/"), inner, st.integers(1, 4)),
        st.tuples(st.just("abs"), inner),
        st.tuples(st.just("floor"), inner),
        st.tuples(st.sampled_from(["minimum", "maximum"]), inner, inner),
        st.tuples(st.just("where"), st.tuples(st.just("<"), inner, inner), inner, inner),
    )


NUMBERS = st.recursive(st.one_of(_LEAVES, _LEAVES, _CONSTANTS), _number, max_leaves=4)

# Differences of q and k, because masks consist of them.
_DISTANCES = st.one_of(
    st.just(("-", "q", "k")),
    st.just(("abs", ("-", "q", "k"))),
    st.tuples(st.just("-"), st.tuples(st.just("//"), st.just("q"), _DIVISORS), st.just("k")),
    NUMBERS,
)

_INTEGERS = st.sampled_from(["q", "k", "width", ("-", "q", "k"), ("*", 3, "k"), ("//", "q", 4)])


def _bits(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(st.sampled_from("&|^"), inner, st.one_of(inner, st.integers(-9, 40))),
        st.tuples(st.sampled_from(["<<", ">>"]), inner, st.sampled_from([1, 3, "b", "h", "step"])),
        st.tuples(st.just("popcount"), inner),
    )


COMPARISONS = st.one_of(
    st.tuples(st.sampled_from(sorted(_COMPARISONS)), _DISTANCES, NUMBERS),
    st.tuples(
        st.sampled_from(sorted(_COMPARISONS)),
        st.recursive(_INTEGERS, _bits, max_leaves=3),
        st.one_of(_INTEGERS, _CONSTANTS),
    ),
    st.tuples(
        st.sampled_from(["==", "!="]),
        st.tuples(st.just("%"), _DISTANCES, _DIVISORS),
        st.one_of(_CONSTANTS, st.just(0)),
    ),
)


def _condition(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(st.sampled_from(["&", "&", "|", "^"]), inner, inner),
        st.tuples(st.just("~"), inner),
        st.tuples(st.just("where"), inner, inner, inner),
    )


MASKS = st.recursive(
    st.one_of(COMPARISONS, COMPARISONS, COMPARISONS, st.just("flag")), _condition, max_leaves=4
)

_FLOAT_LEAVES = st.one_of(
    st.sampled_from(["q", "k", "h", "slope", "slope", "width", ("-", "q", "k")]),
    st.sampled_from([0.5, 2.0, -0.25, 1e-2, 3]),
)


def _float(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    functions = ["exp", "tanh", "sigmoid", "log", "log2", "sqrt", "sin", "cos", "abs", "floor"]
    return st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "*", "/", "//", "%"]), inner, inner),
        st.tuples(st.sampled_from(functions), inner),
        st.tuples(st.sampled_from(["minimum", "maximum"]), inner, inner),
        st.tuples(st.just("where"), st.tuples(st.just("<"), inner, inner), inner, inner),
    )


FLOATS = st.recursive(_FLOAT_LEAVES, _float, max_leaves=5)

FLOAT_MASKS = st.recursive(
    st.tuples(st.sampled_from(sorted(_COMPARISONS)), FLOATS, FLOATS), _condition, max_leaves=3
)

VALUES = st.fixed_dictionaries(
    {
        "b": st.integers(0, 2),
        "h": st.integers(0, 3),
        "width": st.integers(-6, 9),
        "step": st.integers(1, 5),
        "flag": st.booleans(),
        "slope": st.floats(-3, 3, width=16),
        "heads": st.integers(1, 4),
        "seq_q": st.integers(1, 12),
        "seq_k": st.integers(1, 12),
    }
)


# Trees of floats with NaN, infinities, huge and tiny numbers, and of narrow integers.

ARRAYS = {
    **{name: fg.Tensor(name, ("heads", length), "float32") for name, length in
       (("row", "seq_q"), ("other", "seq_q"), ("column", "seq_k"))},
    **{name: fg.Tensor(name, ("seq_k" if name[0] == "k" else "seq_q",), dtype) for name, dtype in
       (("k_uint8", "uint8"), ("q_uint8", "uint8"), ("k_int8", "int8"), ("q_int8", "int8"),
        ("k_int16", "int16"), ("q_int16", "int16"), ("k_int32", "int32"), ("q_int64", "int64"))},
}  # fmt: skip
"""Captured tensors; the first letter of a narrow one says which position reads it."""

SPECIAL = (
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -3e-39, 1e-30, 1e37, 3e38, -3e38),
    *(1.0, -1.0, 0.5, 2.5, 3.0, 7.0, 16777217.0, 0.1),
)


def eager(tree: Tree, leaves: dict[str, torch.Tensor]) -> Any:
    """The tree's value by PyTorch's operations on tensors, which broadcast."""
    if isinstance(tree, str):
        return leaves[tree]
    if not isinstance(tree, tuple):
        return tree
    name, *rest = tree
    args = [eager(arg, leaves) for arg in rest]
    if name in _OPERATORS:
        return _OPERATORS[name](*args)
    if name == "~":
        return ~args[0]
    if name == "neg":
        return -args[0]
    if name == "isfinite":
        return torch.isfinite(args[0])
    if name == "clamp":
        return torch.clamp(*args)
    if name in ("minimum", "maximum", "atan2") and not isinstance(args[1], torch.Tensor):
        args[1] = torch.tensor(args[1], dtype=args[0].dtype)
    return getattr(torch, name)(*args)


def special_number(draw: random.Random, depth: int) -> Tree:
    """A float of at most ``depth`` operations below another, each rounded exactly or, like exp,
    with a result whose last digits nothing may depend on (`special_condition`)."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(["row", "column", "other", "slope", "row", "column"])
    a, b = special_number(draw, depth - 1), special_number(draw, depth - 1)
    literal = draw.choice([x for x in SPECIAL if math.isfinite(x)])
    return draw.choice(
        [
            *((sign, a, b) for sign in ("+", "-", "*", "/")),
            *((sign, a, literal) for sign in ("+", "-", "*")),
            ("*", draw.choice(["q", "k", ("-", "k", "q")]), a),
            ("+", a, ("*", ("-", "q", "k"), 0.1)),
            ("/", ("+", "k", 1), a),
            # torch's own remainders of far larger numbers depend on the length of the tensor.
            ("//", ("clamp", a, -1000.0, 1000.0), draw.choice([0.3, 2.0])),
            ("%", ("clamp", a, -1000.0, 1000.0), draw.choice([0.7, 3.0])),
            # Which of two zeros is the extremum is not defined; the sum is +0.
            ("+", ("minimum", a, b), 0.0),
            ("+", ("maximum", a, b), 0.0),
            ("where", special_condition(draw, depth - 1), a, b),
            ("clamp", a, -3.0, 2.5),
            ("abs", a),
            ("neg", a),
            ("floor", a),
            ("round", a),
            ("sqrt", a),
            ("-", a, a),
            ("/", a, a),
            ("*", a, 0.0),
            ("**", a, draw.choice([0, 1, 2, 3, 0.5])),
        ]
    )


_SMOOTH = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sin", "cos", "erf", "erfc", "expm1",
           "log1p", "rsqrt")  # fmt: skip


def special_condition(draw: random.Random, depth: int) -> Tree:
    """A condition on floats. Of functions that are not rounded exactly, only NaN and size count."""
    kind = draw.random()
    if depth > 0 and kind < 0.25:
        a, b = special_condition(draw, depth - 1), special_condition(draw, depth - 1)
        return draw.choice([("&", a, b), ("|", a, b), ("^", a, b), ("~", a), ("==", a, b)])
    x = special_number(draw, depth)
    if kind < 0.4:
        function = draw.choice(_SMOOTH)
        y = draw.choice([(function, x), ("atan2", x, special_number(draw, depth))])
        return draw.choice([("isfinite", y), ("!=", y, y), (">", y, 1e30), ("<", y, -1e30)])
    if kind < 0.5:
        return draw.choice([("isfinite", x), ("!=", x, x), ("==", ("-", x, x), 0.0)])
    if kind < 0.6:  # the sign of a zero
        return (">", ("atan2", x, -1.0), 0.0)
    sign = draw.choice(sorted(_COMPARISONS))
    return (sign, x, draw.choice([special_number(draw, depth), "k", draw.choice(SPECIAL[:-1])]))


def narrow_number(draw: random.Random, depth: int) -> Tree:
    """An integer expression over tensors of every width; those beyond 16 bits stay in their own."""
    if depth == 0 or draw.random() < 0.2:
        narrow = [name for name in ARRAYS if "int" in name and name[-2:] not in ("32", "64")]
        return draw.choice([*narrow, ("%", "k_int32", 101), ("%", "q_int64", 101)])
    a, b = narrow_number(draw, depth - 1), narrow_number(draw, depth - 1)
    divisor = draw.choice([2, 3, 7, 64, -5])
    return draw.choice(
        [
            *((sign, a, b) for sign in ("+", "-", "*", "&", "|", "^")),
            *((sign, a, draw.choice([1, 3, 100])) for sign in ("+", "-", "*")),
            ("//", a, divisor if divisor > 0 else 9),
            ("%", a, abs(divisor)),
            ("minimum", a, b),
            ("maximum", a, b),
            ("abs", a),
            ("neg", a),
            ("~", a),
            ("+", a, draw.choice(["q", "k"])),
            ("where", narrow_condition(draw, depth - 1), a, b),
            ("<<", a, draw.choice([1, 3])),
            (">>", a, draw.choice([1, 5])),
        ]
    )


def narrow_condition(draw: random.Random, depth: int) -> Tree:
    sign = draw.choice(sorted(_COMPARISONS))
    return (sign, narrow_number(draw, depth), narrow_number(draw, depth))
