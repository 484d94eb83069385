"""generated/ is what the specs emit, and its gallery is complete and small enough to review."""

from __future__ import annotations

import functools
import itertools
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flashgen as fg
from flashgen.kernels.codegen import Source
from flashgen.tools.cli import app
from flashgen.tools.cli.emit import kernels_of
from flashgen.tools.cli.generated import ARCHS
from tests.support.examples import SPEC_IDS, SPECS
from tests.support.paths import ROOT
from tests.support.tiers import one_in

GENERATED = ROOT / "generated"
MOST_LINES = 23_500
DECLARED = re.compile(
    r"^(?:constexpr \w+ |struct (?:alignas\(\d+\) )?|DEVICE [\w ]+?[ *&])(\w+)",
    re.M,
)


@functools.cache
def sources(path: Path, arch: str) -> tuple[Source, ...]:
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


@pytest.mark.parametrize("path", one_in(6, SPECS), ids=SPEC_IDS)
def test_a_file_has_the_functions_of_its_spec_and_what_its_kernel_uses(path: Path) -> None:
    golden = (GENERATED / f"specs/{path.stem}.cuh").read_text()
    for source in (*sources(path, "sm_80"), *sources(path, "sm_90a")):
        check_text(source)
        check_declarations(source)
        if not source.plan.streams:
            assert source.spec_section
        for function in source.spec_section:
            assert source.text.count(f"\n{function}\n") == 1, source.filename
            assert golden.count(f"\n{function}\n") == 1, source.filename


def check_declarations(source: Source) -> None:
    """Every field of the parameters and every declaration is used."""
    code = re.sub(r"//.*", "", source.text)
    body = code.partition("struct Params {")[2].partition("};")[2]
    fields = set(re.findall(r"\b(?:p|packed)\.(\w+)", body))
    assert {param.field for param in source.params} <= fields, source.filename
    names, uses = DECLARED.findall(code), Counter(re.findall(r"\w+", code))
    assert len(names) >= 3
    assert [name for name in names if uses[name] < 2] == [], source.filename


@pytest.mark.parametrize("arch", ARCHS)
def test_all_specs_without_a_sink_share_the_delta_kernel(arch: str) -> None:
    """It reads neither mask nor score. `flashgen emit` refuses two texts for one file."""
    names = re.findall(rf"\S*delta\S*_{arch}\.cu", (GENERATED / "DIGESTS").read_text())
    kinds = "fp16", "none_bf16", "sink_fp16", "sum_bf16"
    assert names == [f"delta_{kind}_d64_{arch}.cu" for kind in kinds]
    for path in (path for path in SPECS[::12] if fg.load(path).is_softmax):
        (delta,) = (source for source in sources(path, arch) if source.role == "delta")
        assert delta.filename == names[0]
        words = "full", "sink", "power"  # of comments
        assert not any(name in delta.text for name in SPEC_IDS if name not in words)


@pytest.mark.parametrize("name", one_in(12, SPEC_IDS))
def test_so_is_one_with_dropout_and_unequal_head_dims(name: str) -> None:
    spec = fg.load(ROOT / f"specs/{name}.py")
    spec = spec.replace(dropout=True, head_dim=40, head_dim_v=72)
    for arch in ARCHS:
        for source in kernels_of(spec, arch):
            check_text(source)


@pytest.mark.parametrize("name", ["dense_bias", "relative_bias", "strided"])
def test_no_line_of_a_kernel_is_too_long_whose_tiles_consist_of_boxes(name: str) -> None:
    layout = fg.BlockSparse(block_q=64, block_k=64)
    spec = fg.load(ROOT / f"specs/{name}.py").replace(block_sparse=layout)
    check_text(fg.emit(spec, "sm_90a").forward)


def check_text(source: Source) -> None:
    text, lines = source.text, source.text.splitlines()
    assert text.endswith("}\n")
    assert all(line == line.rstrip() and "\t" not in line for line in lines)
    assert [line for line in lines if len(line) > 100] == [], source.filename
    assert not any(a == b == "" for a, b in itertools.pairwise(lines))
    assert str(ROOT) not in text
    assert not any(mark in text for mark in ("/*%", "/*{", "//%", "//#", "//?", "#if", "#include"))


def test_the_pages_and_pictures_of_variants_are_what_the_specs_say() -> None:
    made = runpy.run_path(str(ROOT / "docs/variants.py"))["documents"]()
    found = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in made}
    assert found == made
    pictures = {f"tile_maps/{path.name}" for path in (ROOT / "docs/tile_maps").iterdir()}
    assert pictures == {name for name in made if name.endswith(".svg")}
    assert sum(map(len, made.values())) < 1_000_000


def test_no_line_of_a_template_is_too_long_to_read() -> None:
    for template in (ROOT / "templates").glob("*/*.j2"):
        long = [line for line in template.read_text().splitlines() if len(line) > 100]
        assert not long, f"{template.name}: {long}"
