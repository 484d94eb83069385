"""The wheel and the source distribution of this tree, built once."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.support.processes import run_python


@pytest.fixture(scope="session")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="the build back end, extra dev")
    folder = tmp_path_factory.mktemp("wheel")
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (path,) = folder.glob("flashgen-*-py3-none-any.whl")
    return path


@pytest.fixture(scope="session")
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


@pytest.fixture(scope="session")
def sdist_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="the build back end, extra dev")
    folder = tmp_path_factory.mktemp("sdist")
    run_python("-m", "hatchling", "build", "-t", "sdist", "-d", folder)
    (path,) = folder.glob("flashgen-*.tar.gz")
    return path
