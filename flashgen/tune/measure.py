"""The best choices of a ranking, each checked against the oracle and then timed on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashgen import reference
from flashgen.errors import FlashgenError
from flashgen.ops import BackwardRun, ForwardRun, run_backward, run_forward
from flashgen.plan import Tile
from flashgen.spec import AttentionSpec
from flashgen.tune.rank import Choice

Tensor = torch.Tensor

LAUNCHES = 20
ROUNDS = 7

Call = Callable[[], object]
Timer = Callable[[Call], float]


@dataclass(frozen=True)
class Inputs:
    """Of one call, forward and backward.

    Attributes:
        operands: q, k, v.
        gradients: of out, and of lse or None.
        options: scalars, tensors, offsets, scale, dropout_p and rng as `flashgen.ops.run_forward`
            takes them.
    """

    operands: tuple[Tensor, Tensor, Tensor]
    gradients: tuple[Tensor, Tensor | None]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """A choice, and what became of it.

    Attributes:
        seconds: of the pass, the median of `ROUNDS`; None where it was not measured.
        refused: why it cannot win; "" where it can.
    """

    choice: Choice
    seconds: float | None = None
    refused: str = ""


def checked(
    spec: AttentionSpec,
    choices: Sequence[Choice],
    inputs: Inputs,
    which: str,
    *,
    backend: str,
    arch: str,
) -> list[Measured]:
    """Each choice run once and held against the float64 oracle by the error rule.

    Args:
        inputs: small ones: the oracle holds N x N scores.
        which: "forward", "backward", or "deterministic".
    """
    return [
        Measured(each, refused=_wrong(spec, each, inputs, which, backend, arch)) for each in choices
    ]


def fastest(
    spec: AttentionSpec,
    candidates: Sequence[Measured],
    inputs: Inputs,
    which: str,
    timer: Timer,
    *,
    backend: str,
    arch: str,
) -> list[Measured]:
    """Those that are right, timed in turns, the fastest first; those refused stay at the end.

    In turns, so that a clock that changes changes it for all.
    """
    right = [each for each in candidates if not each.refused]
    calls = [_call(spec, each.choice, inputs, which, backend, arch) for each in right]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, found in zip(calls, times, strict=True):
            found.append(timer(call))
    measured = [
        replace(each, seconds=statistics.median(found))
        for each, found in zip(right, times, strict=True)
    ]
    refused = [each for each in candidates if each.refused]
    return [*sorted(measured, key=lambda each: each.seconds or 0.0), *refused]


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


def _runs(
    spec: AttentionSpec, inputs: Inputs, backend: str, arch: str
) -> tuple[Callable[..., ForwardRun], Callable[..., BackwardRun]]:
    """The two passes; the backward pass gets the results of a forward with the planner's tiles."""
    how = {"backend": backend, "arch": arch, **inputs.options}
    first: list[ForwardRun] = []

    def forward(tiles: Mapping[str, Tile]) -> ForwardRun:
        return run_forward(spec, *inputs.operands, tiles=tiles, **how)

    def backward(tiles: Mapping[str, Tile], deterministic: bool) -> BackwardRun:
        if not first:
            first.append(run_forward(spec, *inputs.operands, **how))
        (q, k, v), (dout, dlse) = inputs.operands, inputs.gradients
        options = {"tiles": tiles, "deterministic": deterministic, **how}
        return run_backward(spec, q, k, v, first[0].out, first[0].lse, dout, dlse, **options)

    return forward, backward


def _call(
    spec: AttentionSpec, choice: Choice, inputs: Inputs, which: str, backend: str, arch: str
) -> Call:
    forward, backward = _runs(spec, inputs, backend, arch)
    if which == "forward":
        return lambda: forward(choice.tiles)
    return lambda: backward(choice.tiles, which == "deterministic")


def _wrong(
    spec: AttentionSpec, choice: Choice, inputs: Inputs, which: str, backend: str, arch: str
) -> str:
    """What is wrong with a choice's results; "" if nothing is."""
    try:
        run = _call(spec, choice, inputs, which, backend, arch)()
    except FlashgenError as error:
        return f"{type(error).__name__}: {error.what}"
    of = (spec, *inputs.operands)
    if isinstance(run, ForwardRun):
        exact = reference.attention(*of, **inputs.options)
        same = reference.same_dtype(*of, **inputs.options)
        found = zip(("out", "lse"), (run.out, run.lse), exact, same, strict=True)
        verdicts = {name: reference.compare(*three) for name, *three in found}
        warned = _spills(run.report.kernel)
    else:
        assert isinstance(run, BackwardRun)
        gradients = (run.dq, run.dk, run.dv, *run.captured)
        verdicts = reference.judge_gradients(gradients, *of, *inputs.gradients, **inputs.options)
        warned = max((_spills(report.kernel) for report in run.reports), default="")
    wrong = [f"{name}: {verdict}" for name, verdict in verdicts.items() if not verdict]
    return "; ".join(wrong) or warned


def _spills(build: Any) -> str:
    """A kernel that spills is slow, and its neighbours say so too: it is not timed."""
    spilled = build.binary.resources.spill_store_bytes if build is not None else 0
    return f"{build.source.name} spills {spilled} B per thread" if spilled else ""
