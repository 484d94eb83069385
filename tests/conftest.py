"""Settings that every test shares: one thread for BLAS, no settings of the user, a cache apart."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before numpy and torch are imported: the tests run in parallel, more threads only get in the way.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# A developer's own settings must not decide what the tests see, but where the GPU tests run and how
# tensor cores add in the emulator.
KEPT = ("FLASHGEN_GPU_DRY", "FLASHGEN_EMULATOR_SUMS")
for variable in [n for n in os.environ if n.startswith("FLASHGEN_") and n not in KEPT]:
    del os.environ[variable]
# Kept between runs and shared by parallel workers: it is keyed by content.
os.environ["FLASHGEN_CACHE_DIR"] = str(
    Path(__file__).resolve().parents[1] / ".pytest_cache" / "flashgen-kernels"
)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.support.tiers import SHARES, share_of_commit  # noqa: E402

pytest_plugins = ["tests.support.costs"]

# Parsed kernels and expressions live long and have few cycles: frequent collections cost a fifth.
gc.set_threshold(50_000, 20, 50)

# The same examples in every run, and no deadline: the emulator's first call is slow.
settings.register_profile("flashgen", deadline=None, derandomize=True)
settings.load_profile("flashgen")


OURS = {name: value for name, value in os.environ.items() if name.startswith("FLASHGEN_")}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fails a test that leaves another setting behind, such as no cache for all tests after it."""
    result = yield
    found = {name: value for name, value in os.environ.items() if name.startswith("FLASHGEN_")}
    if found != OURS:
        for name in found:
            del os.environ[name]
        os.environ.update(OURS)
        pytest.fail(f"the test leaves the environment changed: {found}; before it: {OURS}")
    return result


def pytest_unconfigure() -> None:
    """Spares pytest's last five collections the objects of a whole run: 2 seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache, on disk and in memory, for one test."""
    from flashgen.kernels.compile import forget

    root = tmp_path / "cache"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(root))
    forget()
    return root


@pytest.fixture
def rounded_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster sums of tensor cores, for tests that hold no sum against the error rule."""
    monkeypatch.setenv("FLASHGEN_EMULATOR_SUMS", "rounded")


def pytest_report_header() -> str | None:
    """One line instead of a skipped test each where tests/gpu is not collected."""
    from tests.support.gpu_device import MISSING

    return f"tests/gpu is not collected: {MISSING}" if MISSING else None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shares of the tests")
    group.addoption(
        "--share-of-commit", type=int, metavar="N", help=f"share N mod {SHARES} of the tests"
    )
    group.addoption("--minutes", type=float, help="no test starts after this time")


def pytest_collection_finish() -> None:
    """Keeps the garbage collector off what is imported and collected: millions of objects."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of one share, and puts the longest first, so that no worker ends late."""
    commit = config.getoption("--share-of-commit")
    if commit is not None:
        by_id = {item.nodeid: item for item in items}
        always = {name for name, item in by_id.items() if item.get_closest_marker("every_share")}
        kept = share_of_commit(by_id, commit, always)
        config.hook.pytest_deselected(items=[by_id[i] for i in by_id.keys() - set(kept)])
        items[:] = [by_id[nodeid] for nodeid in kept]
        return
    items.sort(key=lambda item: "kernels/test_property" not in item.nodeid)


BEGIN = time.monotonic()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How long a share took, and how many of its tests it left out: both are to be known."""
    commit = config.getoption("--share-of-commit")
    if commit is not None:
        skipped = terminalreporter.stats.get("skipped", [])
        left = sum("not run:" in str(report.longrepr) for report in skipped)
        minutes = (time.monotonic() - BEGIN) / 60
        terminalreporter.write_line(
            f"share {commit % SHARES} of {SHARES}: {minutes:.1f} minutes, {left} tests left out"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - BEGIN > 60 * minutes:
        pytest.skip(f"not run: {minutes:g} minutes were over")
