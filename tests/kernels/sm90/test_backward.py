"""The backward kernels for Hopper (TMA, wgmma) meet the error rule in the emulator, checkers on.

test_every_spec.py has every spec once in `make test`. Here every spec at every head dim, with
dropout, determinism, lengths and heads in turn, is `slow`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import BackwardRun
from flashgen.kernels.pipeline import build_backward
from flashgen.kernels.planner import Tile, plan_backward
from tests.support.examples import SPEC_IDS, SPECS, spec_path
from tests.support.judged import Call, check_gates, dropping, example, like, plain, sized
from tests.support.shapes import Case, in_turn
from tests.support.tiers import slow

ARCH = "sm_90a"
HEAD_DIMS = (64, 96, 128, 192, 256)
CAUSAL = fg.load(spec_path("causal"))


def judged(call: Call, **how: Any) -> BackwardRun:
    """By the error rule; the kernels are compiled clean."""
    run = call.judged_backward(**how)
    for report in run.reports:
        assert report.kernel is not None
        check_gates(report.kernel)
        kernel, path = report.kernel.plan.kernel, report.kernel.plan.path
        assert path == ("sm_80" if kernel == "minmax_table" else ARCH)
    return run


def causal(case: Case, dropout_p: float = 0.0, **offsets: int) -> Call:
    numbers = dropping(dropout_p) | offsets
    return Call(sized(CAUSAL, case, dropout_p), case.tensors(seed=1), numbers, arch=ARCH)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_every_spec_meets_the_error_rule_at_every_head_dim(path: Path, head_dim: int) -> None:
    turn = SPECS.index(path) + HEAD_DIMS.index(head_dim)
    case, dropout_p = in_turn(SPECS.index(path), turn, head_dim)
    judged(example(path, case, dropout_p, arch=ARCH), deterministic=bool(turn // 2 % 2))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "deterministic"),
    [slow(192, 128, False), slow(64, 192, True), slow(128, 8, False), slow(24, 72, True)],
)
def test_values_may_be_longer_or_shorter_than_keys(
    head_dim: int, head_dim_v: int, deterministic: bool
) -> None:
    case = Case(113, 203, 1, 2, 1, "float16", head_dim, head_dim_v)
    judged(causal(case), deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "deterministic"),
    [(8, False), (40, True), (104, False), (168, True), (248, False)],
)
def test_head_dims_that_fill_no_panel_are_padded_by_the_copies(
    head_dim: int, deterministic: bool
) -> None:
    case = Case(70, 90, 1, 2, 2, "float16", head_dim, None, "gaps")
    judged(causal(case), deterministic=deterministic)


@pytest.mark.parametrize(
    "lengths", [slow(each) for each in [(1, 300), (17, 5), (1, 1), (64, 128), (300, 1)]]
)
def test_lengths_that_fill_no_tile_meet_the_error_rule(lengths: tuple[int, int]) -> None:
    judged(causal(Case(*lengths, 2, 2, 1, "float16", 64), 0.1))


@pytest.mark.parametrize("offsets", [slow((90, 0)), slow((0, 57)), slow((-40, -60))])
def test_offsets_shift_the_positions_that_masks_see(offsets: tuple[int, int]) -> None:
    q_offset, k_offset = offsets
    judged(causal(Case(113, 103), q_offset=q_offset, k_offset=k_offset))


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_that_end_far_from_the_tile_are_masked_whole(deterministic: bool) -> None:
    """16 times such an end does not fit in an int."""
    steep = fg.AttentionSpec(lambda b, h, q, k: q >= (k - 60) * 30_000_000, head_dim=64)
    wide = fg.AttentionSpec(lambda b, h, q, k: k >= (q - 60) * 30_000_000, head_dim=64)
    spec = wide if deterministic else steep
    judged(plain(spec, 70, 90, arch=ARCH), deterministic=deterministic)


# ---- tiles -------------------------------------------------------------------------------------

GIVEN = [
    # Both warpgroups own the same keys, where the plan gives each its own; and the other way. Rows
    # of P and dS have panels of 64, 32 and 16 keys; one pass, or several, of which two overlap.
    ("fused", 64, Tile(64, 8, 3, 1, 8, 8)),
    ("fused", 128, Tile(64, 8, 8, 1, 8, 8)),
    ("fused", 128, Tile(48, 8, 1, 1)),
    ("dkdv", 160, Tile(64, 8, 7, 1, 8, 8)),
    ("fused", 192, Tile(64, 8, 8, 1, 8, 8)),
    ("fused", 256, Tile(64, 8, 6, 1, 8, 8)),
    ("fused", 64, Tile(64, 8, 6, 1, 8, 8)),  # dV and dK are computed in one turn
    ("dkdv", 64, Tile(64, 8, 6, 1, 8, 8)),
    ("dkdv", 256, Tile(64, 8, 5, 1, 8, 8)),
    ("dq", 256, Tile(16, 8, 1, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "head_dim", "tile"), GIVEN)
def test_a_given_tile_gives_the_same_gradients(kernel: str, head_dim: int, tile: Tile) -> None:
    call = causal(Case(150, 200, 1, 2, 1, "bfloat16", head_dim))
    run = judged(call, deterministic=kernel != "fused", tiles={kernel: tile})
    (plan,) = (r.kernel.plan for r in run.reports if r.kernel.plan.kernel == kernel)
    assert plan.tile == tile
    assert plan.policy == "given"


def test_a_tile_that_does_not_fit_is_refused_by_the_numbers() -> None:
    with pytest.raises(fg.PlanError) as caught:
        plan_backward(CAUSAL.replace(head_dim=128), ARCH, tiles={"fused": Tile(128, 8, 1, 1)})
    assert "shared memory: " in str(caught.value)
    wide = CAUSAL.replace(head_dim=192, head_dim_v=192)
    with pytest.raises(fg.PlanError) as caught:
        plan_backward(wide, ARCH, tiles={"fused": Tile(16, 8, 1, 1)})
    assert "registers per thread: " in str(caught.value)
    with pytest.raises(fg.PlanError) as caught:
        plan_backward(CAUSAL, ARCH, tiles={"dq": Tile(64, 4, 1, 1)})
    assert "does not support this combination" in str(caught.value)


@pytest.mark.parametrize(("head_dim", "published"), [(64, 474), (128, 561)])
def test_the_plan_predicts_the_utilisation_of_the_tensor_cores(
    head_dim: int, published: int
) -> None:
    """Nearly that of FlashAttention-3: its TFLOP/s on H100 include two more kernels."""
    plan = plan_backward(CAUSAL.replace(head_dim=head_dim), ARCH).kernel("fused")
    tensor, busy = plan.quantities["tensor"], plan.quantities["busy"]
    assert busy == pytest.approx(tensor / plan.cost)
    assert "busy = tensor/cost" in str(plan)
    assert published / 989 < busy < 1.2 * published / 989


# ---- order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [slow(1), slow(2)])
def test_deterministic_gradients_do_not_depend_on_the_order_of_warps_and_copies(seed: int) -> None:
    call = causal(Case(150, 200, 1, 2, 1, "float16", 64), 0.1)
    usual = judged(call, deterministic=True)
    shuffled = call.backward(deterministic=True, order_seed=seed)
    assert torch.equal(usual.dq, shuffled.dq)
    assert torch.equal(usual.dk, shuffled.dk)
    assert torch.equal(usual.dv, shuffled.dv)


@pytest.mark.parametrize(("head_dim", "seed"), [slow(128, 1), slow(192, 2)])
def test_fused_gradients_except_dq_do_not_depend_on_the_order(head_dim: int, seed: int) -> None:
    call = causal(Case(200, 300, 1, 2, 1, "float16", head_dim))
    usual, shuffled = judged(call), judged(call, order_seed=seed)
    assert torch.equal(usual.dk, shuffled.dk)
    assert torch.equal(usual.dv, shuffled.dv)


# ---- where TMA cannot be used, the plan or the report says why ----------------------------------


def test_float32_uses_the_sm80_path_and_the_plan_gives_the_reason() -> None:
    spec = fg.load(spec_path("dense_bias")).replace(dtype="float32")
    chosen = plan_backward(spec, ARCH)
    assert {plan.path for plan in chosen.kernels} == {"sm_80"}
    for plan in (chosen.key_plan, chosen.kernel("captured")):
        assert "parts of bfloat16" in plan.explain()
        assert "sm_80 path" in str(plan)


@pytest.mark.slow
def test_unaligned_operands_are_copied_first() -> None:
    q, k, v = (t[..., 1:65] for t in Case(40, 40, 1, 1, 1, "float16", 72).tensors(seed=1))
    run = Call(CAUSAL, (q, k, v), arch=ARCH).judged_backward()
    assert run.reports[1].kernel.plan.path == ARCH
    assert any("q was copied" in text for text in run.copies)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["k", "dout"])
def test_expanded_operands_use_the_sm80_path(which: str) -> None:
    q, k, v = Case(40, 40, 1, 2, 2, "float16", 64).tensors(seed=1)
    if which == "k":
        k = k[:, :1].expand(1, 2, 40, 64)
    call = Call(CAUSAL, (q, k, v), arch=ARCH)
    if which == "dout":
        call.gradients = call.gradients[0][:, :, :1].expand(1, 2, 40, 64), None
    run = call.judged_backward()
    assert {report.kernel.plan.path for report in run.reports} == {"sm_80"}
    assert f"stride of {which} is 0" in run.reports[0].access_reason


@pytest.mark.slow
def test_the_operator_launches_the_same_kernels() -> None:
    qkv = Case(70, 90, 1, 2, 1, "float16", 64).tensors(seed=1)
    given = tuple(tensor.clone().requires_grad_() for tensor in qkv)
    op = fg.attention(CAUSAL)
    out = op(*given, backend="emulator", arch=ARCH)
    dout = like(out, 1)
    out.backward(dout)
    launched = [report.kernel.plan for report in op.backward_reports]
    assert [(plan.kernel, plan.path) for plan in launched] == [
        ("delta", ARCH),
        ("fused", ARCH),
        ("convert_dq", ARCH),
    ]
    found = tuple(tensor.grad for tensor in given)
    verdicts = reference.judge_gradients(found, CAUSAL, *qkv, dout)
    assert all(verdict.ok for verdict in verdicts.values())


# ---- no spills ---------------------------------------------------------------------------------


def check_compiled(path: Path, head_dim: int, *, dropout: bool, again: bool = False) -> None:
    """Nothing spills, and registers are the plan's.

    Args:
        again: it may have chosen a second plan, with spare registers. A model that excluded the
            tiles of which the compiler spills a few bytes would give other specs smaller tiles.
    """
    spec = fg.load(path).replace(
        dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim, dropout=dropout
    )
    for deterministic in (False, True):
        chosen = plan_backward(spec, ARCH, deterministic=deterministic)
        for built in build_backward(spec, ARCH, deterministic=deterministic):
            plan, used = built.plan, built.binary.resources
            if plan.path != ARCH:
                continue
            assert again or plan == chosen.kernel(plan.kernel), "planned with registers to spare"
            assert used.clean
            assert built.binary.warnings == ()
            assert used.max_threads == plan.threads
            if plan.streams:
                continue  # all of its warps have the same registers
            assert f"setmaxnreg.inc.sync.aligned.u32 {plan.registers};" in built.ptx
            assert f"setmaxnreg.dec.sync.aligned.u32 {plan.producer_registers};" in built.ptx


@pytest.mark.parametrize(
    ("name", "head_dim", "dropout"),
    [slow("causal", 128, False), slow("document", 64, False), slow("softcap", 192, True)],
)
def test_planned_tiles_do_not_spill(name: str, head_dim: int, dropout: bool) -> None:
    check_compiled(spec_path(name), head_dim, dropout=dropout, again=dropout)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [32, *HEAD_DIMS])
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_no_planned_tile_spills(path: Path, head_dim: int) -> None:
    """With dropout where the error rule is checked without it: its kernels pass the same gates."""
    dims = (*HEAD_DIMS, 32)
    _, dropout_p = in_turn(0, SPECS.index(path) + dims.index(head_dim), head_dim)
    check_compiled(path, head_dim, dropout=not dropout_p, again=True)
