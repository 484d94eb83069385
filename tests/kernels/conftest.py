"""Kernels clamp indices, and the tests here compare them with a reference that does: reads outside
of captured tensors, which operators refuse on CPU tensors (`tests/ops/test_reads.py`), are allowed.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def reads_are_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CHECK_READS", "0")
