"""Random masks and scores as trees, with two evaluations: traced by flashgen, and direct.

The direct evaluation uses neither flashgen nor sympy, but exact Python integers and fractions.
"""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from typing import Any

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
_OPERATORS = {**_ARITHMETIC, **_FLOORED, **_COMPARISONS, **_LOGIC}


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

COMPARISONS = st.one_of(
    st.tuples(st.sampled_from(sorted(_COMPARISONS)), _DISTANCES, NUMBERS),
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
