"""Scalars of a call: their order, their types and ranges, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.test_checks import SCALARS, checked, refusal

GOOD = {"window": 5, "slope": 0.5, "on": True}


def test_scalars_come_in_the_order_of_the_spec():
    problem = checked(
        spec=SCALARS, scalars={"slope": 2, "on": np.bool_(True), "window": np.int32(5)}
    )
    assert list(problem.scalars.items()) == [
        (scalar.name, {"slope": 2.0, "on": True, "window": 5}[scalar.name])
        for scalar in SCALARS.scalars
    ]
    assert type(problem.scalars["slope"]) is float
    assert type(problem.scalars["window"]) is int


def test_a_missing_scalar_is_named():
    error = refusal(spec=SCALARS, scalars={"window": 5, "on": True})
    assert error.what == "the scalar 'slope' of the spec is missing"
    assert "given: window, on" in error.numbers
    assert "slope=..." in error.way_out


def test_a_superfluous_scalar_is_named():
    error = refusal(spec=SCALARS, scalars={**GOOD, "windw": 5})
    assert error.what == "'windw' is not a scalar of the spec"
    assert error.where == "argument windw"
    assert "'extra' is not a scalar" in refusal(scalars={"extra": 1}).what


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 5.0),
        ("window", True),
        ("window", 2**30 + 1),
        ("window", "5"),
        ("window", None),
        ("slope", float("nan")),
        ("slope", float("inf")),
        ("slope", 1e39),
        ("slope", "0.5"),
        ("slope", True),
        ("slope", 10**400),
        ("slope", np.complex64(2 + 1j)),
        ("slope", np.str_("2")),
        ("slope", np.ones(2)),
        ("window", np.array(1.5)),
        ("window", np.array([3, 4])),
        ("on", 1),
        ("on", "true"),
    ],
)
def test_scalars_have_the_type_and_range_of_their_dtype(name, value):
    error = refusal(spec=SCALARS, scalars={**GOOD, name: value})
    assert error.what == f"the scalar {name!r} cannot take this value"
    assert repr(value)[:100] in error.numbers
    assert error.where == f"argument {name}"


def test_the_error_for_a_tensor_in_place_of_a_scalar_names_item():
    error = refusal(spec=SCALARS, scalars={**GOOD, "window": torch.tensor(5)})
    assert "window.item()" in error.way_out


@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        (torch.tensor(5), "window.item(), "),
        (torch.tensor(5.0), "int(window.item()), "),
        (torch.tensor([5]), "fg.Tensor('window', (), 'int64') in the spec and window.squeeze()"),
        (torch.tensor([5, 6]), "fg.Tensor('window', ('n0',), 'int64') in the spec, whose elements"),
        (5.0, "window=5"),
        (7.7, "window=8"),
    ],
)
def test_the_error_for_another_type_has_the_number_as_the_scalar_takes_it(given, way_out):
    error = refusal(spec=SCALARS, scalars={**GOOD, "window": given})
    assert way_out in error.way_out


def test_a_scalar_below_its_minimum_is_refused():
    error = refusal(spec=SCALARS, scalars={**GOOD, "window": 0})
    assert "below the minimum" in error.what
    assert "minimum 1" in error.numbers
