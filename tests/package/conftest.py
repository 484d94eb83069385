"""The wheel and the source distribution of this tree, built once."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.support.processes import run_python


def _built(target: str, ends: str, folder: Path) -> Path:
    pytest.importorskip("hatchling", reason="the build back end, extra dev")
    run_python("-m", "hatchling", "build", "-t", target, "-d", folder)
    (path,) = folder.glob(f"flashgen-*{ends}")
    return path


@pytest.fixture(scope="session")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built("wheel", "-py3-none-any.whl", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


@pytest.fixture(scope="session")
def sdist_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built("sdist", ".tar.gz", tmp_path_factory.mktemp("sdist"))
