"""The time model against published measurements: its stated error is true, its constants fit."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from benchmarks import fit_duration
from benchmarks.suite import model_errors, predictions
from flashgen.kernels.planner.models import fitted_time
from tests.support.paths import ROOT
from tests.support.processes import run_python


def rms(of: list[model_errors.Point], constants: model_errors.Constants) -> float:
    return float(np.sqrt(np.mean(np.log1p([point.error(constants) for point in of]) ** 2)))


@pytest.fixture(scope="module")
def points() -> list[model_errors.Point]:
    return model_errors.points()


def test_the_stated_error_is_that_of_the_records(points: list[model_errors.Point]) -> None:
    found = [abs(point.error()) for point in points]
    assert len(found) == fitted_time.POINTS
    assert statistics.median(found) == pytest.approx(fitted_time.MEDIAN_ERROR, abs=5e-4)
    assert max(found) == pytest.approx(fitted_time.WORST_ERROR, abs=5e-4)


def test_ranges_of_keys_are_predicted_within_a_fifth_on_the_fitted_path(
    points: list[model_errors.Point],
) -> None:
    found = [
        abs(point.error())
        for point in points
        if (point.kind, point.path) == (model_errors.ONE_RANGE, fit_duration.PATH)
    ]
    assert len(found) == 203
    assert statistics.median(found) <= 0.04
    assert max(found) <= 0.20


def test_records_that_the_fit_did_not_see_are_predicted_as_well() -> None:
    found = [abs(point.error()) for point in fit_duration.records(seen=False)]
    assert len(found) == 27
    assert statistics.median(found) <= 0.025
    assert max(found) <= 0.10


@pytest.mark.slow
def test_fitting_anew_does_not_improve_the_constants() -> None:
    of, fitted = fit_duration.records(), fitted_time.CONSTANTS
    for _ in range(4):
        fitted = fit_duration.step(of, fitted)
    for name, value in fitted_time.CONSTANTS[fit_duration.PATH].items():
        assert fitted[fit_duration.PATH][name] == pytest.approx(value, rel=0.01)


def test_each_constant_matters_to_the_fit() -> None:
    of = fit_duration.records()
    path, constants = fit_duration.PATH, fitted_time.CONSTANTS
    for name in constants[path].keys() - set(fit_duration.FIXED):
        value = constants[path][name]
        changed = {**constants, path: {**constants[path], name: 3 * value}}
        assert rms(of, changed) > 1.05 * rms(of, constants)


def test_forms_of_one_call_have_different_plans() -> None:
    calls = model_errors.comparisons()
    assert len(calls) == 14
    for forms in calls:
        plans = {tuple((str(x.plan), x.plan.fma_columns) for x in form.launches) for form in forms}
        assert len(plans) == len(forms) > 1
        assert sum(fit_duration.form_errors(forms)) == pytest.approx(0)


def test_every_series_names_its_source() -> None:
    sources = fit_duration.sources()
    assert {series["source"] for series in fit_duration.published()} == set(sources)
    for series in fit_duration.published():
        assert len(series["seq"]) == len(series["tflops"])
        assert 0 < max(series["tflops"]) < 989


@pytest.mark.slow
def test_the_script_fits_and_prints_the_errors() -> None:
    for options, text in ((("--fit", "1"), "182 points"), ((), "all: 149 points")):
        done = run_python(str(ROOT / "benchmarks" / "fit_duration.py"), *options)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout


def test_the_documentation_has_the_present_errors() -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    assert fit_duration.table_of_errors() in page
    short = [point for point in fit_duration.points() if point.short]
    error = statistics.median(map(abs, fit_duration.errors(short)))
    assert f"differs by {100 * error:.1f} % there" in " ".join(page.split())


def test_each_dense_case_has_a_prediction_beside_its_fastest_peer() -> None:
    lines = predictions.table().splitlines()
    of_case = [line for line in lines if line.startswith("| causal, 2 x 16/16 x 8192, d 128 ")]
    assert len(of_case) == 10  # two passes in four runs, one of them with two dtypes
    assert len([line for line in lines if "| H100 |" in line]) == 79
