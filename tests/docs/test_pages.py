"""README.md and docs/ name what there is: paths, public names, environment variables."""

from __future__ import annotations

import re
from pathlib import Path

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
FOLDERS = "flashgen|templates|tests|docs|specs|generated|benchmarks|examples"


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


def test_every_package_has_a_row_on_the_architecture_page() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    packages = [p.parent for p in (ROOT / "flashgen").glob("*/__init__.py")]
    assert [p.name for p in packages if f"`flashgen/{p.name}/`" not in text] == []


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
