"""The time model against published measurements: its stated error is true, its constants fit."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from benchmarks import fit_duration
from flashgen.kernels.planner.models import fitted_time
from tests.support.paths import ROOT
from tests.support.processes import run_python


def rms(constants: fit_duration.Constants) -> float:
    of = fit_duration.counted([point for point in fit_duration.points() if point.fitted])
    return float(np.sqrt(np.mean(np.log1p(fit_duration.errors(of, constants)) ** 2)))


def test_the_stated_error_is_that_of_the_published_points() -> None:
    of = fit_duration.counted(fit_duration.points())
    found = [abs(error) for error in fit_duration.errors(of)]
    assert len(of) == fitted_time.POINTS
    assert statistics.median(found) == pytest.approx(fitted_time.MEDIAN_ERROR, abs=5e-4)
    assert max(found) == pytest.approx(fitted_time.WORST_ERROR, abs=5e-4)


def test_held_out_points_are_predicted_as_well_as_fitted_ones() -> None:
    of = fit_duration.counted(fit_duration.points())
    held_out = [point for point in of if not point.fitted]
    found = [abs(error) for error in fit_duration.errors(held_out)]
    assert len(held_out) > 2 * (len(of) - len(held_out))
    assert statistics.median(found) <= 0.07
    assert max(found) <= 0.20


@pytest.mark.slow
def test_fitting_anew_does_not_improve_the_constants() -> None:
    fitted = dict(fitted_time.CONSTANTS)
    for _ in range(4):
        fitted = fit_duration.step(fitted)
    assert rms(fitted) <= rms(fitted_time.CONSTANTS) <= 1.02 * rms(fitted)


def test_each_constant_matters_to_the_fit() -> None:
    for name, value in fitted_time.CONSTANTS.items():
        assert rms({**fitted_time.CONSTANTS, name: 3 * value}) > 1.05 * rms(fitted_time.CONSTANTS)


def test_every_series_names_its_source() -> None:
    sources = fit_duration.sources()
    assert {series["source"] for series in fit_duration.published()} == set(sources)
    for series in fit_duration.published():
        assert len(series["seq"]) == len(series["tflops"])
        assert 0 < max(series["tflops"]) < 989


@pytest.mark.slow
def test_the_script_prints_the_errors() -> None:
    done = run_python(str(ROOT / "benchmarks" / "fit_duration.py"), "--fit", "1")
    assert done.returncode == 0, done.stderr
    assert "held out: 101 points" in done.stdout


def test_the_documentation_has_the_present_errors() -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    assert fit_duration.table_of_errors() in page
    of = fit_duration.counted(fit_duration.points())
    sizes = [
        [
            abs(error)
            for point, error in zip(of, fit_duration.errors(of), strict=True)
            if found(point)
        ]
        for found in (lambda point: point.fitted, lambda point: not point.fitted)
    ]
    medians, worsts = (
        [f"{100 * f(size):.1f} %" for size in sizes] for f in (statistics.median, max)
    )
    text = " ".join(page.split())
    assert f"median error {' and '.join(medians)}, worst {' and '.join(worsts)}" in text
    short = [point for point in fit_duration.points() if point.short]
    error = statistics.median(map(abs, fit_duration.errors(short)))
    assert f"errs by {100 * error:.1f} % there" in text
