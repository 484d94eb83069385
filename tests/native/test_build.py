"""The library of native calls: what it is built for, where it is kept, what is said without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from flashgen.calls.native import build
from flashgen.kernels.compile import cache
from flashgen.shared.errors import CompileError
from flashgen.tools.doctor.machine import inspect
from tests.support.commands import flashgen


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def placed(mode: int = 0o700) -> Path:
    """A file in the place of the library, which no test loads."""
    file = build.path()
    assert file is not None
    file.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    file.write_bytes(b"no library")
    file.chmod(mode)
    return file


def test_the_key_is_that_of_source_torch_python_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [build.key(build.flags())]
    monkeypatch.setenv("CXXFLAGS", "-g")
    keys.append(build.key(build.flags()))
    monkeypatch.delenv("CXXFLAGS")
    build.key.cache_clear()
    assert build.key(build.flags()) == keys[0]
    for name, value in (("torch", "9.9"), ("cache_tag", "cpython-399"), ("SOURCE", __file__)):
        build.key.cache_clear()
        with monkeypatch.context() as patch:
            if name == "torch":
                patch.setattr(torch, "__version__", value)
            elif name == "SOURCE":
                patch.setattr(build, "SOURCE", Path(value))
            else:
                patch.setattr(build.sys.implementation, name, value)
            keys.append(build.key(build.flags()))
    build.key.cache_clear()
    assert len(set(keys)) == 5


def test_without_a_compiler_the_command_says_what_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompileError, match="without a C\\+\\+ compiler") as caught:
        build.build()
    assert "calls are made in Python" in caught.value.numbers
    assert "g++" in caught.value.way_out
    assert list((root / cache.NATIVE).iterdir()) == []
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = flashgen("build-native")
    assert result.exit_code != 0
    assert "no-such-compiler" in result.stderr


def test_a_compiler_that_fails_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CompileError, match="rejects the native part"):
        build.build()
    assert list((root / cache.NATIVE).iterdir()) == []
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "off")
    with pytest.raises(CompileError, match="cannot be kept"):
        build.build()


def test_why_calls_are_made_in_python_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.missing() == "it is not built: run `flashgen build-native`"
    assert build.load() is None
    file = placed()
    assert build.missing() == ""
    file.rename(file.with_name("flashgen_native.000.so"))
    assert "another version" in build.missing()
    assert build.load() is None
    monkeypatch.setenv("FLASHGEN_NATIVE", "0")
    placed()
    assert build.missing() == "FLASHGEN_NATIVE is 0"
    assert build.load() is None
    monkeypatch.setenv("FLASHGEN_NATIVE", "1")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "off")
    assert "cache is off" in build.missing()


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_a_library_that_another_user_can_write_is_not_loaded(root: Path) -> None:
    placed(0o722)
    assert "other users can write" in build.missing()
    assert build.load() is None
    file = placed(0o700)
    file.parent.chmod(0o777)
    assert "other users can write" in build.missing()


def test_doctor_says_which_path_calls_take(root: Path) -> None:
    assert inspect().native == "it is not built: run `flashgen build-native`"
    placed()
    assert inspect().native == ""
    assert flashgen("cache", "clear").exit_code == 0
    assert list(root.glob("*/*.so")) == []


def test_the_command_builds_nothing_twice(root: Path) -> None:
    file = placed()
    result = flashgen("build-native")
    assert result.exit_code == 0, result.output
    assert f"{file} is there already" in result.output.replace("\n", "")
