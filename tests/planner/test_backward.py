"""Backward plans: feasible everywhere, laid out as kernels read them, the cheaper scheme chosen."""

from __future__ import annotations

import pickle

import pytest

import flashgen as fg
from flashgen.kernels.planner import BackwardPlanRequest, plan_backward, plan_schemes
from tests.support.plan_problems import (
    DTYPES,
    backward_of,
    every_backward,
    spec_of,
    within_limits,
)

SCHEMES = {"fused": ("delta", "fused", "convert_dq"), "split": ("delta", "dkdv", "dq")}
# Tiles in shared memory, in order: each is a name, then rows and columns as in the kernels.
KEYS = ("k", "v", "q", "do", "rows", "p", "ds")
QUERIES = ("q", "do", "k", "v")


def tiles_of(plan):
    """Bytes of every tile in shared memory that a kernel has, by the name of its offset."""
    e, scores = plan.itemsize, plan.block_q * plan.block_k * plan.itemsize
    q, k = plan.block_q * plan.head_dim * e, plan.block_k * plan.head_dim * e
    do, v = plan.block_q * plan.head_dim_v * e, plan.block_k * plan.head_dim_v * e
    if plan.kernel == "dq":
        return {"q": q, "do": do, "k": 2 * k, "v": v}
    found = {"k": k, "v": v, "q": 2 * q, "do": do}
    found["rows"] = 2 * 8 * plan.block_q
    if plan.score_warps > 1:
        found["p"] = scores
    if plan.score_warps > 1 or plan.kernel == "fused":
        found["ds"] = scores
    return found


def searched(backward):
    """The kernels of a backward plan that have a tile to choose."""
    return [kernel for kernel in backward.kernels if not kernel.streams]


@pytest.mark.slow
def test_every_head_dim_dtype_and_architecture_has_backward_kernels_within_its_limits():
    kernels = []
    for backward in every_backward(step=8):
        assert tuple(each.kernel for each in backward.kernels) == SCHEMES[backward.scheme]
        kernels += backward.kernels
    assert len(kernels) >= 720
    for each in kernels:
        within_limits(each)


@pytest.mark.slow
def test_dropout_score_and_mask_leave_a_plan_for_the_largest_heads():
    spec = fg.load("specs/softcap.py").replace(dropout=True)
    dilated = fg.load("specs/dilated_window.py").mask_mod
    for dtype in DTYPES:
        for head_dim, head_dim_v in ((256, 256), (256, 8), (8, 256), (248, 256)):
            heavy = spec.replace(
                dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, mask_mod=dilated
            )
            for arch in ("sm_80", "sm_86", "sm_120"):
                assert plan_backward(heavy, arch, deterministic=True).scheme == "split"


def test_tiles_are_what_warps_and_row_groups_make():
    for backward in every_backward(step=80):
        for each in searched(backward):
            owned, walked = each.block_q, each.block_k
            if each.owns_keys:
                owned, walked = walked, owned
            assert owned == 16 * each.row_groups * each.warps // each.column_warps
            assert each.row_groups in (1, 2)
            assert each.warps % each.column_warps == 0
            assert walked % (16 * each.score_warps) == 0
            assert walked <= 128
            assert each.score_warps in (1, each.column_warps)
            if each.kernel == "fused":
                assert each.score_warps == each.column_warps
                assert each.warps % each.dq_row_warps == 0
                assert each.block_q // 16 % each.dq_row_warps == 0


def test_the_layout_is_the_tiles_one_after_the_other():
    for backward in every_backward(step=80):
        for each in searched(backward):
            order, sizes = KEYS if each.owns_keys else QUERIES, tiles_of(each)
            end = 0
            for name in order:
                if name not in sizes:
                    assert each.smem[name] == 0
                    continue
                assert each.smem[name] == end
                assert end % 128 == 0, "the swizzle works on aligned groups"
                end += sizes[name]
            assert each.smem_bytes == end
            owned = each.block_k if each.owns_keys else each.block_q
            assert end >= each.itemsize * owned * max(each.head_dim, each.head_dim_v)


def test_keys_alone_have_the_kernel_of_their_gradients_in_steps_of_few_queries():
    spec = fg.AttentionSpec(head_dim=128, dtype="bfloat16")
    for arch in ("sm_80", "sm_90a"):
        many, few = (
            plan_schemes(BackwardPlanRequest(spec, arch, alone="keys", few_rows=rows))
            for rows in (0, 16)
        )
        for each in (many, few):
            assert [kernel.kernel for kernel in each.kernels] == ["delta", "dkdv"]
            assert each.deterministic
        tile, step = (each.key_plan.block_q for each in (many, few))
        assert step <= tile
        assert (
            -(-16 // step) * step * few.key_plan.cost <= -(-16 // tile) * tile * many.key_plan.cost
        )


def test_deterministic_gradients_take_the_split_scheme_and_say_why():
    free, forced = backward_of(64), backward_of(64, deterministic=True)
    assert (free.scheme, forced.scheme) == ("fused", "split")
    assert forced.notes[-1] == (
        "split, because every sum must have a fixed order: atomic additions have none"
    )
    assert free.notes[-1] == "fused, because its predicted cost is lower"
    assert free.notes[:2] == forced.notes[:2], "both costs are printed in either case"
    assert free.cost < forced.cost


def test_the_scheme_is_the_cheaper_one_that_fits():
    for backward in every_backward(step=80):
        other = backward_of(
            backward.kernels[0].head_dim,
            backward.kernels[0].dtype,
            backward.kernels[0].arch,
            head_dim_v=backward.kernels[0].head_dim_v,
            deterministic=True,
        )
        if backward.scheme == "fused":
            assert backward.cost < other.cost
        else:
            assert backward.kernels == other.kernels


def test_grids_cover_the_side_that_blocks_own():
    split = backward_of(64, deterministic=True)
    delta, dkdv, dq = split.kernels
    sizes = {"batch": 3, "heads_q": 8, "heads_kv": 2}
    assert delta.grid(**sizes, seq_q=delta.block_q + 1, seq_k=7) == (2, 8, 3)
    assert dq.grid(**sizes, seq_q=dq.block_q + 1, seq_k=7) == (2, 8, 3)
    assert dkdv.grid(**sizes, seq_q=7, seq_k=dkdv.block_k + 1) == (2, 2, 3)
    fused = backward_of(64).kernel("fused")
    assert fused.grid(**sizes, seq_q=7, seq_k=fused.block_k) == (1, 2, 3)


def test_spare_registers_shrink_the_tile_of_that_kernel_alone():
    plain = backward_of(64, deterministic=True)
    spared = backward_of(64, deterministic=True, spare_registers={"dkdv": 64})
    assert spared.kernel("dq") == plain.kernel("dq")
    before, after = plain.kernel("dkdv"), spared.kernel("dkdv")
    assert after != before
    assert after.registers_needed - 64 < before.registers_needed
    with pytest.raises(fg.PlanError, match="given 'forward'"):
        backward_of(64, spare_registers={"forward": 8})


def test_dropout_is_a_quantity_of_its_own():
    spec = spec_of(64, 64, "float16")
    plain = plan_backward(spec, deterministic=True)
    dropped = plan_backward(spec.replace(dropout=True), deterministic=True)
    for name in ("dkdv", "dq"):
        with_it, without = dropped.kernel(name), plain.kernel(name)
        assert with_it.cost > without.cost
        (rest,) = [line for line in with_it.derivation if line.name == "rest"]
        assert "dropout_ops" in rest.formula


def test_a_backward_plan_is_a_plain_value():
    one = backward_of(64)
    assert pickle.loads(pickle.dumps(one)) == one
    assert len({one, backward_of(64), backward_of(64, deterministic=True)}) == 2
    with pytest.raises(KeyError):
        one.kernel("dq")


def test_no_tile_fits_names_the_kernel_and_what_would_fit():
    spec = fg.AttentionSpec(head_dim=256, dtype="float32", name="wide")
    with pytest.raises(fg.PlanError) as caught:
        plan_backward(spec, sram=60_000)
    assert caught.value.what == "no tile fits in shared memory"
    assert caught.value.where == "wide(head_dim=256, dtype=float32), kernel dkdv"
    assert "limit 60,000 B per block as given by sram" in caught.value.numbers
    for way in caught.value.way_out.splitlines():
        name, _, value = way.split(" (")[0].split(",")[0].partition("=")
        if name == "dtype":
            plan_backward(spec.replace(dtype=value.strip('"')), sram=60_000)
        elif name == "head_dim":
            plan_backward(spec.replace(head_dim=int(value)), sram=60_000)


def test_registers_that_are_missing_are_named_as_such():
    with pytest.raises(fg.PlanError) as caught:
        backward_of(256, "float32", spare_registers={"dkdv": 200})
    assert caught.value.what == "no tile fits in the registers of a thread"
    assert "limit 255 per thread\nregisters = " in caught.value.numbers


def test_the_printed_derivation():
    text = str(backward_of(64, deterministic=True))
    for line in (
        "backward  scheme split",
        "          split, because every sum must have a fixed order: atomic additions have none",
        "          row_bytes = 2*e*d_v + 2*4 + 2*4 = 2*2*64 + 2*4 + 2*4 = 272 B",
    ):
        assert line in text.splitlines()
