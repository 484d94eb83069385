"""The records that prove a code path, and the file that comes with flashgen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.suite import proven, records
from benchmarks.suite.records import Stamp, Writer


def ran(folder: Path, run: str = "1", device: str = "gpu", passed: int = 1, **tests: int) -> None:
    """Records of a run: a path with doctor's verdict, and counts of the tests of tests/gpu."""
    stamp = Stamp(run, "abc", device, "NVIDIA H200", "580.1", "torch 2")
    writer = Writer(folder, stamp, "doctor")
    writer.measure("sm_90a", "path passed", passed, "", "templates=0123")
    writer.measure("sm_90", "path passed", 0, "", "templates=0123")
    for metric, count in ({"passed": 9, "failed": 0, "lost": 0} | tests).items():
        writer.measure("tests/gpu", metric, count, "tests")


def entries(folder: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(proven.text(folder))["proven"]
    return found


def test_a_path_that_passed_in_a_run_without_failures_is_proven(tmp_path: Path) -> None:
    ran(tmp_path, "1")
    ran(tmp_path, "2")
    entry = {"gpu": "NVIDIA H200", "arch": "sm_90a", "templates": "0123", "run": "2"}
    assert entries(tmp_path) == [entry]


@pytest.mark.parametrize(
    "how", [{"device": "emulator"}, {"passed": 0}, {"failed": 1}, {"lost": 1}], ids=str
)
def test_other_runs_prove_nothing(tmp_path: Path, how: dict[str, int]) -> None:
    ran(tmp_path, **how)  # type: ignore[arg-type]
    assert entries(tmp_path) == []


def test_a_run_without_tests_proves_nothing(tmp_path: Path) -> None:
    stamp = Stamp("1", "abc", "gpu", "NVIDIA H200", "580.1", "torch 2")
    Writer(tmp_path, stamp, "doctor").measure("sm_90a", "path passed", 1)
    assert entries(tmp_path) == []


def test_the_file_is_written_and_compared(tmp_path: Path) -> None:
    ran(tmp_path)
    file = tmp_path / "proven.json"
    assert not proven.write(tmp_path, check=True, file=file)
    assert not file.exists()
    proven.write(tmp_path, check=False, file=file)
    assert proven.write(tmp_path, check=True, file=file)
    assert json.loads(file.read_text())["proven"]


def test_the_file_of_this_checkout_is_that_of_its_records() -> None:
    assert proven.write(records.RESULTS, check=True), "python benchmarks/report.py --proven"
