"""Tiles of masks that compare floats, with NaN, infinities, huge and tiny numbers, by brute force.

Each mask is a random tree. Its elements are computed by numpy in float32, without flashgen: a tile
with a kept element is never called empty, and one with a removed element never full.
"""

from __future__ import annotations

import operator
import random
import re
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.mask import analyse_mask
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO, B, H
from flashgen.spec.language.tracing import trace_mask
from tests.support.tiers import slow

LEFT, RIGHT = fg.Scalar("left", "float32"), fg.Scalar("right", "float32")
BY_HEAD = fg.Tensor("by_head", ("heads",), "float32")
BY_KEY = fg.Tensor("by_key", ("keys",), "float32")

NUMBERS = (0.0, -0.0, 1.0, -2.5, 0.1, 1e-3, 7.0, 1e37, -3e38, 1e20, 1e-38, 1e-45, -1e-30)
UNREAL = (np.inf, -np.inf, np.nan)
LITERALS = (0.5, 2.0, 0.1, -0.25, 1e30, 3, 1e-30, 100.0)
POSITIONS = np.arange(-24, 40)
TILES = (1, 8, 16)

_BINARY: dict[str, Any] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_COMPARISONS: dict[str, Any] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_FUNCTIONS: dict[str, Any] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "floor": np.floor,
    "round": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "square": lambda x: x * x,
    "cube": lambda x: x * x * x,
    "inverse_square": lambda x: 1 / (x * x),
}
_OF_INTEGERS = ("abs", "floor", "round", "square", "cube")
"""Functions of integers whose values are integers."""


def number(some: random.Random, depth: int) -> Any:
    """A tree of a float, or of an integer that a float meets."""
    kind = some.random()
    if depth == 0 or kind < 0.15:
        return some.choice(
            ["q", "k", "distance", "distance", "left", "right", "by_head", "literal"]
        ), (some.choice(LITERALS))
    if kind < 0.7:
        a, b = number(some, depth - 1), number(some, depth - 1)
        if a[0] == b[0] == "literal":
            b = "left", 0  # Python itself computes with two numbers
        return some.choice(["+", "-", "*", "*", "/", "//", "%", "minimum", "maximum"]), a, b
    if kind < 0.95:
        return some.choice(sorted(_FUNCTIONS)), number(some, depth - 1)
    test = some.choice(sorted(_COMPARISONS)), number(some, depth - 1), number(some, depth - 1)
    return "where", test, number(some, depth - 1), number(some, depth - 1)


def mask(some: random.Random, depth: int) -> Any:
    """A tree of a condition."""
    kind = some.random()
    if depth == 0 or kind < 0.55:
        size = some.choice([1, 1, 2, 3])
        return (
            some.choice(sorted(_COMPARISONS)),
            number(some, size),
            number(some, some.choice([0, 1])),
        )
    if kind < 0.7:
        return "~", mask(some, depth - 1)
    if kind < 0.75:
        return "itself", number(some, 2)
    if kind < 0.8:
        return "by key", some.choice(sorted(_COMPARISONS)), number(some, 1)
    return some.choice("&|"), mask(some, depth - 1), mask(some, depth - 1)


def traced(tree: Any, at: dict[str, Any]) -> Any:
    name, *parts = tree
    if name == "literal":
        return parts[0]
    if name in at:
        return at[name]
    if name == "by key":
        return _COMPARISONS[parts[0]](BY_KEY[at["k"] + 24], traced(parts[1], at))
    args = [traced(part, at) for part in parts]
    if name == "itself":
        return args[0] != args[0]
    if name == "~":
        return ~args[0] if not isinstance(args[0], bool) else not args[0]
    if name in ("square", "cube", "inverse_square"):
        return args[0] ** {"square": 2, "cube": 3, "inverse_square": -2}[name]
    operation = {**_BINARY, **_COMPARISONS, "&": operator.and_, "|": operator.or_}.get(name)
    return operation(*args) if operation else getattr(fg, name)(*args)


def computed(tree: Any, at: dict[str, Any]) -> Any:
    """The values in int64 and float32, as arrays over all positions."""
    name, *parts = tree
    if name == "literal":
        return np.asarray(parts[0], dtype=np.float32 if isinstance(parts[0], float) else np.int64)
    if name in at:
        return at[name]
    if name == "by key":
        return _COMPARISONS[parts[0]](at["by key"], computed(parts[1], at))
    args = [computed(part, at) for part in parts]
    if name == "itself":
        return args[0] != args[0]
    if name == "~":
        return np.logical_not(args[0])
    if name in "&|":
        return (np.logical_and if name == "&" else np.logical_or)(*args)
    whole = all(arg.dtype.kind == "i" for arg in args)
    if name == "where":
        test, *args = args
        whole = all(arg.dtype.kind == "i" for arg in args)
    if not whole or name == "/" or (name in _FUNCTIONS and name not in _OF_INTEGERS):
        args = [arg.astype(np.float32) for arg in args]
    elif name in ("//", "%"):  # 0 where only positions make the divisor 0, as in kernels
        zero = args[1] == 0
        return np.where(zero, 0, _BINARY[name](args[0], np.where(zero, 1, args[1])))
    if name == "where":
        return np.where(test, *args)
    if name in _COMPARISONS:
        return _COMPARISONS[name](*args)
    if name in _FUNCTIONS:
        return np.asarray(_FUNCTIONS[name](*args), dtype=args[0].dtype)
    pair = {"minimum": np.minimum, "maximum": np.maximum}.get(name)
    return np.asarray(pair(*args) if pair else _BINARY[name](*args))


def check(seed: int) -> tuple[int, int]:
    """The number of tiles that are known to be empty or full, and of all."""
    some = random.Random(seed)
    tree = mask(some, 2)
    q, k = POSITIONS[:, None], POSITIONS[None, :]

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        given = {"q": q, "k": k, "distance": q - k, "left": LEFT, "right": RIGHT}
        return traced(tree, {**given, "by_head": BY_HEAD[h]})

    try:
        expr = trace_mask(mod).expr
    except fg.SpecError as error:  # literals alone, such as a root of -1, and 3 // (q - k)
        if not re.search("float32|b[ey] 0|ZeroDivision|finite|too large for kernels", error.what):
            raise
        return 0, 0
    except (ZeroDivisionError, OverflowError):
        return 0, 0
    found = analyse_mask(expr)
    known = total = 0
    for _ in range(4):
        pool = NUMBERS + UNREAL if some.random() < 0.5 else NUMBERS
        left, right, head = (np.float32(some.choice(pool)) for _ in range(3))
        by_key = np.array([some.choice(NUMBERS + UNREAL) for _ in POSITIONS], dtype=np.float32)
        given = {"q": q, "k": k, "distance": q - k, "left": left, "right": right, "by_head": head}
        with np.errstate(all="ignore"):
            kept = computed(tree, {**given, "by key": by_key[None, :]})
        kept = np.broadcast_to(kept, (len(POSITIONS), len(POSITIONS)))
        values = {LEFT.expr: float(left), RIGHT.expr: float(right), B: 0, H: 0}
        values |= {BY_HEAD.symbol: np.array([head]), BY_KEY.symbol: by_key}
        for size in TILES:
            first = POSITIONS[::size]
            ends = {Q_LO: first[:, None], Q_HI: first[:, None] + size - 1}
            ends |= {K_LO: first[None, :], K_HI: first[None, :] + size - 1}
            with np.errstate(all="ignore"):
                some_kept, all_kept = (
                    np.broadcast_to(evaluate(part, {**values, **ends}), (len(first), len(first)))
                    for part in (found.may, found.must)
                )
            tiles = kept.reshape(len(first), size, len(first), size)
            where = f"seed {seed}: {tree}, left {left}, right {right}, by_head {head}, tiles {size}"
            assert not (tiles.any(axis=(1, 3)) & ~some_kept).any(), where
            assert not (all_kept & ~tiles.all(axis=(1, 3))).any(), where
            known += int((~some_kept | all_kept).sum())
            total += some_kept.size
    return known, total


@pytest.mark.parametrize("start", [0, *(slow(start) for start in range(60, 1200, 60))])
def test_no_tile_of_a_float_mask_is_called_what_it_is_not(start: int) -> None:
    counts = [check(seed) for seed in range(start, start + 60)]
    known, total = (sum(count) for count in zip(*counts, strict=True))
    assert known > 0.1 * total, "most masks are analysed"


def test_ends_that_overflow_do_not_make_a_tile_empty() -> None:
    expr = trace_mask(lambda b, h, q, k: (k - q) * LEFT > 1).expr
    ends = {Q_LO: 0, Q_HI: 63, K_LO: 32, K_HI: 95}
    for left, some in ((1e37, True), (1e-37, False), (float("nan"), True), (float("inf"), True)):
        assert evaluate(analyse_mask(expr).may, {**ends, LEFT.expr: left}) == some


def test_a_product_that_rounds_is_not_equal_to_what_it_would_be_of_real_numbers() -> None:
    expr = trace_mask(lambda b, h, q, k: (q * 0.1) * 10 == q).expr
    found = analyse_mask(expr)
    assert not found.always
    rows = np.arange(1000)
    kept = (rows.astype(np.float32) * np.float32(0.1)) * np.float32(10) == rows.astype(np.float32)
    assert not kept.all()
    one = {K_LO: 0, K_HI: 0, Q_LO: rows, Q_HI: rows}
    assert not (evaluate(found.must, one) & ~kept).any()
    assert not (kept & ~np.asarray(evaluate(found.may, one))).any()
