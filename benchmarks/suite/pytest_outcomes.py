"""A pytest plugin that writes each outcome down at once, and stops when time is out.

    python -m pytest -p benchmarks.suite.pytest_outcomes --outcomes FILE --deadline SECONDS ...

Tests that an earlier process has run, by the same file, are left out, and so is the one in which
that process was lost. When the GPU answers no more after a failure the session ends with
`RESTART`, because every later test would fail with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.journal import Journal, entries
from benchmarks.suite.supervisor import RESTART


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outcomes")
    group.addoption("--outcomes", type=Path, required=True, help="file of the outcomes")
    group.addoption("--deadline", type=float, required=True, help="seconds since the epoch")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config), "benchmarks-outcomes")
    config.pluginmanager.register(Stopper(), "benchmarks-stopper")


TIME_IS_OUT = "time is out"


class Stopper:
    """Runs no test of a session that is to stop: pytest itself looks only behind each test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        return True if item.session.shouldstop else None


class Outcomes:
    def __init__(self, config: pytest.Config) -> None:
        self._path: Path = config.getoption("--outcomes")
        self._deadline: float = config.getoption("--deadline")
        self._journal = Journal(self._path)
        # By test: its worst outcome so far, of set-up, call and tear-down, and why.
        self._worst: dict[str, tuple[str, str]] = {}
        self._dead = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        begun = {entry.get("step") for entry in entries(self._path) if entry["event"] == "begin"}
        gone = [item for item in items if item.nodeid in begun]
        items[:] = [item for item in items if item.nodeid not in begun]
        config.hook.pytest_deselected(items=gone)
        self._journal.note("collected", tests=[item.nodeid for item in items])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if time.time() > self._deadline:
            item.session.shouldstop = TIME_IS_OUT
            return (yield)  # to Stopper
        self._journal.note("begin", step=item.nodeid)
        result = yield
        outcome, text = self._worst.pop(item.nodeid, ("passed", ""))
        self._journal.note("end", step=item.nodeid, outcome=outcome, text=text)
        if outcome == "failed" and (reason := _gpu_failure()):
            self._dead = reason
            item.session.shouldstop = f"the GPU answers no more: {reason}"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            text = _reason(report)
            if self._worst.get(report.nodeid, ("", ""))[0] != "failed":
                self._worst[report.nodeid] = (report.outcome, text)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._dead:
            session.exitstatus = RESTART
        elif session.shouldstop == TIME_IS_OUT:  # to pytest an interruption
            session.exitstatus = pytest.ExitCode.OK


def _reason(report: pytest.TestReport) -> str:
    """Why a test failed or was skipped, in one line."""
    details: Any = report.longrepr
    if isinstance(details, tuple):
        return str(details[2])
    crash = getattr(details, "reprcrash", None)
    text = crash.message if crash is not None else str(details or "")
    return text.strip().splitlines()[0][:300] if text.strip() else ""


def _gpu_failure() -> str | None:
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:  # whatever a driver that is gone raises
        return str(error).splitlines()[0]
    return None
