"""Chooses the code path of a pass over a block layout, for calls that leave it open.

A device may run kernels of two code paths. Without a block layout the path with its fastest
instructions is the faster one; with a layout, the tiles of the paths cover different numbers of
scores beside the live blocks, and evaluate the layout at different costs. The path of fewer
predicted clocks is chosen, for the forward and the backward pass apart.

Whoever shows or stores the choice takes it from here: calls, `flashgen.plan`, exports, and the
commands plan, emit, export and doctor.

The choice holds for all calls of a spec, so that the path does not depend on lengths. It is made
for `positions_of` queries and keys, with the layout's function, or with random blocks where
calls give the layout. A mask that reads more than positions is counted as if it kept every score.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Concatenate, NamedTuple, ParamSpec, cast

import numpy as np
import sympy

from flashgen.kernels import planner
from flashgen.kernels.planner.api import plan_forward
from flashgen.kernels.planner.backward_schemes import plan_schemes
from flashgen.kernels.planner.duration import duration_of, gaps_between
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.layout_share import grid_of, live_blocks, positions_of
from flashgen.kernels.planner.requests import BackwardPlanRequest, PlanRequest
from flashgen.kernels.visits.visited_tiles import KnownCall, walks_of
from flashgen.shared.arch import facts, portable
from flashgen.shared.call import CheckedCall
from flashgen.shared.errors import PlanError, called_by_users
from flashgen.shared.signature import LAYOUT
from flashgen.spec.analysis.intervals import WalkedAxis
from flashgen.spec.analysis.mask import analyse_mask
from flashgen.spec.language.block_layout import BlockSparse
from flashgen.spec.language.lets import elements_of
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import K, Q

# Assumed: heads that fill a GPU.
HEADS = 32

Options = ParamSpec("Options")
Planner = Callable[Concatenate[AttentionSpec, Options], Plan]


class LayoutPath(NamedTuple):
    """The architecture whose kernels compute a pass, and why.

    Attributes:
        backward, deterministic: the pass, and whether its gradients have the same bits in each run.
    """

    arch: str
    why: str
    backward: bool
    deterministic: bool

    def __str__(self) -> str:
        return f"calls that name no architecture: {self.why}"


def paths_of_layout(
    spec: AttentionSpec, arch: str, *, backward: bool = True
) -> tuple[LayoutPath, ...]:
    """The paths of all passes on a device of ``arch``; () where there is nothing to choose.

    Args:
        backward: whether to include the backward pass, with free and with fixed order of sums.
    """
    passes = ((False, False), *(((True, False), (True, True)) if backward else ()))
    paths = (path_of_layout(spec, arch, backward=b, deterministic=fixed) for b, fixed in passes)
    return tuple(path for path in paths if path is not None)


def _showing_path(make_plan: Planner[Options]) -> Planner[Options]:
    """``make_plan`` with a note in each plan that says which path calls take."""

    @functools.wraps(make_plan)
    def planned(spec: AttentionSpec, *args: Options.args, **options: Options.kwargs) -> Plan:
        derived = make_plan(spec, *args, **options)
        path = path_of_layout(spec, derived.arch)
        return derived if path is None else replace(derived, notes=(*derived.notes, str(path)))

    return cast("Planner[Options]", planned)


plan = called_by_users()(_showing_path(planner.plan))
"""`flashgen.plan`."""


@functools.lru_cache(maxsize=1024)
def path_of_layout(
    spec: AttentionSpec, arch: str, *, backward: bool = False, deterministic: bool = False
) -> LayoutPath | None:
    """The path of a pass on a device of ``arch``; None where there is nothing to choose."""
    if spec.block_sparse is None or spec.is_served:
        return None
    if not facts(arch).code_path.copies_by_tma:
        return None
    try:
        seconds = {
            target: _seconds(spec, _plans(spec, target, backward, deterministic))
            for target in (arch, portable(arch))
        }
    except PlanError:  # several launches compute the columns of V, which have no model here
        return None
    best = min(seconds, key=lambda target: seconds[target])
    other = next(target for target in seconds if target != best)
    pass_name = "backward" if backward else "forward"
    pass_name += " with fixed order of sums" if deterministic else ""
    positions = positions_of(spec.block_sparse)
    return LayoutPath(
        best,
        f"block layout, {pass_name}: predicted {seconds[best] * 1e3:.3f} ms with {best}, "
        f"{seconds[other] * 1e3:.3f} with {other}, for {HEADS} heads of {positions:,} positions",
        backward,
        deterministic,
    )


def _plans(spec: AttentionSpec, arch: str, backward: bool, deterministic: bool) -> Sequence[Plan]:
    if not backward:
        return (plan_forward(PlanRequest(spec, arch)),)
    return plan_schemes(BackwardPlanRequest(spec, arch, deterministic=deterministic)).kernels


def _seconds(spec: AttentionSpec, plans: Sequence[Plan]) -> float:
    """The predicted duration of the launches of a pass whose tiles of scores have a model."""
    is_static = spec.mask.free_symbols <= {Q, K} and not elements_of(spec.mask)
    mask = spec.mask if is_static else sympy.true
    assert spec.block_sparse is not None, "specs without a layout have no choice"
    positions = positions_of(spec.block_sparse)
    scalars = {scalar.name: 0 for scalar in spec.scalars}  # the mask reads none of them
    total = gaps_between(plans)
    for plan in plans:
        if plan.is_for_learned:
            continue  # both paths have it
        sizes = (1, 1, 1, positions, positions)
        call = CheckedCall(*sizes, spec.head_dim, plan.head_dim_v, 0, 0, 1.0, scalars)
        analysis = analyse_mask(mask, WalkedAxis(Q if plan.owns_keys else K))
        walks = [
            walk._replace(sizes=walk.sizes._replace(batch=HEADS))
            for walk in walks_of(KnownCall(spec, call, _layout(spec.block_sparse)), analysis, plan)
        ]
        total += duration_of(plan, walks, uneven=analysis.growth != 0).seconds
    return total


def _layout(sparse: BlockSparse) -> dict[str, object]:
    """The layout for which the paths are compared."""
    live = np.frombuffer(live_blocks(sparse), dtype=bool)
    return {LAYOUT: live.reshape(1, 1, *grid_of(sparse))}
