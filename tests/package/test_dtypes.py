"""The rules of dtypes: sizes, conversion of scalar arguments, parsing of options, rounding."""

from __future__ import annotations

import ast
import math
import re

import numpy as np
import pytest
import torch

from flashgen.shared.dtypes import (
    ELEMENT_RANGES,
    FLOAT32_MAX,
    ITEMSIZE,
    OPERANDS,
    SCALAR_DTYPES,
    SCALAR_LIMIT,
)
from tests.support.paths import ROOT

INT32, FLOAT32, BOOL = (SCALAR_DTYPES[name] for name in ("int32", "float32", "bool"))


def test_sizes_and_ranges_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE
    for name, (low, high) in ELEMENT_RANGES.items():
        if name not in ("bool", "int64"):  # kernels compute with 2^60 at most
            assert (low, high) == (
                torch.iinfo(getattr(torch, name)).min,
                torch.iinfo(getattr(torch, name)).max,
            )
    for operand in OPERANDS.values():
        assert getattr(torch, operand.sums.dtype).itemsize == operand.sums.itemsize


def sizes_by_choice(source: str) -> list[int]:
    """The lines that choose between two sizes of elements by a condition on a dtype."""
    chosen = re.search(r"\b[1248]\s+if\b", source)
    return [
        node.lineno
        for node in (ast.walk(ast.parse(source)) if chosen else ())
        if isinstance(node, ast.IfExp)
        and {getattr(side, "value", None) for side in (node.body, node.orelse)} <= {1, 2, 4, 8}
        and "dtype" in ast.dump(node.test)
    ]


def test_no_size_is_a_choice_between_two_dtypes() -> None:
    """A third dtype would silently have the size of another one."""
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in (ROOT / "flashgen").rglob("*.py")
        if "emulator" not in path.parts
        if (lines := sizes_by_choice(path.read_text()))
    }
    assert found == {}
    assert sizes_by_choice('size = 4 if spec.dtype == "float32" else 2') == [1]


def test_the_largest_float32_is_that_of_torch() -> None:
    assert torch.finfo(torch.float32).max == FLOAT32_MAX


@pytest.mark.parametrize("value", [0, -7, SCALAR_LIMIT, -SCALAR_LIMIT, np.int64(3)])
def test_integers_within_the_limit_are_int32(value: object) -> None:
    assert INT32.convert(value) == value
    assert type(INT32.convert(value)) is int


@pytest.mark.parametrize("value", [True, np.bool_(True), 1.0, "3", None, SCALAR_LIMIT + 1])
def test_other_values_are_not_int32(value: object) -> None:
    assert INT32.convert(value) is None


@pytest.mark.parametrize("value", [0.5, 3, np.float32(0.1), FLOAT32_MAX, -FLOAT32_MAX])
def test_finite_numbers_are_float32(value: object) -> None:
    assert FLOAT32.convert(value) == value


@pytest.mark.parametrize("value", [False, math.inf, math.nan, 2 * FLOAT32_MAX, "1", None])
def test_other_values_are_not_float32(value: object) -> None:
    assert FLOAT32.convert(value) is None


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e-45, 1e-50, 16777217, FLOAT32_MAX])
def test_a_kernel_receives_the_nearest_float32(value: float) -> None:
    assert FLOAT32.stored(value) == float(np.float32(value))


def test_only_bools_are_bool() -> None:
    assert BOOL.convert(True) is BOOL.convert(np.bool_(True)) is True
    assert BOOL.convert(1) is BOOL.convert("true") is None


@pytest.mark.parametrize("name", SCALAR_DTYPES)
def test_the_example_can_be_parsed_and_converted(name: str) -> None:
    dtype = SCALAR_DTYPES[name]
    assert dtype.convert(dtype.parse(dtype.example)) is not None
    assert dtype.parse("no number") is None
