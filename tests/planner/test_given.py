"""A tile can be given: every feasible one runs, anything else is refused, and it stays as given."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.kernels.pipeline import build_backward
from flashgen.kernels.planner import Tile, feasible, plan, plan_backward
from flashgen.shared.errors import PlanError
from tests.support.judged import plain
from tests.support.tiers import one_in

SPEC = fg.AttentionSpec(mask_mod=lambda b, h, q, k: k <= q, head_dim=64, name="causal")


def test_feasible_plans_come_cheapest_first_and_the_first_is_the_planners():
    plans = feasible(SPEC)
    assert [each.cost for each in plans] == sorted(each.cost for each in plans)
    assert plans[0].tile == plan(SPEC).tile
    assert len({each.tile for each in plans}) == len(plans) > 100


@pytest.mark.parametrize("kernel", one_in(3, ["forward", "dkdv", "dq", "fused"]))
def test_a_plan_made_with_its_own_tile_is_the_same_plan(kernel):
    scheme = {"dkdv": ("dkdv", "dq"), "dq": ("dkdv", "dq")}.get(kernel, (kernel,))
    others = {name: feasible(SPEC, kernel=name)[0].tile for name in scheme}
    for each in feasible(SPEC, kernel=kernel)[::50]:
        if kernel == "forward":
            again = plan(SPEC, tile=each.tile)
        else:
            again = plan_backward(SPEC, tiles=others | {kernel: each.tile}).kernel(kernel)
        assert again == each
        assert again.policy == "given"


def test_given_tiles_decide_the_scheme():
    split = {name: feasible(SPEC, kernel=name)[0].tile for name in ("dkdv", "dq")}
    chosen = plan_backward(SPEC, tiles=split)
    assert plan_backward(SPEC).scheme == "fused"
    assert chosen.scheme == "split"
    assert "given" in chosen.notes[-1]


@pytest.mark.parametrize(
    ("tile", "expected"),
    [
        (Tile(128, 8, 2, 1), "registers per thread"),
        (Tile(96, 3, 1, 1), "does not support this combination"),
        (Tile(20, 4, 1, 1), "does not support this combination"),
        (Tile(32, 4, 1, 0), "does not support this combination"),
        (Tile(32, 4, 1, 1, 2, 2), "does not support this combination"),
        (Tile(16, 4, 1, 17), "against"),
    ],
)
def test_a_tile_that_the_kernel_cannot_have_is_refused(tile, expected):
    with pytest.raises(PlanError, match="cannot have the given tile") as caught:
        plan(fg.AttentionSpec(head_dim=128), tile=tile)
    assert expected in str(caught.value)
    assert "feasible" in caught.value.way_out


def test_a_tile_together_with_a_policy_is_refused():
    with pytest.raises(PlanError, match="cannot be combined with a policy"):
        plan(SPEC, policy="paper", tile=plan(SPEC).tile)


def test_tiles_of_unknown_kernels_are_refused():
    with pytest.raises(PlanError, match="tiles names a kernel without a tile to choose"):
        plan_backward(SPEC, tiles={"forward": plan(SPEC).tile})


@pytest.mark.parametrize("tile", [(128, 64), [128, 64], 128, "128x64"])
def test_a_tile_that_is_no_tile_is_refused(tile):
    calls = [
        ("argument tile", lambda: fg.build(SPEC, tile=tile)),
        ("argument tile", lambda: fg.emit(SPEC, tile=tile)),
        ("argument tiles['dq']", lambda: fg.emit(SPEC, tiles={"dq": tile})),
        ("argument tiles['dq']", lambda: build_backward(SPEC, tiles={"dq": tile})),
    ]
    for where, call in calls:
        with pytest.raises(
            PlanError, match=r"a given tile is a flashgen\.kernels\.planner\.Tile"
        ) as caught:
            call()
        assert caught.value.where == where
        assert f"given {tile!r}" in caught.value.numbers
        assert "Tile(step=64, warps=8, row_groups=1, blocks=1)" in caught.value.way_out
    assert plan(SPEC, tile=Tile(64, 8, 1, 1)).block_q == 128


@pytest.mark.slow
def test_given_tiles_run_and_pass():
    for each in feasible(SPEC)[::60]:
        call = plain(SPEC, 70, 100, tiles={"forward": each.tile})
        assert call.judged_forward().plan == each
    for each in feasible(SPEC, kernel="fused")[::150]:
        plain(SPEC, 70, 100, tiles={"fused": each.tile}).judged_backward()


def test_a_given_tile_is_kept_even_where_it_spills():
    # The derived plan is made again with fewer registers where the compiler spills; this is not.
    tight = max(feasible(SPEC), key=lambda each: (each.registers_needed, each.blocks_per_sm))
    assert fg.build(SPEC, tile=tight.tile).plan.tile == tight.tile
