"""Settings that every test shares: one thread for BLAS, no settings of the user, a cache apart."""

from __future__ import annotations

import os
from pathlib import Path

# Before numpy and torch are imported: the tests run in parallel, more threads only get in the way.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# A developer's own settings must not decide what the tests see, but where the GPU tests run.
KEPT = ("FLASHGEN_GPU_DRY",)
for variable in [n for n in os.environ if n.startswith("FLASHGEN_") and n not in KEPT]:
    del os.environ[variable]
# Kept between runs and shared by parallel workers: it is keyed by content.
os.environ["FLASHGEN_CACHE_DIR"] = str(
    Path(__file__).resolve().parents[1] / ".pytest_cache" / "flashgen-kernels"
)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# The same examples in every run, and no deadline: the emulator's first call is slow.
settings.register_profile("flashgen", deadline=None, derandomize=True)
settings.load_profile("flashgen")


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache, on disk and in memory, for one test."""
    from flashgen.compile import forget

    root = tmp_path / "cache"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(root))
    forget()
    return root


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first, so that no parallel worker waits for it at the end."""
    items.sort(key=lambda item: "test_property_emulated" not in item.nodeid)
