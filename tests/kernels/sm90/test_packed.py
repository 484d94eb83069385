"""Packed sequences on Hopper's path: TMA copies end where a sequence ends; the error rule holds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import flashgen as fg
from flashgen.calls.ops import BackwardRun, ForwardRun
from flashgen.kernels.pipeline import Build, build_backward
from tests.kernels.test_packed import LENGTHS, MODS, RNG, check, spec_of
from tests.support.judged import check_gates

ARCH = "sm_90a"
OTHERS = {"delta", "minmax_table"}
"""The kernels that are the same on every path."""


def check_path(built: Build) -> None:
    assert built.plan.path == ("sm_80" if built.plan.kernel in OTHERS else ARCH)
    check_gates(built)


def judged(spec: fg.AttentionSpec, lengths: str, **options: Any) -> tuple[ForwardRun, BackwardRun]:
    """By the error rule; each kernel that Hopper has of its own is that one, and compiled clean."""
    run, back = check(spec, lengths, "emulator", ARCH, **options)
    for report in (run.report, *back.reports):
        if report.kernel is None:
            continue  # there was nothing to compute
        check_path(report.kernel)
    return run, back


CASES = [
    case
    for i, mods in enumerate(MODS)
    for j, lengths in enumerate(LENGTHS)
    for case in ((mods, lengths, 64), (mods, lengths, (128, 256)[(i + j) % 2]))
]


@pytest.mark.slow
@pytest.mark.parametrize(("mods", "lengths", "head_dim"), CASES)
def test_kernels_meet_the_error_rule(mods: str, lengths: str, head_dim: int) -> None:
    turn = list(MODS).index(mods) + list(LENGTHS).index(lengths)
    dtype = ("float16", "bfloat16")[turn % 2]
    spec = spec_of(mods, head_dim=head_dim, dtype=dtype)
    judged(spec, lengths, deterministic=turn // 2 % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 40), (192, 128)])
def test_dropout_sinks_offsets_and_another_length_of_v_compose(
    head_dim: int, head_dim_v: int, dtype: str
) -> None:
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    spec = spec_of("bottom_right", **dims, dtype=dtype, dropout=True, sink=True)
    judged(spec, "mixed", dropout_p=0.3, rng=RNG, q_offset=32, k_offset=16)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mods", ["full", "bottom_right"])
def test_kernels_pass_the_static_gates(mods: str, head_dim: int) -> None:
    for dtype in ("float16", "bfloat16"):
        spec = spec_of(mods, head_dim=head_dim, dtype=dtype)
        forms = (build_backward(spec, ARCH, deterministic=forced) for forced in (False, True))
        for built in (fg.build(spec, ARCH), *itertools.chain(*forms)):
            check_path(built)
