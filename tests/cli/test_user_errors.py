"""Random mistakes of users end in an error of flashgen or a TypeError of Python, never in a crash.

The fuzzers stop where work would begin that needs a compiler: mistakes are found before that.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import flashgen as fg
from flashgen.shared.errors import FlashgenError, InputError
from tests.support.commands import flashgen
from tests.support.wrong_calls import (
    CHANGES,
    COMMAND_LINES,
    HEAD_DIM,
    PUBLIC_CALLS,
    changed_call,
    right_call,
    spec_files,
)

QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def operator():
    bias = fg.Tensor("bias", ("heads",), "float32", grad=True)
    ids = fg.Tensor("ids", ("batch", "seq_k"), "int32")
    window, slope = fg.Scalar("window", "int32", minimum=1), fg.Scalar("slope", "float32")
    on = fg.Scalar("on", "bool")
    return fg.attention(
        fg.AttentionSpec(
            lambda b, h, q, k: (q - k < window) & on & (ids[b, k] >= 0),
            lambda s, b, h, q, k: s + bias[h] + slope * (k - q),
            head_dim=HEAD_DIM,
            dtype="float32",
            dropout=True,
        )
    )


OP = operator()


def call(changes: list[tuple[str, str, Any]]) -> None:
    arguments = changed_call(changes)
    with suppress(FlashgenError, TypeError):
        OP(**arguments)


def call_public(name: str, arguments: dict[str, Any]) -> None:
    with suppress(FlashgenError, TypeError):
        getattr(fg, name)(**arguments)


def load(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "variant.py"
        file.write_bytes(text)
        with suppress(FlashgenError):
            assert isinstance(fg.load(file), fg.AttentionSpec)


@pytest.fixture
def without_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands that stop where they would build kernels, and write nothing outside of a folder."""

    def enough(*args: Any, **options: Any) -> None:
        raise InputError("enough", where="here", numbers="none", way_out="none")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("run.emulated", "profiled.emulated", "tune.known_call", "inspect._kernel"):
        monkeypatch.setattr(f"flashgen.tools.cli.{name}", enough)
    monkeypatch.setattr("flashgen.tools.cli.emit._sources", enough)
    monkeypatch.setattr("flashgen.tools.cli.plan.plan_forward", enough)
    monkeypatch.setattr("flashgen.tools.cli.plan.plan_backward", enough)
    monkeypatch.setattr("flashgen.tools.doctor.diagnosis.diagnose", enough)


def run(line: list[str]) -> None:
    result = flashgen(*line)
    shown = f"{line}\n{result.output}"
    assert result.exit_code in (0, 2), shown
    assert "Traceback" not in result.output, shown
    assert "flashgen has a bug" not in result.output, shown


def test_the_call_that_is_changed_is_right():
    assert OP(**right_call()).shape == (2, 4, 5, HEAD_DIM)


@settings(max_examples=50, suppress_health_check=QUIET)
@given(CHANGES)
def test_wrong_arguments_end_in_an_error(changes):
    call(changes)


@settings(max_examples=50, suppress_health_check=QUIET)
@given(PUBLIC_CALLS)
def test_wrong_arguments_of_public_functions_end_in_an_error(named):
    call_public(*named)


@settings(max_examples=50, suppress_health_check=QUIET)
@given(spec_files())
def test_wrong_spec_files_end_in_an_error(text):
    load(text)


@settings(max_examples=60, suppress_health_check=QUIET)
@given(COMMAND_LINES)
def test_wrong_command_lines_end_in_an_error(without_work, line):
    run(line)


@pytest.mark.slow
@settings(max_examples=2500, suppress_health_check=QUIET)
@given(CHANGES)
def test_many_wrong_arguments_end_in_an_error(changes):
    call(changes)


@pytest.mark.slow
@settings(max_examples=3000, suppress_health_check=QUIET)
@given(PUBLIC_CALLS)
def test_many_wrong_arguments_of_public_functions_end_in_an_error(named):
    call_public(*named)


@pytest.mark.slow
@settings(max_examples=3000, suppress_health_check=QUIET)
@given(spec_files())
def test_many_wrong_spec_files_end_in_an_error(text):
    load(text)


@pytest.mark.slow
@settings(max_examples=1500, suppress_health_check=QUIET)
@given(COMMAND_LINES)
def test_many_wrong_command_lines_end_in_an_error(without_work, line):
    run(line)
