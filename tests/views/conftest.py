"""Pages that several tests read: made once by the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import CAUSAL, flashgen

SHAPE = "1,2,100"
MORE = ("--backward", "--tangent")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of causal attention with its backward and tangent passes."""
    file = tmp_path_factory.mktemp("report") / "causal.html"
    done = flashgen("report", CAUSAL, "--shape", SHAPE, *MORE, "-o", str(file))
    assert done.exit_code == 0, done.output + done.stderr
    return file


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The comparison of two tiles."""
    file = tmp_path_factory.mktemp("report") / "tiles.html"
    tiles = ("--tile", "plan,64x32")
    done = flashgen("report", CAUSAL, "--shape", "1,1,100", *tiles, "-o", str(file))
    assert done.exit_code == 0, done.output + done.stderr
    return file
