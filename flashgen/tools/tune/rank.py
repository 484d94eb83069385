"""The feasible tiles of a pass, ranked by predicted time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashgen.calls.runtime.bind_arguments import heads_of_call
from flashgen.kernels.codegen import walk_of_kernel
from flashgen.kernels.planner import (
    Plan,
    TangentPlanRequest,
    Tile,
    feasible,
    plan,
    plan_backward,
    plan_tangent,
)
from flashgen.kernels.planner.backward_schemes import kernels_of, streaming_kernels_of
from flashgen.kernels.planner.duration import Duration, duration_of, gaps_between
from flashgen.kernels.planner.traffic import LaunchSizes, Walk
from flashgen.kernels.visits.visited_tiles import KnownCall, walks_of
from flashgen.spec.analysis import Analysis, analyse
from flashgen.spec.language.spec import AttentionSpec

NEIGHBOURS = 4
"""The number of alternative tiles of each backward kernel, tried with the others' best tiles."""


@dataclass(frozen=True)
class TileChoice:
    """Tiles for the kernels of a pass.

    Attributes:
        plans: the plans of the kernels with a tile, in launch order.
        seconds: the predicted time of all launches of the pass, those of kernels without a tile
            and the gaps between them included; clocks per score element where the visited tiles are
            not known before the launch (`by_time`); NaN without a prediction.
        durations: the predicted duration of each launch of a kernel with a tile.
    """

    plans: tuple[Plan, ...]
    seconds: float
    durations: tuple[Duration, ...] = ()

    @property
    def tiles(self) -> dict[str, Tile]:
        """The tiles by kernel."""
        return {plan.kernel: plan.tile for plan in self.plans}


def rank(
    call: KnownCall,
    arch: str,
    *,
    pass_name: str = "forward",
    sram: int | None = None,
) -> tuple[TileChoice, ...]:
    """The choices for a pass, the one of least predicted time first; () where no tile fits.

    The time of a kernel is that of `kernels.planner.duration`: its clocks per score element, times
    the score elements of the visited tiles, times the factor for SMs that are idle; at least the
    time for its bytes. Of the forward kernel and of that of tangents, every feasible tile is
    ranked. Of a backward pass,
    each scheme is ranked with the best tile of every kernel, and with the next ones of one kernel
    at a time.

    Args:
        pass_name: "forward", "tangent" for forward mode along all operands, "backward", or
            "deterministic" for a deterministic backward pass.

    Raises:
        PlanError: the architecture is unknown.
    """
    spec = call.spec

    def kernel_choices(kernel: str) -> list[TileChoice]:
        plans = feasible(spec, arch, kernel=kernel, sram=sram)
        if not by_time(spec):
            return [TileChoice((plan,), plan.launches * plan.cost) for plan in plans]
        predict = _predictor(call, kernel)
        choices = [
            TileChoice((plan,), plan.launches * time.seconds, (time,))
            for plan, time in ((plan, predict(plan)) for plan in plans)
        ]
        return sorted(choices, key=lambda choice: choice.seconds)

    if pass_name in ("forward", "tangent"):
        return tuple(kernel_choices(pass_name))
    all_choices: list[TileChoice] = []
    for kernels in kernels_of(spec, deterministic=pass_name == "deterministic").values():
        ranked = [kernel_choices(kernel) for kernel in kernels]
        if all(ranked):
            all_choices += [
                _with_streaming_kernels(call, combination) for combination in _combined(ranked)
            ]
    return tuple(sorted(all_choices, key=lambda choice: choice.seconds))


def derived(
    spec: AttentionSpec,
    arch: str,
    pass_name: str,
    ranked: Sequence[TileChoice],
    sram: int | None = None,
) -> TileChoice:
    """The planner's own tiles, which are the same for all shapes, with the ranking's prediction.

    Raises:
        PlanError: no tile fits.
    """
    if pass_name == "forward":
        plans: tuple[Plan, ...] = (plan(spec, arch, sram=sram),)
    elif pass_name == "tangent":
        plans = (plan_tangent(TangentPlanRequest.for_all(spec, arch, sram)),)
    else:
        chosen = plan_backward(spec, arch, sram=sram, deterministic=pass_name == "deterministic")
        plans = tuple(planned for planned in chosen.kernels if not planned.streams)
    planners_choice = TileChoice(plans, math.nan)
    tiles = planners_choice.tiles
    return next((choice for choice in ranked if choice.tiles == tiles), planners_choice)


def predicted(call: KnownCall, plans: Sequence[Plan]) -> tuple[Duration, ...]:
    """The predicted durations of these plans' launches; () where the tiles are known only then."""
    if not by_time(call.spec):
        return ()
    return tuple(_predictor(call, planned.kernel)(planned) for planned in plans)


def by_time(spec: AttentionSpec) -> bool:
    """Whether choices have seconds: packed sequences' tiles are known only at launch."""
    return not spec.packed


def _combined(ranked: list[list[TileChoice]]) -> list[TileChoice]:
    """Each kernel's best tile, the same with one tile replaced, and the planner's own choice."""
    best = [choices[0] for choices in ranked]
    combinations = [_together(best)]
    for index, choices in enumerate(ranked):
        for other in choices[1 : 1 + NEIGHBOURS]:
            combinations.append(_together([*best[:index], other, *best[index + 1 :]]))
    # The planner compares clocks per score element alone: its tiles are those of least cost.
    planners_choice = _together([min(choices, key=_cost) for choices in ranked])
    return combinations if planners_choice in combinations else [*combinations, planners_choice]


def _cost(choice: TileChoice) -> tuple[float, Tile]:
    return choice.plans[0].cost, choice.plans[0].tile


def _together(choices: list[TileChoice]) -> TileChoice:
    plans = tuple(plan for choice in choices for plan in choice.plans)
    durations = tuple(duration for choice in choices for duration in choice.durations)
    return TileChoice(plans, sum(choice.seconds for choice in choices), durations)


def _with_streaming_kernels(call: KnownCall, choice: TileChoice) -> TileChoice:
    """A choice with the time of the kernels that have no tile, and of the gaps between launches."""
    if not by_time(call.spec):
        return choice
    key_plan = next(planned for planned in choice.plans if planned.owns_keys)
    others = streaming_kernels_of(call.spec, key_plan)
    walks = [Walk(LaunchSizes(*call.problem.sizes))]
    seconds = sum(duration_of(planned, walks).seconds for planned in others)
    seconds += gaps_between([others[0], *choice.plans, *others[1:]])
    return replace(choice, seconds=choice.seconds + seconds)


def _predictor(call: KnownCall, kernel: str) -> Callable[[Plan], Duration]:
    """A function that predicts the duration of a kernel's plans; walks are kept by tile size."""
    analysis: Analysis = analyse(call.spec, walk_of_kernel(kernel))
    walks: dict[tuple[int, int, int], Any] = {}

    def predict(plan: Plan) -> Duration:
        if plan.kernel == "forward":
            plan = replace(plan, heads_per_tile=heads_of_call(call.spec, plan, *call[1:]).heads)
        size = plan.block_q, plan.block_k, plan.heads_per_tile
        if size not in walks:
            walks[size] = walks_of(call, analysis.mask, plan)
        return duration_of(plan, walks[size], uneven=analysis.mask.growth != 0)

    return predict
