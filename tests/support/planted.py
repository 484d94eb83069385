"""Bugs planted in the text of emitted kernels, as a template could be broken by mistake."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import flashgen as fg
import ptx_emulator as emulator
from flashgen.calls.runtime.bound_kernel import BoundKernel
from flashgen.calls.runtime.merge import Splits
from flashgen.kernels.pipeline import Build
from tests.support.nvrtc_helper import compile_ptx

STEP_LIMIT = 2_000


def with_text(built: Build, old: str, new: str, after: str = "") -> Build:
    """The kernel with the first ``old`` behind the text ``after`` replaced, or the only one.

    It has new PTX for the emulator; the machine code is that of the unchanged kernel.
    """
    source = built.source
    start = source.text.index(after)
    count = source.text.count(old, start)
    if count != 1 and not (
        after and count
    ):  # no AssertionError, which tests take for a wrong result
        raise LookupError(f"{old!r} is in the kernel {count} times")
    text = source.text[:start] + source.text[start:].replace(old, new, 1)
    ptx = compile_ptx(text, built.plan.arch, ("--std=c++17",), source.filename)
    return replace(built, source=replace(source, text=text), binary=replace(built.binary, ptx=ptx))


@contextmanager
def planted(kernel: str, old: str, new: str, after: str = "") -> Iterator[None]:
    """Inside, calls launch kernels of this kind with a changed text, and for few steps only."""
    bound_init = BoundKernel.__init__

    def with_bug(self: BoundKernel, build: Build, *rest: Any) -> None:
        if build.plan.kernel.startswith(kernel):
            build = with_text(build, old, new, after)
        bound_init(self, build, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundKernel, "__init__", with_bug)
        launch = functools.partial(emulator.launch, step_limit=STEP_LIMIT)
        patch.setattr(emulator, "launch", launch)
        yield


@contextmanager
def caught(kind: str) -> Iterator[Any]:
    """Inside, an error whose class or text has this word is raised, and complete."""
    with pytest.raises(fg.EmulatorError) as error:
        yield error
    assert kind in f"{type(error.value).__name__}: {error.value}"
    assert error.value.where
    assert error.value.numbers
    assert error.value.way_out


def nan_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the partial results of split keys are NaN until a kernel writes them."""
    parts = Splits.parts

    def with_nan(*arguments: Any) -> Any:
        made = parts(*arguments)
        for tensor in made:
            tensor.fill_(math.nan)
        return made

    monkeypatch.setattr(Splits, "parts", with_nan)
