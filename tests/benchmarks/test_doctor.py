"""The part "doctor": what it has recorded when it is stopped."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import proven
from benchmarks.suite.device import Device
from benchmarks.suite.journal import entries
from benchmarks.suite.parts import doctor
from benchmarks.suite.records import read
from flashgen.calls.trust import trial
from flashgen.tools.doctor.diagnosis import run_path
from flashgen.tools.doctor.problems import PROBLEMS
from tests.benchmarks.test_contenders import context_in


class Stopped(Exception):
    """The end of the part's process."""


class OnGpu(Device):
    kind = "gpu"


def run_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: str = ""
) -> list[dict[str, str]]:
    """The rows of a run that is stopped in the second problem of the second path."""

    def ran(words: list[str], *, seconds: float, tell: Any) -> trial.Ended:
        arch = words[words.index("--arch") + 1]
        names = [name for word, name in pairwise(words) if word == "--problem"]
        for place, name in enumerate(names):
            if arch == "sm_90" and place == 1:
                raise Stopped
            facts = {"text": "", "share": 0.5, "equal": 1.0, "exact": 2, "seconds": 1.0}
            tell({"event": "result", "problem": name, "arch": arch, "ok": name != wrong, **facts})
        return trial.Ended(())

    def diagnose(device: int, *, seconds: float, tell: Any, on_result: Any) -> None:
        for arch in ("sm_90a", "sm_90"):
            run_path(arch, device, PROBLEMS, seconds, tell, on_result)

    monkeypatch.setattr(trial, "run", ran)
    monkeypatch.setattr(doctor, "diagnose", diagnose)
    with pytest.raises(Stopped):
        doctor.run(context_in(folder, OnGpu(), "doctor"))
    return read(folder / "measures.csv")


def test_a_doctor_that_is_stopped_has_recorded_what_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run_stopped(tmp_path, monkeypatch)
    right = [row["setting"] for row in rows if row["metric"] == "right" and row["value"] == "1"]
    assert right == ["path=sm_90a"] * len(PROBLEMS) + ["path=sm_90"]
    passed = [(row["subject"], row["value"]) for row in rows if row["metric"] == "path passed"]
    assert passed == [("sm_90a", "1")]
    tests = {**rows[0], "subject": "tests/gpu", "metric": "passed", "value": "3"}
    assert [row["subject"] for row in proven.proven_by([*rows, tests])] == ["sm_90a"]


def test_a_wrong_problem_is_told_at_once_and_its_path_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = PROBLEMS[2].name
    rows = run_stopped(tmp_path, monkeypatch, wrong=name)
    passed = [(row["subject"], row["value"]) for row in rows if row["metric"] == "path passed"]
    assert passed == [("sm_90a", "0")]
    failed = [e["what"] for e in entries(tmp_path / "journal.jsonl") if e["event"] == "failed"]
    assert failed == [f"doctor: sm_90a, {name}: "]
