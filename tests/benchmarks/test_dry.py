"""The whole of `make gpu` without a GPU, and the pytest plugin that its first part uses."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.suite.journal import entries
from benchmarks.suite.parts import PARTS
from benchmarks.suite.parts.correctness import record
from benchmarks.suite.records import read
from benchmarks.suite.supervisor import RESTART
from benchmarks.suite.whole_models import problems
from tests.benchmarks.test_contenders import context_in
from tests.support.processes import run_python


def pytest_run(folder: Path, text: str, *, apart: bool = False) -> tuple[int, list[dict[str, str]]]:
    """Runs pytest with the plugin on one file of tests; its exit code and what was written."""
    deadline = time.time() + 1000
    file = folder / f"{folder.name}.py"  # a module of its own in this process
    file.write_text(text)
    outcomes = folder / "outcomes.jsonl"
    command = [*("-p", "benchmarks.suite.pytest_outcomes", "-p", "no:cacheprovider", "-q")]
    command += ["--outcomes", str(outcomes), "--deadline", str(deadline)]
    command += ["-c", os.devnull, "--rootdir", str(folder), "--import-mode", "importlib", str(file)]
    if not apart:
        return int(pytest.main(command)), entries(outcomes)
    done = run_python("-m", "pytest", *command, cwd=folder, status=None)
    return done.returncode, entries(outcomes)


def outcomes_in(found: list[dict[str, str]]) -> dict[str, str]:
    return {e["step"].split("::")[1]: e["outcome"] for e in found if e["event"] == "end"}


TESTS = """
import os, pytest
def test_right(): pass
def test_wrong(): assert 1 == 2
@pytest.mark.skip(reason="needs two GPUs")
def test_other(): pass
@pytest.fixture
def broken(): raise OSError("no device")
def test_set_up(broken): pass
def test_lost(): os._exit(9)
def test_last(): pass
"""


@pytest.mark.slow
def test_each_outcome_is_written_at_once_and_a_lost_process_goes_on_behind_it(
    tmp_path: Path,
) -> None:
    code, found = pytest_run(tmp_path, TESTS, apart=True)
    assert code == 9
    first = {
        "test_right": "passed", "test_wrong": "failed", "test_other": "skipped",
        "test_set_up": "failed",
    }  # fmt: skip
    assert outcomes_in(found) == first
    assert found[-1]["event"] == "begin"
    code, found = pytest_run(tmp_path, TESTS)
    assert code == 0
    assert outcomes_in(found) == {**first, "test_last": "passed"}


def test_tests_behind_the_deadline_do_not_run_and_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", time.time)  # and comes back behind this test
    # The first test moves the clock behind the deadline.
    text = """
import time
def test_a(): time.time = lambda: 1e12
def test_b(): pass
def test_c(): pass
"""
    code, found = pytest_run(tmp_path, text)
    assert code == 0  # not that of a session that was interrupted, which would be started again
    assert outcomes_in(found) == {"test_a": "passed"}
    (collected,) = (e["tests"] for e in found if e["event"] == "collected")
    assert len(collected) == 3


def test_the_part_counts_outcomes_and_lists_what_was_lost_or_left_out(tmp_path: Path) -> None:
    context = context_in(tmp_path, part="correctness")
    found = [
        {"event": "collected", "tests": ["a", "b", "c", "d", "e"]},
        {"event": "begin", "step": "a"},
        {"event": "end", "step": "a", "outcome": "passed", "text": ""},
        {"event": "begin", "step": "b"},
        {"event": "end", "step": "b", "outcome": "failed", "text": "2.0 of 1.0"},
        {"event": "begin", "step": "c"},
        {"event": "collected", "tests": ["d", "e"]},
    ]
    record(context, found, {"c": "ended by SIGSEGV"})
    rows = read(tmp_path / "measures.csv")
    counts = {r["metric"]: r["value"] for r in rows if r["subject"] == "tests/gpu"}
    assert counts == {"passed": "1", "failed": "1", "skipped": "0", "lost": "1", "not run": "2"}
    logged = entries(context.journal.path)
    assert [e["what"] for e in logged if e["event"] == "failed"] == [
        "b: 2.0 of 1.0",
        "c: its process was lost: ended by SIGSEGV",
    ]
    assert [e["what"] for e in logged if e["event"] == "skipped"] == ["2 tests: d, e"]


def test_the_exit_code_for_a_restart_is_none_of_pytest() -> None:
    assert RESTART not in set(map(int, pytest.ExitCode))


# More time than `make gpu PART=dry` has, because other tests run beside this one. The program stops
# its parts by then and says which; the limit of the test is behind that, by the time to end.
MINUTES = 15


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 60)
def test_everything_runs_dry_and_nothing_fails(tmp_path: Path) -> None:
    options = ("--part", "dry", "--minutes", MINUTES, "--out", tmp_path)
    done = run_python("benchmarks/gpu.py", *options)
    assert "A DRY RUN" in done.stdout
    for part in PARTS:
        assert f"{part.name:<12} done" in done.stdout
    rows = read(tmp_path / "speed.csv")
    assert {row["device"] for row in rows} == {"emulator"}
    timed = {row["contender"] for row in rows if row["ms_p50"]}
    assert {"flashgen sm_80", "flashgen sm_80 deterministic", "sdpa math", "flex"} <= timed
    assert {"FlashAttention-4", "cuDNN graph", "cuDNN graph paged"} <= timed
    assert {"cuDNN flex_attention", "FlashInfer paged", "flex flash", "flex max-autotune"} <= timed
    assert all(row["library"] for row in rows)
    assert "stand-in for flash-attn-4" in done.stdout
    assert not {row["status"] for row in rows} & {"wrong", "error", "crashed", "refused"}
    measured = {row["part"] for row in read(tmp_path / "measures.csv")}
    assert measured == {part.name for part in PARTS} - {"suite", "sparsity", "models"}
    rows = read(tmp_path / "models.csv")
    assert {row["status"] for row in rows} == {"ok", "unsupported"}
    # Each model is trained by flashgen and the reference, and decodes.
    for name in ("eager", "flashgen"):
        done = [row for row in rows if row["backend"] == name and row["status"] == "ok"]
        assert len(done) == len(problems(tiny=True))
    assert {"sdpa", "flex"} <= {row["backend"] for row in rows if row["ms_p50"]}
