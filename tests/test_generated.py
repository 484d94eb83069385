"""The committed CUDA files are what the specs emit, and pass the gates that need no GPU."""

from __future__ import annotations

import functools
import itertools
import re
import runpy
from pathlib import Path

import pytest
from shapes import DTYPES, HEAD_DIMS
from tiers import one_in

import flashgen as fg
from flashgen.analysis import analyse
from flashgen.cli.emit import kernels_of
from flashgen.pipeline import Build, build_backward
from flashgen.render import Source

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "generated"
SPECS = sorted((ROOT / "specs").glob("*.py"))
SPEC_IDS = [path.stem for path in SPECS]
LEARNED = [path for path in SPECS if analyse(fg.load(path)).score.learned]
BACKWARD_DIMS = (32, 64, 96, 128, 192, 256)
GENERATED_FOR = ("sm_80", "sm_90a")
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")


@functools.cache
def sources(path: Path, arch: str = "sm_80") -> tuple[Source, ...]:
    return tuple(kernels_of(fg.load(path), arch))


def both_ways(spec: fg.AttentionSpec, arch: str) -> list[Build]:
    """The backward kernels, free and deterministic."""
    return [
        build
        for deterministic in (False, True)
        for build in build_backward(spec, arch, deterministic=deterministic)
    ]


def check_gates(built: Build) -> None:
    """No spills, no stack, no warning; registers and shared memory within the plan."""
    resources, plan = built.binary.resources, built.plan
    assert built.binary.warnings == ()
    assert resources.spill_store_bytes == resources.spill_load_bytes == 0
    assert resources.stack_bytes == 0
    assert resources.registers <= plan.registers
    assert resources.static_smem_bytes == 0, "all shared memory is the plan's dynamic part"


@pytest.mark.parametrize("arch", GENERATED_FOR)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_a_generated_file_is_what_its_spec_emits(path: Path, arch: str) -> None:
    for source in sources(path, arch):
        committed = GENERATED / source.filename
        assert committed.is_file(), f"missing; flashgen emit specs/{path.name} --arch {arch}"
        assert committed.read_bytes() == source.text.encode(), source.filename


def test_every_generated_file_belongs_to_a_spec() -> None:
    every = itertools.product(SPECS, GENERATED_FOR)
    emitted = {source.filename for path, arch in every for source in sources(path, arch)}
    assert {path.name for path in GENERATED.glob("*.cu")} == emitted


@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_an_emitted_file_is_clean_text(path: Path) -> None:
    spec = fg.load(path)
    dropping = spec.replace(dropout=True, head_dim=40, head_dim_v=72)
    odd = [source for arch in GENERATED_FOR for source in kernels_of(dropping, arch)]
    for source in (*sources(path), *sources(path, "sm_90a"), *odd):
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
    for template in (ROOT / "templates").iterdir():
        long = [line for line in template.read_text().splitlines() if len(line) > 100]
        assert not long, f"{template.name}: {long}"


@pytest.mark.parametrize("name", one_in(2, SPEC_IDS))
def test_a_generated_kernel_passes_the_static_gates(name: str) -> None:
    check_gates(fg.build(fg.load(ROOT / f"specs/{name}.py"), "sm_80"))


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim"),
    one_in(5, itertools.product(["causal", "softcap"], DTYPES, HEAD_DIMS)),
)
def test_kernels_of_every_dtype_and_head_dim_pass_the_static_gates(
    name: str, dtype: str, head_dim: int
) -> None:
    spec = fg.load(ROOT / f"specs/{name}.py").replace(dtype=dtype, head_dim=head_dim)
    check_gates(fg.build(spec, "sm_80"))


@pytest.mark.parametrize("head_dim", one_in(2, BACKWARD_DIMS))
def test_backward_kernels_of_every_head_dim_pass_the_static_gates(head_dim: int) -> None:
    spec = fg.load(ROOT / "specs/causal.py").replace(head_dim=head_dim)
    for built in both_ways(spec, "sm_80"):
        check_gates(built)


OF_LEARNED = itertools.product([path.stem for path in LEARNED], [64, 128])


@pytest.mark.parametrize(("name", "head_dim"), one_in(3, OF_LEARNED))
def test_kernels_of_exact_sums_pass_the_static_gates(name: str, head_dim: int) -> None:
    spec = fg.load(ROOT / f"specs/{name}.py").replace(head_dim=head_dim)
    (*_, exact) = build_backward(spec, deterministic=True)
    assert exact.source.role == "captured_exact"
    check_gates(exact)
    assert ".add.u64" in exact.ptx
    assert not re.search(r"(atom|red)\S*\.f32", exact.ptx)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_90a"])
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_backward_kernels_of_every_spec_pass_the_static_gates(path: Path, arch: str) -> None:
    """Head dims, dtypes and dropout take turns."""
    first = SPECS.index(path)
    for turn, head_dim in enumerate(BACKWARD_DIMS[(first + ARCHS.index(arch)) % 3 :: 3], first):
        dtype, dropout = DTYPES[turn % len(DTYPES)], bool(turn % 2)
        spec = fg.load(path).replace(dtype=dtype, head_dim=head_dim, dropout=dropout)
        for built in (fg.build(spec, arch), *both_ways(spec, arch)):
            check_gates(built)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_kernels_of_every_architecture_pass_the_static_gates(path: Path, arch: str) -> None:
    """Head dims and dtypes take turns."""
    first = SPECS.index(path) + ARCHS.index(arch)
    for turn, head_dim in enumerate(HEAD_DIMS[first % 3 :: 3], first):
        dtype = DTYPES[turn % len(DTYPES)]
        check_gates(fg.build(fg.load(path).replace(dtype=dtype, head_dim=head_dim), arch))
