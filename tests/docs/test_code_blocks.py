"""Every code block of README.md, CONTRIBUTING.md and docs/ does what its page shows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.tiers import slow


def code_blocks() -> ModuleType:
    path = ROOT / "docs" / "code_blocks.py"
    loader = importlib.util.spec_from_file_location("docs_code_blocks", path)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = module
    loader.loader.exec_module(module)
    return module


MODULE = code_blocks()


# The first two import other libraries, in a process of their own; the last builds many kernels.
LONG = ("docs/transformers.md", "docs/diffusers.md", "docs/decoding.md")
PAGES = [slow(page) if page in LONG else page for page in MODULE.PAGES]


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_of_a_page_does_what_the_page_shows(page: str) -> None:
    made = "flashgen.frontends.transformers.layers" in sys.modules
    if made and "operators()" in (ROOT / page).read_text(encoding="utf-8"):
        # The page lists all operators, and earlier tests of this process have made some.
        run_python(str(ROOT / "docs" / "code_blocks.py"), page)
    else:
        MODULE.check(page)


def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    monkeypatch.setattr(MODULE, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    return "page.md"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nundefined\n```\n", "page.md:2: NameError"),
        ('```python\nprint("a")\n```\n\n```text\nb\n```\n', "page.md:6: the output is now\na"),
        ("```\nprose\n```\n", "no way to check a block of the language ''"),
        ("```sh\nrm -r folder\n```\n", "no way to check the command 'rm -r folder'"),
        ("```c++\nint x;\n```\n", "a c\\+\\+ block follows"),
    ],
)
def test_a_wrong_block_fails_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    page = write(tmp_path, monkeypatch, text)
    with pytest.raises(MODULE.WrongBlock, match=message):
        MODULE.check(page)


def test_update_writes_the_present_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '```python\nprint("a")\n```\n\n```text\nb\n```\n'
    page = write(tmp_path, monkeypatch, text)
    MODULE.check(page, update=True)
    assert (tmp_path / page).read_text() == text.replace("\nb\n", "\na\n")
