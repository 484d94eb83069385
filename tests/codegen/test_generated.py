"""generated/ is what the specs emit, and its gallery is complete and small enough to review."""

from __future__ import annotations

import functools
import itertools
import re
import runpy
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flashgen as fg
from flashgen.cli import app
from flashgen.cli.emit import kernels_of
from flashgen.cli.generated import ARCHS
from flashgen.codegen import Source
from tests.support.paths import ROOT
from tests.support.tiers import one_in

GENERATED = ROOT / "generated"
SPECS = sorted((ROOT / "specs").glob("*.py"))
SPEC_IDS = [path.stem for path in SPECS]
MOST_LINES = 25_000


@functools.cache
def sources(path: Path, arch: str = "sm_80") -> tuple[Source, ...]:
    return tuple(kernels_of(fg.load(path), arch))


def test_the_folder_is_what_the_specs_emit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["emit", "--check"])
    assert result.exit_code == 0, result.output
    assert "files in generated/ as they would be emitted" in result.stdout


def test_the_folder_is_small_enough_to_review() -> None:
    files = [path for path in GENERATED.rglob("*") if path.is_file()]
    assert sum(len(path.read_text().splitlines()) for path in files) <= MOST_LINES


def test_the_gallery_has_every_kernel_of_causal_and_is_explained() -> None:
    causal = {each.filename for arch in ARCHS for each in sources(ROOT / "specs/causal.py", arch)}
    gallery = {path.name for path in (GENERATED / "gallery").iterdir()}
    assert causal <= gallery
    rows = re.findall(
        r"^\| \[(\S+)\]\(gallery/(\S+)\) \| (.+) \|$",
        (GENERATED / "README.md").read_text(),
        re.MULTILINE,
    )
    assert all(text == link and why.strip() for text, link, why in rows)
    assert sorted(link for _, link, _ in rows) == sorted(gallery)


@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_the_functions_of_a_spec_stand_in_the_file_and_in_its_golden(path: Path) -> None:
    golden = (GENERATED / f"specs/{path.stem}.cuh").read_text()
    for source in (*sources(path), *sources(path, "sm_90a")):
        if source.role not in ("delta", "minmax_table"):
            assert source.spec_section
        for function in source.spec_section:
            assert source.text.count(f"\n{function}\n") == 1, source.filename
            assert golden.count(f"\n{function}\n") == 1, source.filename


@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_an_emitted_file_is_clean_text(path: Path) -> None:
    check_text((*sources(path), *sources(path, "sm_90a")))


@pytest.mark.parametrize("name", one_in(6, SPEC_IDS))
def test_so_is_one_with_dropout_and_unequal_head_dims(name: str) -> None:
    spec = fg.load(ROOT / f"specs/{name}.py")
    spec = spec.replace(dropout=True, head_dim=40, head_dim_v=72)
    check_text(source for arch in ARCHS for source in kernels_of(spec, arch))


def check_text(sources: Iterable[Source]) -> None:
    for source in sources:
        text, lines = source.text, source.text.splitlines()
        assert text.endswith("}\n")
        assert all(line == line.rstrip() and "\t" not in line for line in lines)
        assert [line for line in lines if len(line) > 100] == [], source.filename
        assert not any(a == b == "" for a, b in itertools.pairwise(lines))
        assert str(ROOT) not in text
        assert not any(mark in text for mark in ("/*%", "/*{", "//%", "//#", "#if", "#include"))


def test_the_document_of_variants_is_what_the_specs_say() -> None:
    script = runpy.run_path(str(ROOT / "docs/variants.py"))
    assert (ROOT / "docs/variants.md").read_text() == script["document"]()


def test_no_line_of_a_template_is_too_long_to_read() -> None:
    for template in (ROOT / "templates").glob("*/*.j2"):
        long = [line for line in template.read_text().splitlines() if len(line) > 100]
        assert not long, f"{template.name}: {long}"
