"""The committed CUDA files are what the specs emit, and pass the gates that need no GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from shapes import DTYPES, HEAD_DIMS

import flashgen as fg
from flashgen.pipeline import Build

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "generated"
SPECS = sorted((ROOT / "specs").glob("*.py"))
SPEC_IDS = [path.stem for path in SPECS]


def check_gates(built: Build) -> None:
    """No spills, no stack, no warning; registers and shared memory within the plan."""
    resources, plan = built.binary.resources, built.plan
    assert built.binary.warnings == ()
    assert resources.spill_store_bytes == resources.spill_load_bytes == 0
    assert resources.stack_bytes == 0
    assert resources.registers <= plan.registers
    assert resources.static_smem_bytes == 0, "all shared memory is the plan's dynamic part"


@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_a_generated_file_is_what_its_spec_emits(path: Path) -> None:
    source = fg.emit(fg.load(path), arch="sm_80").forward
    committed = GENERATED / source.filename
    assert committed.is_file(), f"missing; flashgen emit specs/{path.name} --arch sm_80"
    assert committed.read_bytes() == source.text.encode()


def test_every_generated_file_belongs_to_a_spec() -> None:
    emitted = {fg.emit(fg.load(path), arch="sm_80").forward.filename for path in SPECS}
    assert {path.name for path in GENERATED.glob("*.cu")} == emitted


@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_an_emitted_file_is_clean_text(path: Path) -> None:
    text = fg.emit(fg.load(path), arch="sm_80").forward.text
    lines = text.splitlines()
    assert text.endswith("}\n")
    assert all(line == line.rstrip() and "\t" not in line for line in lines)
    assert all(len(line) <= 100 for line in lines)
    assert not any(a == b == "" for a, b in itertools.pairwise(lines))
    assert str(ROOT) not in text
    assert not any(mark in text for mark in ("/*%", "/*{", "//%", "//#", "#if", "#include"))


def test_no_line_of_a_template_is_too_long_to_read() -> None:
    for template in (ROOT / "templates").iterdir():
        long = [line for line in template.read_text().splitlines() if len(line) > 100]
        assert not long, f"{template.name}: {long}"


@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_a_generated_kernel_passes_the_static_gates(path: Path) -> None:
    check_gates(fg.build(fg.load(path), "sm_80"))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal", "softcap"])
def test_kernels_of_every_dtype_and_head_dim_pass_the_static_gates(
    name: str, dtype: str, head_dim: int
) -> None:
    spec = fg.load(ROOT / f"specs/{name}.py").replace(dtype=dtype, head_dim=head_dim)
    check_gates(fg.build(spec, "sm_80"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_kernels_of_every_architecture_pass_the_static_gates(
    path: Path, dtype: str, arch: str
) -> None:
    for head_dim in HEAD_DIMS:
        check_gates(fg.build(fg.load(path).replace(dtype=dtype, head_dim=head_dim), arch))
