"""CPU seconds of the tests by folder, and build times: a plugin that prints them after a run.

Counts the process and its children, so that subprocesses and parallel compilations are included.
The numbers of parallel workers are added up.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import pytest

KEY = "cpu_seconds"
BUILD = "build_seconds"
"""Property of a test: how long its kernels took to build."""
_seconds: Counter[str] = Counter()


def cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def folder_of(nodeid: str) -> str:
    """tests/kernels/sm80/test_forward.py::... -> tests/kernels"""
    return "/".join(nodeid.split("::")[0].split("/")[:2])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    begin = cpu_seconds()
    result = yield
    # Where tests run in workers the reports carry the number to the process that prints it.
    _seconds[folder_of(item.nodeid)] += cpu_seconds() - begin
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[KEY] = dict(_seconds)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    _seconds.update(getattr(node, "workeroutput", {}).get(KEY, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _seconds:
        terminalreporter.section("CPU seconds per folder")
        for folder, seconds in _seconds.most_common():
            terminalreporter.write_line(f"{seconds:8.1f} {folder}")
        terminalreporter.write_line(f"{_seconds.total():8.1f} in all")
    built = {
        report.nodeid: float(seconds)
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, seconds in report.user_properties
        if name == BUILD
    }
    if built:
        worst = max(built, key=built.__getitem__)
        terminalreporter.section("seconds to build the kernels of random mods")
        terminalreporter.write_line(f"{statistics.median(built.values()):8.1f} median")
        terminalreporter.write_line(f"{built[worst]:8.1f} {worst}")
