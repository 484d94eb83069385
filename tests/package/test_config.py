"""config: the environment variables, their defaults, and what is said about bad values."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from flashgen.shared import config
from flashgen.shared.errors import FlashgenError


def test_nothing_set_means_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHGEN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert (config.arch(), config.backend(), config.override()) == (None, None, None)
    assert config.debug_level() == 0
    assert config.cache_dir() == tmp_path / ".cache" / "flashgen"


@pytest.mark.parametrize(
    "read", [config.arch, config.backend, config.override, config.debug_level, config.trust]
)
def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch, read: object) -> None:
    assert callable(read)
    name = "FLASHGEN_" + read.__name__.removesuffix("_level").upper()
    before = read()
    monkeypatch.setenv(name, "  ")
    assert read() == before


def test_the_cache_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHGEN_CACHE_DIR")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert config.cache_dir() == tmp_path / "xdg" / "flashgen"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert config.cache_dir() == tmp_path / ".cache" / "flashgen"
    monkeypatch.setattr("sys.platform", "darwin")
    assert config.cache_dir() == tmp_path / "Library" / "Caches" / "flashgen"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert config.cache_dir() == tmp_path / "local" / "flashgen"


def test_the_cache_folder_can_be_chosen_and_switched_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    assert config.cache_dir() == tmp_path
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "OFF")
    assert config.cache_dir() is None


def test_without_a_home_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FLASHGEN_CACHE_DIR")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(FlashgenError) as caught:
        config.cache_dir()
    assert "FLASHGEN_CACHE_DIR" in caught.value.way_out


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("FLASHGEN_ARCH", "hopper", "sm_90a"),
        ("FLASHGEN_ARCH", "90", "sm_90a"),
        ("FLASHGEN_BACKEND", "cpu", "'gpu' or 'emulator' or 'tiled'"),
        ("FLASHGEN_BACKEND", "tiled:3", "'gpu' or 'emulator' or 'tiled'"),
        ("FLASHGEN_BACKEND", "emulator:-1", "'gpu' or 'emulator' or 'tiled'"),
        ("FLASHGEN_EMULATOR_ORDER", "4294967296", "0 to 4294967295"),
        ("FLASHGEN_EMULATOR_ORDER", "first", "0 to 4294967295"),
        ("FLASHGEN_EMULATOR_SUMS", "exact", "'hardware' or 'rounded'"),
        ("FLASHGEN_NATIVE", "off", "0 or 1"),
        ("FLASHGEN_DEBUG", "6", "5 PTX"),
        ("FLASHGEN_DEBUG", "-1", "0 nothing"),
        ("FLASHGEN_DEBUG", "yes", "2 timings"),
        pytest.param("FLASHGEN_DEBUG", "9" * 5000, "2 timings", id="more digits than int() takes"),
        ("FLASHGEN_OVERRIDE", "no/such/file.cu", "existing .cu file"),
        ("FLASHGEN_OVERRIDE", "~nobody-of-this-name/file.cu", "that user has no home folder"),
        ("FLASHGEN_CACHE_DIR", "~nobody-of-this-name", "that user has no home folder"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_expected(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(variable, value)
    name = variable.removeprefix("FLASHGEN_").lower()
    with pytest.raises(FlashgenError, match=variable) as caught:
        getattr(config, name if name != "debug" else "debug_level")()
    assert repr(value) in caught.value.numbers
    assert expected in caught.value.numbers
    assert variable in caught.value.way_out


def test_debug_blocks_nest_and_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHGEN_DEBUG", "1")
    with config.debug(4):
        with config.debug(2):
            assert config.debug_level() == 2
        config.log(4, "the CUDA text")
        config.log(5, "the PTX")
    assert config.debug_level() == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "the CUDA text\n")
    with pytest.raises(FlashgenError, match="no such debug level"), config.debug(9):
        pass


def test_the_table_in_the_docstring_lists_what_is_read() -> None:
    source = Path(config.__file__).read_text()
    read = set(re.findall(r'_(?:read|one_of|switch)\("(FLASHGEN_\w+)"', source))
    documented = set(re.findall(r"^(FLASHGEN_\w+)", config.__doc__ or "", re.MULTILINE))
    assert read == documented


def test_a_child_process_imports_what_this_one_does_and_compiles_no_edited_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHGEN_OVERRIDE", "edited.cu")
    monkeypatch.setattr("sys.path", ["", str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    found = config.child_environment()
    assert found["PYTHONPATH"].split(os.pathsep) == [str(tmp_path)] * 2
    assert "FLASHGEN_OVERRIDE" not in found
    assert found["FLASHGEN_CACHE_DIR"] == os.environ["FLASHGEN_CACHE_DIR"]
