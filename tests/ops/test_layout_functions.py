"""Functions of a block layout: the values that they read are those of the time when it was made."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen.shared.errors import SpecError

Tensor = torch.Tensor

WIDTH = 1


class Band:
    wide = 1

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, i: int, j: int) -> bool:
        return abs(i - j) <= self.width


def near(i: int, j: int) -> bool:
    return abs(i - j) <= WIDTH


def bands() -> dict[str, tuple[object, object]]:
    """A layout of the blocks near the diagonal, and what would make it another one."""
    box, band, cell = [1], Band(1), 1
    options = types.SimpleNamespace(inner={"width": [1]})

    def change_cell() -> None:
        nonlocal cell
        cell = 5

    def of_cell(i: int, j: int) -> bool:
        return abs(i - j) <= cell

    def of_default(i: int, j: int, width: int = 1) -> bool:
        return abs(i - j) <= width

    def of_attribute(i: int, j: int) -> bool:
        return abs(i - j) <= of_attribute.width

    of_attribute.width = 1
    array = np.ones(1, dtype=int)
    return {
        "cell": (of_cell, change_cell),
        "global": (near, lambda: globals().update(WIDTH=5)),
        "helper": (lambda i, j: near(i, j), lambda: globals().update(WIDTH=5)),
        "list": (lambda i, j: abs(i - j) <= box[0], lambda: box.__setitem__(0, 5)),
        "default": (of_default, lambda: setattr(of_default, "__defaults__", (5,))),
        "function attribute": (of_attribute, lambda: setattr(of_attribute, "width", 5)),
        "object": (
            lambda i, j: abs(i - j) <= options.inner["width"][0],
            lambda: options.inner["width"].__setitem__(0, 5),
        ),
        "callable": (band, lambda: setattr(band, "width", 5)),
        "method": (band.__call__, lambda: setattr(band, "width", 5)),
        "partial": (
            functools.partial(lambda box, i, j: abs(i - j) <= box[0], box),
            lambda: box.__setitem__(0, 5),
        ),
        "cached": (
            functools.lru_cache(lambda i, j: abs(i - j) <= box[0]),
            lambda: box.__setitem__(0, 5),
        ),
        "array": (lambda i, j: bool(abs(i - j) <= array[0]), lambda: array.fill(5)),
        "globals()": (
            lambda i, j: abs(i - j) <= globals()["WIDTH"],
            lambda: globals().update(WIDTH=5),
        ),
    }


@pytest.mark.parametrize("name", bands())
def test_a_layout_keeps_the_values_of_the_time_when_it_was_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "WIDTH", 1)
    layout, change = bands()[name]
    made = fg.BlockSparse(layout, 16, 16)
    wanted = fg.BlockSparse(lambda i, j: abs(i - j) <= 1, 16, 16)
    first = made.table(1, 1, 3, 3)
    change()
    assert layout(0, 4) or name == "cached"
    for size in (3, 4, 7):
        assert made.table(1, 1, size, size) == wanted.table(1, 1, size, size)
    assert first == made.table(1, 1, 3, 3)
    later = fg.BlockSparse(layout, 16, 16)
    assert later != made
    assert (later.table(1, 1, 7, 7) != made.table(1, 1, 7, 7)) or name == "cached"
    again = pickle.loads(pickle.dumps(made))
    assert again.table(1, 1, 7, 7) == wanted.table(1, 1, 7, 7)


def test_layouts_of_a_loop_have_values_of_their_own() -> None:
    made = []
    for w in (0, 1, 2):
        made.append(fg.BlockSparse(lambda i, j: abs(i - j) <= w, 16, 16))  # noqa: B023
    assert [sum(each.table(1, 1, 4, 4)) for each in made] == [4, 10, 14]
    assert len(set(made)) == 3


def test_a_class_that_a_layout_reads_may_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fg.BlockSparse(lambda i, j: abs(i - j) <= Band.wide, 16, 16)
    assert sum(made.table(1, 1, 4, 4)) == 10
    monkeypatch.setattr(Band, "wide", 2)
    assert sum(made.table(1, 1, 4, 4)) == 10
    with pytest.raises(SpecError, match="has changed since the spec was made"):
        made.table(1, 1, 5, 5)


def given_a_width(layout: Callable[..., bool]) -> Callable[[int, int], bool]:
    @functools.wraps(layout)
    def near(i: int, j: int) -> bool:
        return layout(i, j, 1)

    return near


def passed_on(layout: Callable[..., bool]) -> Callable[..., bool]:
    return functools.wraps(layout)(lambda *place: layout(*place))


def test_decorators_of_a_layout_may_give_it_arguments() -> None:
    @given_a_width
    def near(i: int, j: int, width: int) -> bool:
        return abs(i - j) <= width

    @functools.lru_cache
    @passed_on
    def by_head(b: int, h: int, i: int, j: int) -> bool:
        return abs(i - j) <= h

    assert sum(fg.BlockSparse(near, 16, 16).table(1, 1, 4, 4)) == 10
    assert sum(fg.BlockSparse(by_head, 16, 16).table(1, 2, 4, 4)) == 14


class OfAClass:
    width = 1

    @classmethod
    def layout(cls, i: int, j: int) -> bool:
        return abs(i - j) <= cls.width


def of_the_environment(i: int, j: int) -> bool:
    return abs(i - j) <= int(os.environ["FLASHGEN_TEST_WIDTH"])


def of_an_import(i: int, j: int) -> bool:
    import flashgen_test_widths  # type: ignore[import-not-found]

    return abs(i - j) <= flashgen_test_widths.width


def of_a_file(i: int, j: int) -> bool:
    return abs(i - j) <= int(Path(os.environ["FLASHGEN_TEST_FILE"]).read_text())


@pytest.mark.parametrize(
    "layout", [OfAClass.layout, of_the_environment, of_an_import, of_a_file, OfAClass().layout]
)
def test_what_a_layout_reads_without_naming_it_may_not_change(
    layout: Callable[[int, int], bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = types.ModuleType("flashgen_test_widths")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("FLASHGEN_TEST_FILE", str(tmp_path / "width"))

    def change(width: int) -> None:
        monkeypatch.setattr(OfAClass, "width", width)
        monkeypatch.setattr(module, "width", width, raising=False)
        monkeypatch.setenv("FLASHGEN_TEST_WIDTH", str(width))
        (tmp_path / "width").write_text(str(width))

    made = []
    for width in (1, 2, 100):
        change(width)
        made.append(fg.BlockSparse(layout, 16, 16))
        assert sum(made[-1].table(1, 1, 4, 4)) == {1: 10, 2: 14, 100: 16}[width]
    for width, each in zip((1, 2), made, strict=False):
        change(width)
        each.table(1, 1, 5, 5)
        change(99)
        with pytest.raises(SpecError, match="has changed since the spec was made"):
            each.table(1, 1, 6, 6)


def test_a_layout_that_reads_what_cannot_be_copied_is_refused() -> None:
    widths = (width for width in (1, 2))
    with pytest.raises(SpecError, match="cannot be copied"):
        fg.BlockSparse(lambda i, j: abs(i - j) <= next(widths), 16, 16)
