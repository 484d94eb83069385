"""All tiles that a pass can have, by how long the model says that it takes with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashgen.analysis import Analysis, analyse
from flashgen.ops import Problem
from flashgen.ops.bind import heads_of_call
from flashgen.plan import Plan, Tile, feasible, plan, plan_backward
from flashgen.plan.backward import kernels_of
from flashgen.plan.duration import Duration, duration_of
from flashgen.profile import walks_of
from flashgen.render import walk_of_kernel
from flashgen.spec import AttentionSpec

NEIGHBOURS = 4
"""Of the kernels of a backward pass each is tried with so many other tiles, the others' kept."""


@dataclass(frozen=True)
class Choice:
    """Tiles for the kernels of a pass.

    Attributes:
        plans: of the kernels, in the order of their launches; without delta, which has no choice.
        seconds: predicted for all of them, one after another; clocks per score element where the
            tiles that they visit are not known before they run (`by_time`); NaN where nothing was
            predicted.
        durations: how the seconds of each launch come about.
    """

    plans: tuple[Plan, ...]
    seconds: float
    durations: tuple[Duration, ...] = ()

    @property
    def tiles(self) -> dict[str, Tile]:
        """By kernel."""
        return {plan.kernel: plan.tile for plan in self.plans}


def rank(
    spec: AttentionSpec,
    problem: Problem,
    captured: Mapping[str, Any],
    arch: str,
    *,
    which: str = "forward",
    sram: int | None = None,
) -> tuple[Choice, ...]:
    """The choices for a pass, the one of least predicted time first; none where nothing fits.

    The time of a kernel is `flashgen.plan.duration`: its clocks per score element, times the score
    elements of the tiles that the mask leaves, times how unevenly the blocks fill the SMs; at least
    the time that its bytes take. Of a forward kernel every feasible tile is ranked, of a backward
    pass for each scheme every kernel's best and, one kernel at a time, its next ones.

    Args:
        captured: the spec's tensors by name as arrays, and a run-time layout.
        which: "forward", "backward", or "deterministic" for a backward pass that is.

    Raises:
        PlanError: the architecture is unknown.
    """

    def of_kernel(kernel: str) -> list[Choice]:
        plans = feasible(spec, arch, kernel=kernel, sram=sram)
        if not by_time(spec):
            return [Choice((plan,), plan.launches * plan.cost) for plan in plans]
        predict = _predictor(spec, problem, captured, kernel)
        choices = [
            Choice((plan,), plan.launches * time.seconds, (time,))
            for plan, time in ((plan, predict(plan)) for plan in plans)
        ]
        return sorted(choices, key=lambda choice: choice.seconds)

    if which == "forward":
        return tuple(of_kernel("forward"))
    found: list[Choice] = []
    for kernels in kernels_of(spec, deterministic=which == "deterministic").values():
        ranked = [of_kernel(kernel) for kernel in kernels]
        if all(ranked):
            found += _combined(ranked)
    return tuple(sorted(found, key=lambda choice: choice.seconds))


def derived(
    spec: AttentionSpec, arch: str, which: str, ranked: Sequence[Choice], sram: int | None = None
) -> Choice:
    """The planner's own tiles, which it takes for all shapes; the ranking's word on them, if any.

    Raises:
        PlanError: no tile fits.
    """
    if which == "forward":
        plans: tuple[Plan, ...] = (plan(spec, arch, sram=sram),)
    else:
        chosen = plan_backward(spec, arch, sram=sram, deterministic=which == "deterministic")
        plans = tuple(each for each in chosen.kernels if each.kernel != "delta")
    own = Choice(plans, math.nan)
    return next((each for each in ranked if each.tiles == own.tiles), own)


def predicted(
    spec: AttentionSpec,
    problem: Problem,
    captured: Mapping[str, Any],
    plans: Sequence[Plan],
) -> tuple[Duration, ...]:
    """How long launches of these plans take for a problem; none where `by_time` says so."""
    if not by_time(spec):
        return ()
    return tuple(_predictor(spec, problem, captured, each.kernel)(each) for each in plans)


def by_time(spec: AttentionSpec) -> bool:
    """Whether `Choice.seconds` are seconds: of packed sequences nobody knows the tiles before."""
    return not spec.packed


def _combined(ranked: list[list[Choice]]) -> list[Choice]:
    """Each kernel's best together, then with one of them changed; and the planner's own."""
    best = [choices[0] for choices in ranked]
    found = [_together(best)]
    for place, choices in enumerate(ranked):
        for other in choices[1 : 1 + NEIGHBOURS]:
            found.append(_together([*best[:place], other, *best[place + 1 :]]))
    # It counts clocks per score element alone, so its tiles are those of least cost.
    own = _together([min(choices, key=_cost) for choices in ranked])
    return found if own in found else [*found, own]


def _cost(choice: Choice) -> tuple[float, Tile]:
    return choice.plans[0].cost, choice.plans[0].tile


def _together(choices: list[Choice]) -> Choice:
    plans = tuple(plan for choice in choices for plan in choice.plans)
    durations = tuple(each for choice in choices for each in choice.durations)
    return Choice(plans, sum(choice.seconds for choice in choices), durations)


def _predictor(
    spec: AttentionSpec, problem: Problem, captured: Mapping[str, Any], kernel: str
) -> Callable[[Plan], Duration]:
    """What predicts the time of a kernel's plans; tiles of one size visit the same ones."""
    analysis: Analysis = analyse(spec, walk_of_kernel(kernel))
    walks: dict[tuple[int, int, int], Any] = {}

    def predict(plan: Plan) -> Duration:
        if plan.kernel == "forward":
            heads = heads_of_call(spec, plan, problem, captured).heads
            plan = replace(plan, heads_per_tile=heads)
        size = plan.block_q, plan.block_k, plan.heads_per_tile
        if size not in walks:
            walks[size] = walks_of(spec, analysis.mask, plan, problem, captured)
        return duration_of(plan, walks[size], uneven=analysis.mask.growth != 0)

    return predict
