"""The modules of examples/, which import each other by their names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module that a test names by a parameter, or its file by EXAMPLE."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        name = request.param if hasattr(request, "param") else request.module.EXAMPLE
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "examples"))
