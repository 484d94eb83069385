"""The library of native calls: what it is built for, where it is kept, what is said without it."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

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


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in the place of the library can be loaded."""
    monkeypatch.setattr(build, "_imported", lambda file: ModuleType(file.name))


def placed(mode: int = 0o700, data: bytes = b"no library") -> Path:
    """A file in the place of the library, which no test loads."""
    file = build.path()
    assert file is not None
    file.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    file.write_bytes(build._sealed(data))
    file.chmod(mode)
    return file


def script(folder: Path, text: bytes) -> str:
    """The name of a program that a test takes for a compiler."""
    file = folder / "compiler.sh"
    file.write_bytes(b"#!/bin/sh\n" + text)
    file.chmod(0o700)
    return str(file)


def test_the_key_is_that_of_source_torch_and_python(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [build.key()]
    monkeypatch.setenv("CXXFLAGS", "-g")
    build.key.cache_clear()
    assert build.key() == keys[0]
    assert "-g" in build.flags()
    monkeypatch.delenv("CXXFLAGS")
    for name, value in (("torch", "9.9"), ("cache_tag", "cpython-399"), ("SOURCE", __file__)):
        build.key.cache_clear()
        with monkeypatch.context() as patch:
            if name == "torch":
                patch.setattr(torch, "__version__", value)
            elif name == "SOURCE":
                patch.setattr(build, "SOURCE", Path(value))
            else:
                patch.setattr(build.sys.implementation, name, value)
            keys.append(build.key())
    build.key.cache_clear()
    assert len(set(keys)) == 4


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
    text = b"printf 'error: of \\377\\376, not UTF-8' >&2; exit 1"
    for compiler in ("false", "false -O3", script(root.parent, text)):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(CompileError, match="does not make the native part") as caught:
            build.build()
        assert list((root / cache.NATIVE).iterdir()) == []
    assert "not UTF-8" in caught.value.numbers
    (root.parent / "compiler.sh").write_bytes(b"no program")
    with pytest.raises(CompileError, match="cannot be run"):
        build.build()
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "off")
    with pytest.raises(CompileError, match="cannot be kept"):
        build.build()


def test_a_compiler_that_makes_no_library_is_an_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(root.parent, b"exit 0"))
    with pytest.raises(CompileError, match="cannot be loaded"):
        build.build()
    assert "cannot be loaded" in build.missing()
    assert build.load() is None


def test_a_damaged_library_is_not_loaded(root: Path, loads: None) -> None:
    file = placed()
    for data in (b"", b"no", build._sealed(b"no library")[:-1], b"a" + file.read_bytes()[1:]):
        file.write_bytes(data)
        assert build.missing() == f"{file.name} is damaged: run `flashgen build-native`"
        assert build.load() is None
    placed()
    assert build.load() is not None


def test_a_cache_that_cannot_be_reached_is_a_reason(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(mode=0o700)
    (root / cache.NATIVE).write_text("no folder")
    assert "cannot be read (Not a directory)" in build.missing()
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(root / ("long" * 100)))
    assert "File name too long" in build.missing()
    assert build.load() is None


def test_why_calls_are_made_in_python_is_said(
    root: Path, loads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.missing() == "it is not built: run `flashgen build-native`"
    assert build.load() is None
    placed().rename(root / cache.NATIVE / "flashgen_native.000.so")
    assert "for another flashgen, torch or Python" in build.missing()
    placed()
    assert build.missing() == ""
    monkeypatch.setenv("FLASHGEN_NATIVE", "0")
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


def test_doctor_says_which_path_calls_take(root: Path, loads: None) -> None:
    assert inspect().native == "it is not built: run `flashgen build-native`"
    file = placed(data=b"a damaged library")
    file.write_bytes(b"cut")
    assert "is damaged" in inspect().native
    placed()
    assert inspect().native == ""
    assert flashgen("cache", "clear").exit_code == 0
    assert list(root.glob("*/*.so")) == []


def test_the_command_builds_nothing_twice(root: Path, loads: None) -> None:
    file = placed()
    result = flashgen("build-native")
    assert result.exit_code == 0, result.output
    assert f"{file} is there already" in result.output.replace("\n", "")
