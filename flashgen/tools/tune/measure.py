"""Measuring the best choices of a ranking: checked against the oracle, then timed on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flashgen import reference
from flashgen.calls.ops import BackwardRun, ForwardRun, run_backward, run_forward
from flashgen.calls.runtime.calls import run_tangent
from flashgen.calls.runtime.reports import TangentRun
from flashgen.shared.call import Inputs
from flashgen.shared.errors import FlashgenError
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.tune.rank import TileChoice

LAUNCHES = 20
ROUNDS = 7

Run = ForwardRun | BackwardRun | TangentRun
Call = Callable[[], object]
Timer = Callable[[Call], float]


@dataclass(frozen=True)
class Measured:
    """A choice and the outcome of its check and its measurement.

    Attributes:
        seconds: duration of the pass, the median of `ROUNDS`; None where it was not measured.
        refused: why the choice is excluded; "" where it is not.
    """

    choice: TileChoice
    seconds: float | None = None
    refused: str = ""


def checked(
    choices: Sequence[TileChoice],
    spec: AttentionSpec,
    inputs: Inputs,
    pass_name: str,
    **run_options: str,
) -> list[Measured]:
    """Runs each choice once and compares it with the float64 oracle by the error rule.

    Args:
        inputs: small inputs, because the oracle materialises N x N scores.
        pass_name: as for `flashgen.tools.tune.rank.rank`.
        run_options: the backend and the architecture.
    """
    call_of = _caller(spec, inputs, pass_name, **run_options)
    judge = judge_of(spec, inputs, pass_name)

    def why_excluded(choice: TileChoice) -> str:
        try:
            run = call_of(choice)()
        except FlashgenError as error:
            return f"{type(error).__name__}: {error.what}"
        reasons = [f"{name}: {verdict}" for name, verdict in judge(run).items() if not verdict]
        for report in (run.report,) if isinstance(run, ForwardRun) else run.reports:
            if report.kernel is not None:
                spilled = report.kernel.binary.resources.spill_store_bytes
                name = report.kernel.source.name
                reasons += [f"{name} spills {spilled} B per thread"] if spilled else []
        return "; ".join(reasons)

    return [Measured(tile_choice, refused=why_excluded(tile_choice)) for tile_choice in choices]


def fastest(
    candidates: Sequence[Measured], timer: Timer, *call_arguments: Any, **run_options: Any
) -> list[Measured]:
    """Times the candidates that are not refused, and sorts them by time; refused ones come last.

    The candidates alternate, so that a change of the GPU's clock affects all of them.

    Args:
        call_arguments, run_options: as for `checked`, with the inputs that are timed.
    """
    correct = [candidate for candidate in candidates if not candidate.refused]
    calls = list(map(_caller(*call_arguments, **run_options), (m.choice for m in correct)))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, call_times in zip(calls, times, strict=True):
            call_times.append(timer(call))
    measured = [
        replace(candidate, seconds=statistics.median(call_times))
        for candidate, call_times in zip(correct, times, strict=True)
    ]
    refused = [candidate for candidate in candidates if candidate.refused]
    return [*sorted(measured, key=lambda candidate: candidate.seconds or 0.0), *refused]


def on_gpu(call: Call) -> float:
    """Seconds of one call: the mean of `LAUNCHES`, between two events of torch's stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(LAUNCHES):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / LAUNCHES


def _caller(
    spec: AttentionSpec, inputs: Inputs, pass_name: str, **run_options: Any
) -> Callable[[TileChoice], Callable[[], Run]]:
    """A function from a choice to its call. All passes but the forward one use one result of it."""
    forward = partial(run_forward, spec, *inputs.operands, **inputs.options | run_options)
    if pass_name == "forward":
        return lambda choice: partial(forward, tiles=choice.tiles)
    derivative = derivative_of(spec, inputs, forward(), pass_name, **run_options)
    return lambda choice: partial(derivative, tiles=choice.tiles)


def derivative_of(
    spec: AttentionSpec, inputs: Inputs, first: ForwardRun, pass_name: str, **run_options: Any
) -> Callable[..., BackwardRun | TangentRun]:
    """A function that computes gradients or tangents from the results of a forward call.

    Args:
        pass_name: "tangent", "backward", or "deterministic" for a deterministic backward pass.
        run_options: options of `run_backward` and `run_tangent` that are no part of the call.
    """
    arguments = spec, *inputs.operands, first.out, first.lse
    run_options |= inputs.options
    if pass_name == "tangent":
        return partial(run_tangent, *arguments, inputs.tangents, **run_options)
    fixed = pass_name == "deterministic"
    return partial(run_backward, *arguments, *inputs.gradients, deterministic=fixed, **run_options)


def judge_of(
    spec: AttentionSpec, inputs: Inputs, pass_name: str
) -> Callable[[Run], Mapping[str, reference.Verdict]]:
    """A function from a run to its verdicts; the oracle of results is computed once for all runs.

    Args:
        pass_name: "forward", "tangent", or another pass for the gradients.
    """
    arguments = (spec, *inputs.operands)
    if pass_name == "tangent":

        def tangents(run: Any) -> Mapping[str, reference.Verdict]:
            verdicts = reference.judge_tangents(
                (run.out, run.lse), *arguments, inputs.tangents, **inputs.options
            )
            return {f"{name}'s tangent": verdict for name, verdict in verdicts.items()}

        return tangents
    if pass_name != "forward":

        def gradients(run: Any) -> Mapping[str, reference.Verdict]:
            computed = (run.dq, run.dk, run.dv, *run.captured)
            return reference.judge_gradients(
                computed, *arguments, *inputs.gradients, **inputs.options
            )

        return gradients
    exact = reference.attention(*arguments, **inputs.options)
    same = reference.same_dtype(*arguments, **inputs.options)

    def results(run: Any) -> Mapping[str, reference.Verdict]:
        comparisons = zip(("out", *spec.row_results), (run.out, run.lse), exact, same, strict=False)
        return {name: reference.compare(*three) for name, *three in comparisons}

    return results
