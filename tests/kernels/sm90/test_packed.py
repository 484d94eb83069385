"""Packed sequences on Hopper's path: TMA copies end where a sequence ends; the error rule holds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import BackwardRun, ForwardRun
from flashgen.kernels.pipeline import Build, build_backward
from tests.kernels.test_packed import LENGTHS, MODS, RNG, check, spec_of
from tests.support.judged import check_gates
from tests.support.shapes import Case
from tests.support.tiers import slow

ARCH = "sm_90a"


def check_path(built: Build) -> None:
    assert built.plan.path == ("sm_80" if built.plan.kernel == "minmax_table" else ARCH)
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


@pytest.mark.parametrize("deterministic", [False, slow(True)])
def test_blocks_without_work_wait_for_the_launch_before_them(deterministic: bool) -> None:
    """With no keys or queries in any sequence every block of a kernel leaves at once."""
    op = fg.attention(fg.AttentionSpec(head_dim=64, dtype="float16", packed=True, name="full"))
    qkv = [x.requires_grad_() for x in Case(40, 40, 1, 2, 2, "float16", 64).tensors(seed=1)]
    ends, none = torch.tensor([0, 20, 40], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    how = {"backend": "emulator", "arch": ARCH}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        for of_q, of_k in ((ends, none), (none, ends)):
            out = op(*qkv, cu_seqlens_q=of_q, cu_seqlens_k=of_k, **how)
            for gradient in torch.autograd.grad(out, qkv, torch.ones_like(out)):
                assert not gradient.any()
    finally:
        torch.use_deterministic_algorithms(before)
