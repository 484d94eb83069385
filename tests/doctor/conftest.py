"""Settings of the tests of doctor: no decision or verdict of another test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.calls import trust


@pytest.fixture
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of verdicts; compiled kernels stay in memory."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    trust.forget()
    yield tmp_path / "cache"
    trust.forget()
