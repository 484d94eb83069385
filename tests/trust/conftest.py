"""Settings of the tests of trust: no decision, verdict or cache of another test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.calls import trust


@pytest.fixture(autouse=True)
def nothing_known(fresh_cache: Path) -> Iterator[None]:
    trust.forget()
    yield
    trust.forget()
