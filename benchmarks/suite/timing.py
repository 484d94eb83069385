"""Times of several callables that alternate, with the same clocks and the same inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.suite.device import Device, Span, first_line
from benchmarks.suite.statistics import Timing, timing_of

Call = Callable[[int], object]
"""Runs once on one of the sets of inputs, by its number."""

LEAST_ROUNDS, MOST_ROUNDS = 7, 300
SAMPLE_MS = 0.3
"""A sample shorter than this is made of several calls, because events are half a microsecond."""
GRAPH_MS = 0.1
"""Calls shorter than this are replayed from a graph, else the host's speed would be measured."""
SLOW = 4.0
"""A call that takes n times this many times as long as the fastest is in every n-th round."""
QUEUED_MS = 200.0
"""So much work is queued before the host waits: an idle GPU would show the host's gaps."""


@dataclass(frozen=True)
class Measured:
    """Times of one callable, and how they were taken: "events", "graph" or "host clock"."""

    timing: Timing
    method: str


@dataclass
class _Entry:
    run: Callable[[], object]
    calls: int  # in one run
    estimate: float  # ms of one run
    method: str


def sets_needed(bytes_per_set: int, l2_bytes: int) -> int:
    """The number of sets of inputs to rotate among, so that none is in L2 when it is used again."""
    if l2_bytes == 0 or bytes_per_set >= 3 * l2_bytes:
        return 1 if l2_bytes == 0 else 2
    return min(32, math.ceil(3 * l2_bytes / max(1, bytes_per_set)) + 1)


def measure(
    device: Device,
    calls: Mapping[str, Call],
    sets: int,
    seconds: float,
    *,
    graphs: bool = False,
    rounds: tuple[int, int] = (LEAST_ROUNDS, MOST_ROUNDS),
    failures: dict[str, str] | None = None,
) -> dict[str, Measured]:
    """Median times of all ``calls``, which alternate until ``seconds`` are spent.

    Args:
        sets: the number of sets of inputs; consecutive calls use consecutive sets.
        graphs: whether calls that are too short for the host may be captured.
        rounds: the smallest and the largest number of samples of each call.
        failures: where given, a call that raises while it is warmed up is added here with the
            reason, and the others are timed without it.
    """
    entries: dict[str, _Entry] = {}
    for name, call in calls.items():
        try:
            entries[name] = _prepared(device, call, sets, graphs)
        except Exception as error:
            if failures is None or device.failure() is not None:
                raise
            failures[name] = first_line(error)
    if not entries:
        return {}
    count, every = _schedule(entries, seconds, *rounds)
    spans: dict[str, list[Span]] = {name: [] for name in entries}
    names = list(entries)
    queued = QUEUED_MS  # the first round begins with a call that does not count
    for turn in range(count):
        # Every call is first in some rounds, because the call before may leave its data in L2.
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if turn % every[name]:
                continue
            entry = entries[name]
            if queued >= QUEUED_MS:
                device.synchronize()
                entry.run()
                queued = 0.0
            spans[name].append(device.record(entry.run))
            queued += entry.estimate
    device.synchronize()
    return {
        name: Measured(
            timing_of([span.ms() / entry.calls for span in spans[name]]),
            entry.method,
        )
        for name, entry in entries.items()
    }


def _schedule(
    entries: dict[str, _Entry], seconds: float, least: int, most: int
) -> tuple[int, dict[str, int]]:
    """The number of rounds, and for each entry the interval of the rounds that include it.

    An entry that takes many times as long as the fastest is in fewer rounds, so that the others
    have enough time for many samples.
    """
    fastest = max(1e-6, min(entry.estimate for entry in entries.values()))
    every = {name: max(1, int(e.estimate / (SLOW * fastest))) for name, e in entries.items()}
    per_round = sum(entry.estimate / every[name] for name, entry in entries.items())
    count = max(least, min(most, int(seconds * 1e3 / max(per_round, 1e-6))))
    return count, {name: min(often, max(1, count // least)) for name, often in every.items()}


def _prepared(device: Device, call: Call, sets: int, graphs: bool) -> _Entry:
    """A callable warmed up, with as many calls in it as one sample needs."""
    # Compilation and capture happen in the first calls; the estimate is from a later one.
    warm_up = 3 if device.kind == "gpu" else 1
    for index in range(max(warm_up, min(sets, 4))):
        call(index % sets)
    device.synchronize()
    estimate = device.record(lambda: call(0)).ms()
    many = max(1, min(64, math.ceil(SAMPLE_MS / max(estimate, 1e-4))))
    method = "events" if device.kind == "gpu" else "host clock"
    counter = itertools.cycle(range(sets))

    def run() -> None:
        for _ in range(many):
            call(next(counter))

    if graphs and estimate < GRAPH_MS:
        many = max(many, sets)
        try:
            replay = device.captured(run)
        except RuntimeError:
            replay = None
        if replay is not None:
            replay()
            took = device.record(replay).ms()
            return _Entry(replay, many, took, "graph")
    return _Entry(run, many, estimate * many, method)
