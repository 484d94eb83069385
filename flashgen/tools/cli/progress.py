"""How long a run in the emulator takes: an estimate, then what is left.

The measure is the number of multiply-adds on the tensor cores: the emulator counts those that are
done, and the plans predict those of the whole call. Time per multiply-add differs by ten between
code paths and machines, so that the estimate comes from the first seconds of the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn

from flashgen.tools.cli.arguments import CallArguments
from flashgen.tools.cli.call import RandomCall
from flashgen.tools.cli.console import busy, console
from flashgen.tools.cli.inputs import arch_of

if TYPE_CHECKING:
    from flashgen.kernels.planner import Plan
    from flashgen.spec.language.spec import AttentionSpec
    from ptx_emulator import Counters

MEASURED_SECONDS = 2.0
"""The part of a run that the estimate is made from."""

LONG_SECONDS = 10.0
"""Runs that are estimated to take less are not reported."""

_TERMINAL_SECONDS = 0.5  # between two reports on a terminal
_PIPED_STEP = 0.1  # of the run, between two reports in a pipe


def expected_work(
    spec: AttentionSpec, call: RandomCall, arguments: CallArguments, pass_name: str = "forward"
) -> float:
    """The multiply-adds of one pass of a call; 0 where they are not known before it runs.

    Args:
        pass_name: "forward", "tangent", or another pass for the gradients.
    """
    from dataclasses import replace

    from flashgen.calls.runtime.bind_arguments import heads_of_call
    from flashgen.kernels.planner import (
        TangentPlanRequest,
        columns_of_launch,
        plan,
        plan_backward,
        plan_tangent,
        tangents_of,
    )
    from flashgen.tools.cli.tune import known_call
    from flashgen.tools.profile.prediction import expected_multiply_adds

    arch = arch_of(arguments.arch)
    moving = tangents_of(spec) if pass_name == "tangent" else ()
    kind = pass_name
    if pass_name not in ("forward", "tangent"):
        kind = "deterministic" if arguments.deterministic else "backward"
    # Several launches, whose kernels have a spec of their own.
    if spec.chooses:
        return 0
    columns = columns_of_launch(spec, arch, kind, tangents=moving, sram=arguments.sram).columns
    if columns != spec.head_dim_v:
        return 0
    known = known_call(spec, call)
    plans: Sequence[Plan]
    if pass_name == "tangent":
        plans = (plan_tangent(TangentPlanRequest.for_all(spec, arch, arguments.sram)),)
    elif pass_name != "forward":
        deterministic = arguments.deterministic
        plans = plan_backward(spec, arch, sram=arguments.sram, deterministic=deterministic).kernels
    else:
        one_head = plan(spec, arch, sram=arguments.sram)
        heads = heads_of_call(spec, one_head, known.problem, known.captured).heads
        plans = (replace(one_head, heads_per_tile=heads),)
    return expected_multiply_adds(known, plans)


@contextmanager
def emulated(message: str, expected: Callable[[], float]) -> Iterator[None]:
    """Says on stderr how long the launches inside take, where they take long in the emulator.

    Args:
        expected: the multiply-adds of all launches; called only after `MEASURED_SECONDS`.
    """
    import ptx_emulator as emulator

    report = _Report(expected)
    with busy(message) as quiet, emulator.watching(report):
        report.before_first = quiet
        try:
            yield
        finally:
            report.stop()


class _Report:
    """Receives the counters of running launches and prints estimate and progress."""

    def __init__(self, expected: Callable[[], float]) -> None:
        self.before_first: Callable[[], None] = lambda: None
        self._expected = expected
        self._total: float | None = None  # multiply-adds; 0: no report
        self._launch: Counters | None = None
        self._finished = 0  # multiply-adds of earlier launches
        self._start = self._next = 0.0
        self._shown = 0.0  # the part of the run at the last report in a pipe
        self._bar: Progress | None = None

    def __call__(self, counters: Counters) -> None:
        if counters is not self._launch:
            if self._launch is None:
                self._start = perf_counter()
                self._next = self._start + MEASURED_SECONDS
            else:
                self._finished += self._launch.multiply_adds
            self._launch = counters
        if perf_counter() >= self._next:
            self._tell()

    def _tell(self) -> None:
        assert self._launch is not None
        now = perf_counter()
        self._next = now + _TERMINAL_SECONDS
        done = self._finished + self._launch.multiply_adds
        first = self._total is None
        if first and done:
            self._total = self._expected()
        if not self._total:
            return
        part = min(done / self._total, 1.0)
        left = (now - self._start) * (1 / part - 1)
        if first and left < LONG_SECONDS:
            self._next = math.inf
        else:
            self._print(part, left, first)

    def _print(self, part: float, left: float, first: bool) -> None:
        err = console(stderr=True)
        if first:
            self.before_first()
            estimate = duration(left + MEASURED_SECONDS)
            err.print(f"the run in the emulator takes about {estimate}; Ctrl-C ends it")
            if err.is_terminal:
                columns = BarColumn(), TextColumn("{task.percentage:.0f} %, {task.description}")
                self._bar = Progress(*columns, console=err, transient=True)
                self._bar.add_task("", total=1.0)
                self._bar.start()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=part, description=left_of(left))
        elif part >= self._shown + _PIPED_STEP:
            self._shown = part
            err.print(f"{part:.0%} done, {left_of(left)}")

    def stop(self) -> None:
        """Removes the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()


def left_of(seconds: float) -> str:
    return f"about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """A rough time in the unit that suits it: 40 s, 3 min, 2.5 h, 4 days."""
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"
