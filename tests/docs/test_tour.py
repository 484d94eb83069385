"""examples/tour.ipynb, and the page that the site makes of it."""

from __future__ import annotations

import json
import re
import runpy

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.tiers import every_share

MODULE = runpy.run_path(str(ROOT / "docs" / "tour.py"))
NOTEBOOK = json.loads((ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8"))


@pytest.mark.slow
@every_share  # it prints plans and their numbers
def test_the_notebook_has_the_outputs_of_its_cells() -> None:
    run_python("docs/tour.py", "--check")


def test_another_output_is_shown_as_the_value_of_a_cell_and_as_what_it_prints() -> None:
    text = "print('a')\nclass Red:\n    _repr_svg_ = lambda self: '<svg/>'\nRed()\n"
    printed, shown = MODULE["outputs_of"](text, 1, {})
    assert printed["text"] == ["a\n"]
    assert shown["data"]["image/svg+xml"] == ["<svg/>"]
    assert list(MODULE["outputs_of"]("x = 1\nNone\n", 2, {})) == []


@pytest.mark.parametrize("word", ["write", "look", "read", "check", "train", "export"])
def test_the_tour_has_a_section_for_each_thing_that_it_promises(word: str) -> None:
    text, _ = MODULE["page"](NOTEBOOK)
    assert re.search(rf"^## {word}", text, re.M | re.I)


def test_the_page_has_the_cells_outputs_and_pictures_and_no_link_out_of_the_site() -> None:
    text, pictures = MODULE["page"](NOTEBOOK)
    assert re.findall(r"\]\((\w+\.svg)\)", text) == [*pictures]
    assert all(picture.startswith("<svg") for picture in pictures.values())
    assert "](../" not in text
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            assert "".join(cell["source"]) in text
