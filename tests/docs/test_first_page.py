"""The pictures of docs/index.md: that of a mask, its tiles and its kernel, and where they stand."""

from __future__ import annotations

import re
import runpy
from html import unescape

import pytest

import flashgen as fg
from tests.support.paths import ROOT

MODULE = runpy.run_path(str(ROOT / "docs" / "first_page.py"))
FOLDER = ROOT / "docs" / "pictures"


@pytest.mark.parametrize("name", MODULE["LAYOUTS"])
def test_the_picture_is_that_of_the_present_tiles_and_kernel(name: str) -> None:
    made = MODULE["picture"](MODULE["LAYOUTS"][name])
    assert (FOLDER / name).read_text(encoding="utf-8") == made, "python docs/first_page.py"


def test_every_line_of_code_in_the_picture_is_one_of_the_emitted_file() -> None:
    spec = fg.load(ROOT / MODULE["SPEC"])
    lines = fg.emit(spec, arch=MODULE["ARCH"]).forward.text.splitlines()
    shown = [line for line, _ in MODULE["emitted"](spec)]
    assert len(shown) > 15
    assert {line for line in shown if line.strip("\N{MIDLINE HORIZONTAL ELLIPSIS} ")} <= {*lines}


def test_a_picture_is_wrapped_and_not_cut_off_on_a_phone() -> None:
    layout = MODULE["LAYOUTS"]["kernel_narrow.svg"]
    text = MODULE["picture"](layout)
    code = re.findall(r'class="code">([^<]*)<', text)
    assert max(len(unescape(line)) for line in code) <= layout.columns
    assert len(code) > len(
        re.findall('class="code"', MODULE["picture"](MODULE["LAYOUTS"]["kernel.svg"]))
    )


def test_the_first_page_shows_every_picture_for_wide_and_for_narrow_screens() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    named = re.findall(r'(?:src|srcset)="pictures/([^"]+)"', text)
    assert sorted(named) == sorted(path.name for path in FOLDER.iterdir())
    assert len(re.findall(r'alt="[^"]+"', text)) == 2
