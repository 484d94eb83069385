"""A spec file that the tests of commands share."""

from __future__ import annotations

import pytest

from tests.support.commands import WINDOWED


@pytest.fixture
def windowed(tmp_path):
    file = tmp_path / "windowed.py"
    file.write_text(WINDOWED.format(examples='example_scalars = {"window": 3, "slope": 0.5}'))
    return str(file)
