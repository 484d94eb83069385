"""The examples of forward mode and of second derivatives: few steps, and as a user runs them."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_python

FOLDER = ROOT / "examples"
NAMES = ("meanflow", "gradient_penalty")


@pytest.mark.parametrize("example", NAMES, indirect=True)
def test_losses_are_those_of_attention_in_float64(example: ModuleType) -> None:
    points = importlib.import_module("point_sets")
    ours, theirs = (
        example.losses(attention, 4, "cpu")
        for attention in (points.flashgen_attention, points.float64_attention)
    )
    assert ours == pytest.approx(theirs, rel=example.BOUND / 10)
    assert len(set(ours)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_example_passes_as_a_user_runs_it(name: str) -> None:
    done = run_python(FOLDER / f"{name}.py", "--steps", 12)
    assert re.search(r"largest relative difference \S+, allowed 1e-04: pass", done.stdout)
