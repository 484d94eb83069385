"""The forward kernel for Hopper (TMA, wgmma) meets the error rule in the emulator, checkers on.

test_every_spec.py has every spec once in `make test`. Here every spec at every head dim, with
dropout, lengths, heads and the number of blocks in turn, is `slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashgen as fg
from tests.support.examples import SPEC_IDS, SPECS, spec_path
from tests.support.judged import Call, check_gates, example, sized
from tests.support.shapes import Case, in_turn
from tests.support.tiers import one_in, slow

ARCH = "sm_90a"
HEAD_DIMS = (32, 64, 96, 128, 192, 256)


def judged(call: Call, blocks: int | None = None) -> None:
    """By the error rule; the kernel is compiled clean."""
    run = call.judged_forward(blocks=blocks)
    assert run.report.kernel is not None
    assert run.report.kernel.plan.path == ARCH
    check_gates(run.report.kernel)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_every_spec_meets_the_error_rule_at_every_head_dim(path: Path, head_dim: int) -> None:
    turn = SPECS.index(path) + HEAD_DIMS.index(head_dim)
    case, dropout_p = in_turn(SPECS.index(path), turn, head_dim)
    blocks = (None, 4)[turn % 2]
    judged(example(path, case, dropout_p, arch=ARCH), blocks)


CAUSAL = fg.load(spec_path("causal"))


def causal(case: Case) -> Call:
    return Call(sized(CAUSAL, case), case.tensors(seed=1), arch=ARCH)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 128), (128, 8), (24, 72)])
def test_values_may_be_longer_or_shorter_than_keys(head_dim: int, head_dim_v: int) -> None:
    judged(causal(Case(113, 203, 1, 2, 1, "float16", head_dim, head_dim_v)))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [8, 40, 104, 168, 248])
def test_head_dims_that_fill_no_panel_are_padded_by_the_copies(head_dim: int) -> None:
    judged(causal(Case(70, 90, 1, 2, 2, "float16", head_dim, None, "gaps")))


LENGTHS = [((1, 700),), ((1, 1),), ((17, 5),), ((129, 1),), ((64, 128),)]


@pytest.mark.parametrize("lengths", one_in(5, LENGTHS))
def test_lengths_that_fill_no_tile_meet_the_error_rule(lengths: tuple[int, int]) -> None:
    judged(causal(Case(*lengths, 2, 2, 1, "float16", 64)))


@pytest.mark.parametrize("seed", [1, slow(2), slow(3)])
def test_the_bits_do_not_depend_on_the_order_of_warps_and_copies(seed: int) -> None:
    call = causal(Case(200, 500, 1, 2, 2, "float16", 64))
    plain, shuffled = call.forward(), call.forward(order_seed=seed)
    assert torch.equal(plain.out, shuffled.out)
    assert torch.equal(plain.lse, shuffled.lse)


# ---- where TMA cannot be used, the plan or the report says why ----------------------------------


def test_float32_uses_the_sm80_path_and_the_plan_gives_the_reason() -> None:
    plan = fg.plan(CAUSAL.replace(dtype="float32"), ARCH)
    assert plan.path == "sm_80"
    assert "parts of bfloat16" in str(plan)
    assert "sm_80 path" in str(plan)


@pytest.mark.slow
def test_unaligned_operands_use_the_sm80_path() -> None:
    q, k, v = (t[..., 1:65] for t in Case(40, 40, 1, 1, 1, "float16", 72).tensors(seed=1))
    run = Call(CAUSAL, (q, k, v), arch=ARCH).judged_forward()
    assert run.plan.path == "sm_80"
    assert "TMA takes addresses" in str(run.plan)
    assert "past a multiple of 16 B" in run.report.access_reason


@pytest.mark.slow
def test_expanded_operands_use_the_sm80_path() -> None:
    q, k, v = Case(40, 40, 1, 2, 1, "float16", 64).tensors(seed=1)
    k, v = k.expand(1, 2, 40, 64), v.expand(1, 2, 40, 64)
    run = Call(CAUSAL, (q, k, v), arch=ARCH).judged_forward()
    assert run.plan.path == "sm_80"
    assert "the head stride of k is 0" in run.report.access_reason
