"""README.md and docs/ name what there is: paths, public names, environment variables."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

import flashgen as fg
from benchmarks.suite import status
from benchmarks.suite.records import RESULTS, read
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
NOTHING_RAN = re.compile(
    r"no gpu (has |ever )*(run|ran|executed|launched)|(never|not) (yet )?(been )?(run|ran) on a gpu"
    r"|nothing( of flashgen)? (has been|was) (timed|measured)(?! on several gpus)"
    r"|none (has been|was) (timed|measured)|(emulator|emulated) (alone|only)"
    r"|there is (none|no such record|no record) yet|(once|until|when) (they|it) (are|is) measured"
    r"|has not been (run|timed|measured) (on|by) a gpu|exported kernel has run on a gpu",
    re.IGNORECASE,
)
"""Sentences that no page may have while there are records of GPUs."""
FOLDERS = "flashgen|ptx_emulator|templates|tests|docs|specs|generated|benchmarks|examples"


def test_the_readme_has_at_most_120_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def named_paths(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return sorted(set(re.findall(rf"`((?:{FOLDERS})/[\w./-]*|mkdocs\.yml)`", text)))


@pytest.mark.parametrize("path", named_paths(DOCS / "architecture.md"))
def test_every_path_of_the_architecture_page_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_other_pages_name_paths_that_exist() -> None:
    for page in [p for p in PAGES if p.name != "architecture.md"]:
        missing = [path for path in named_paths(page) if not (ROOT / path).exists()]
        assert missing == [], page.name


def map_of_the_tree() -> dict[str, list[str]]:
    """The folders with bold rows, each with the paths of the rows below it."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = text.partition("## Map of the tree")[2].partition("\n## ")[0].splitlines()
    found: dict[str, list[str]] = {}
    for cells in (row.split(" | ") for row in rows if row.startswith("| ")):
        paths = re.findall(r"`([^`]+)`", cells[0])
        if cells[0].startswith("| **"):
            folder = paths[0] if paths else ""
            found[folder] = []
        elif paths:
            found[folder] += paths
    return found


def test_the_map_of_the_tree_names_what_there_is() -> None:
    found = map_of_the_tree()
    missing = [f + p for f, paths in found.items() for p in paths if not (ROOT / f / p).exists()]
    assert missing == []
    wings = {p.parent.name for p in (ROOT / "flashgen").glob("*/__init__.py")} - {"integrations"}
    assert {f"flashgen/{wing}/" for wing in wings} | {"ptx_emulator/"} == set(found) - {""}
    for folder, paths in found.items():
        there = {path.name for path in (ROOT / folder).glob("*")} if folder else set()
        parts = {name for name in there if (ROOT / folder / name / "__init__.py").exists()}
        if folder.startswith("flashgen/") and folder != "flashgen/reference/":
            parts |= {name for name in there if name.endswith(".py")}
        assert parts - {"__init__.py"} <= {p.strip("/") for p in paths}, folder


def changes_with_a_word() -> list[Any]:
    """Of "To change X, go to Y": the paths and the word of each row that has one."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = text.partition("## To change X")[2].partition("\n## ")[0].splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ")]
    return [
        pytest.param(re.findall(r"`([\w.]+/[\w./]*)`", where), word[0].strip("`"), id=word[0])
        for _, where, *word in cells[1:]
        if word and word[0].startswith("`")
    ]


def test_at_least_ten_changes_have_a_word() -> None:
    assert len(changes_with_a_word()) >= 10


@pytest.mark.parametrize(("paths", "word"), changes_with_a_word())
def test_a_change_names_all_files_that_mention_its_word(paths: list[str], word: str) -> None:
    whole = re.compile(r"(?<!\w)" + re.escape(word) + r"(?!\w)" * word[-1].isalnum())
    mention = {name for name, text in sources().items() if word in text and whole.search(text)}
    assert mention
    assert {name for name in mention if not name.startswith(tuple(paths))} == set()
    full = [path for path in paths if path.endswith((".py", ".j2")) and path not in mention]
    assert full == [], f"{word} is not in them"


@functools.cache
def sources() -> dict[str, str]:
    """The texts of the packages and of the templates of kernels by their paths."""
    folders = ("flashgen", "ptx_emulator", "templates")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.[pj][y2]")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


@pytest.mark.parametrize(
    "sentence",
    [
        "No GPU has executed a kernel yet.",
        "Descriptors follow the PTX manual and have run in the emulator alone.",
        "Plans may change once they are measured.",
        "No exported kernel has run on a GPU yet;",
        "A claim needs a record of a GPU. There is none yet, so no such claim can be made.",
        "There is no such record yet.",
        "A prediction is no measurement: nothing of flashgen was timed.",
        "None was measured by this project.",
    ],
)
def test_a_sentence_that_no_gpu_has_run_is_found(sentence: str) -> None:
    assert NOTHING_RAN.search(sentence)


def test_no_page_says_that_nothing_ran_while_there_are_records() -> None:
    assert read(RESULTS / "measures.csv"), "without records the pages may say so"
    for page in [*PAGES, ROOT / "benchmarks/NOTES.md"]:
        found = NOTHING_RAN.search(" ".join(page.read_text(encoding="utf-8").split()))
        assert found is None, f"{page.name}: {found}"


def claims_of_proof(text: str) -> list[str]:
    """The sentences outside of the written status that call a code path of a GPU proven."""
    outside = re.sub(rf"{re.escape(status.BEGIN)}.*?{re.escape(status.END)}", "", text, flags=re.S)
    sentences = re.split(r"(?<=[.:;])\s+|\n\n|\|", outside)
    gpu = r"\b(A100|H100|H200|B200|RTX|Ampere|Ada|Hopper|Blackwell)\b"
    return [s for s in sentences if re.search(r"\bprove[nsd]?\b", s) and re.search(gpu, s)]


def test_only_the_written_status_says_which_gpus_are_proven() -> None:
    assert claims_of_proof("Both paths are proven on an H100.") != []
    assert claims_of_proof(f"{status.BEGIN}\nproven on an H100.\n{status.END}\n") == []
    for page in [*PAGES, ROOT / "benchmarks/NOTES.md", ROOT / "CHANGELOG.md"]:
        assert claims_of_proof(page.read_text(encoding="utf-8")) == [], page.name


def test_the_api_page_names_everything_public() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    names = [name for name in fg.__all__ if name != "__version__"]
    assert [n for n in names if f"fg.{n}" not in text and f"::: flashgen.{n}\n" not in text] == []


def test_the_api_page_names_every_environment_variable() -> None:
    config = (ROOT / "flashgen/shared/config.py").read_text(encoding="utf-8")
    variables = set(re.findall(r"FLASHGEN_[A-Z_]+", config))
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert [name for name in sorted(variables) if f"`{name}`" not in text] == []


def test_every_make_target_that_a_page_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in set(re.findall(r"`make (\w+)", page.read_text(encoding="utf-8"))):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"


def test_every_link_of_the_readme_and_of_contributing_leads_to_a_file() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / link).is_file(), f"{page}: {link}"
