"""The static gates of compiled kernels: no spills, no stack, no more resources than planned."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import flashgen as fg
from flashgen.kernels.pipeline import Build, build_backward
from flashgen.shared.arch import known_archs
from flashgen.shared.paths import PATHS
from tests.support.examples import SPEC_IDS, SPECS
from tests.support.judged import check_gates
from tests.support.paths import ROOT
from tests.support.shapes import DTYPES, HEAD_DIMS
from tests.support.tiers import one_in, slow

LEARNED = [
    path
    for path, spec in zip(SPECS, map(fg.load, SPECS), strict=True)
    if any(tensor.grad and tensor is not spec.sink for tensor in spec.tensors)
]
BACKWARD_DIMS = (32, 64, 96, 128, 192, 256)
ARCHS = sorted({*known_archs(), *PATHS}, key=lambda name: (len(name.rstrip("a")), name))


def both_ways(spec: fg.AttentionSpec, arch: str) -> list[Build]:
    """The backward kernels, with sums in a free and in a fixed order."""
    return [
        build
        for deterministic in (False, True)
        for build in build_backward(spec, arch, deterministic=deterministic)
    ]


@pytest.mark.parametrize("name", one_in(36, SPEC_IDS))
def test_a_generated_kernel_passes_the_static_gates(name: str) -> None:
    check_gates(fg.build(fg.load(ROOT / f"specs/{name}.py"), "sm_80"))


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim"),
    one_in(36, itertools.product(["causal", "softcap"], DTYPES, HEAD_DIMS)),
)
def test_kernels_of_every_dtype_and_head_dim_pass_the_static_gates(
    name: str, dtype: str, head_dim: int
) -> None:
    spec = fg.load(ROOT / f"specs/{name}.py").replace(dtype=dtype, head_dim=head_dim)
    check_gates(fg.build(spec, "sm_80"))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", BACKWARD_DIMS)
def test_backward_kernels_of_every_head_dim_pass_the_static_gates(head_dim: int) -> None:
    spec = fg.load(ROOT / "specs/causal.py").replace(head_dim=head_dim)
    for built in both_ways(spec, "sm_80"):
        check_gates(built)


OF_LEARNED = itertools.product([path.stem for path in LEARNED], [16, 128])


@pytest.mark.parametrize(("name", "head_dim"), [slow(*each) for each in OF_LEARNED])
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
    """Each spec has a third of the head dims, with a dtype each, and dropout at every other."""
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
    """Each spec and architecture has a third of the head dims, with a dtype each."""
    first = SPECS.index(path) + ARCHS.index(arch)
    for turn, head_dim in enumerate(HEAD_DIMS[first % 3 :: 3], first):
        dtype = DTYPES[turn % len(DTYPES)]
        check_gates(fg.build(fg.load(path).replace(dtype=dtype, head_dim=head_dim), arch))
