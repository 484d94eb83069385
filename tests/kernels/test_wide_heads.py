"""Heads of more than 256 dimensions: the tiles that fit meet the error rule on both paths.

O, dQ, or dK and dV have more columns than a wgmma, which takes 256: such products have two parts.
"""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.kernels.planner.models.kernel_model import STEP
from flashgen.shared.paths import PATHS
from tests.support.examples import spec_path
from tests.support.judged import FEW_BYTES, Call, check_gates, example, forward_verdicts
from tests.support.paged_calls import Paged, Sequences
from tests.support.paged_specs import CAUSAL
from tests.support.shapes import Case

DIMS = ((320, 320), (264, 264), (320, 256))
# With every feature between them, and their dropout; grouped heads are those of the cases.
COVERING = {
    "causal": 0.0,
    "sliding_window": 0.0,
    "document": 0.0,
    "softcap": 0.0,
    "relative_bias": 0.0,
    "sink": 0.0,
    "packed_causal": 0.0,
    "full": 0.17,
}


def wide(name: str, turn: int, arch: str, dims: tuple[int, int]) -> Call:
    heads, lengths = ((2, 1), (3, 1), (2, 2))[turn % 3], ((70, 90), (33, 70))[turn // 2 % 2]
    case = Case(*lengths, 1, *heads, ("float16", "bfloat16")[turn % 2], *dims)
    return example(spec_path(name), case, COVERING[name], arch=arch)


def judged(call: Call, *, deterministic: bool = False) -> None:
    """Forward and backward, by the error rule; no kernel spills that could have a smaller tile."""
    forward = call.judged_forward()
    backward = call.judged_backward(forward, deterministic=deterministic)
    for report in (forward.report, *backward.reports):
        if report.kernel is None:
            continue
        if report is forward.report and report.kernel.plan.block_k == STEP:
            assert report.kernel.binary.resources.spill_store_bytes <= FEW_BYTES
        else:
            check_gates(report.kernel)


@pytest.mark.parametrize("arch", PATHS)
def test_an_output_has_more_columns_than_a_product(arch: str) -> None:
    case = Case(33, 40, 1, 1, 1, "bfloat16", 16, 320)
    run = example(spec_path("causal"), case, arch=arch).judged_forward()
    assert run.report.kernel is not None
    check_gates(run.report.kernel)


@pytest.mark.slow
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", COVERING)
def test_covering_specs_meet_the_error_rule(name: str, arch: str, dims: tuple[int, int]) -> None:
    turn = list(COVERING).index(name)
    judged(wide(name, turn, arch, dims), deterministic=bool((turn + DIMS.index(dims)) % 2))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("dims", [(352, 352), (256, 320), (64, 320), (320, 64), (288, 304)])
def test_all_head_dims_that_fit_meet_the_error_rule(arch: str, dims: tuple[int, int]) -> None:
    call = wide("causal", 1, arch, dims)
    judged(call)
    judged(call, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(264, 264), (320, 320)])
def test_float32_meets_the_error_rule(dims: tuple[int, int]) -> None:
    case = Case(40, 50, 1, 2, 1, "float32", *dims)
    judged(example(spec_path("causal"), case, arch="sm_80"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("dims", DIMS)
def test_paged_and_split_calls_meet_the_error_rule(arch: str, dims: tuple[int, int]) -> None:
    spec = CAUSAL.replace(head_dim=dims[0], head_dim_v=dims[1], dtype="bfloat16")
    of = Sequences.of((2, 2), (130, 47), dims=dims, dtype="bfloat16")
    run = Paged(spec, of, 16, how={"arch": arch, "split_size": 64}).judged()
    assert run.report.kernel is not None
    check_gates(run.report.kernel)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("dims", DIMS)
def test_tangents_meet_the_error_rule(arch: str, dims: tuple[int, int]) -> None:
    call = wide("causal", 1, arch, dims)
    if (arch, dims) == ("sm_90a", (320, 320)):
        with pytest.raises(fg.PlanError, match="no tile fits in the registers"):
            call.judged_tangent()
    else:
        call.judged_tangent()


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("head_dim", [512, 576])
def test_wider_values_are_computed_in_parts_of_their_columns(arch: str, head_dim: int) -> None:
    """The way out of the planner's refusal: outputs stand side by side, and gradients add."""
    whole = fg.load(spec_path("causal")).replace(head_dim=head_dim, head_dim_v=512)
    with pytest.raises(fg.PlanError, match=r"v.split\(256, -1\)") as caught:
        fg.plan(whole, arch)
    assert "head_dim_v=256" in caught.value.way_out
    op = fg.attention(whole.replace(head_dim_v=256))
    call = Call(whole, Case(33, 40, 1, 2, 1, "float16", head_dim, 512).tensors(seed=1))
    q, k, v = (x.requires_grad_() for x in call.qkv)
    how = {"backend": "emulator", "arch": arch, "return_lse": True}
    parts = [op(q, k, part, **how) for part in v.split(256, -1)]
    out, lse = torch.cat([part for part, _ in parts], -1), parts[0][1]
    assert torch.equal(lse, parts[1][1])
    found = torch.autograd.grad((out, lse), (q, k, v), call.gradients)
    given = whole, *(x.detach() for x in (q, k, v))
    verdicts = forward_verdicts((out.detach(), lse.detach()), *given)
    verdicts |= reference.judge_gradients(found, *given, *call.gradients)
    assert all(verdicts.values()), verdicts
