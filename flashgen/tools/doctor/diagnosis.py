"""`diagnose`: whether flashgen works on this machine, as a value and as one screen of text."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from flashgen.calls.launch import Gpu
from flashgen.calls.trust import decision, trial, verdicts
from flashgen.calls.trust.verdicts import PathVerdict
from flashgen.kernels.visits.layout_path import paths_of_layout
from flashgen.shared import config
from flashgen.shared.arch import DEFAULT_ARCH, paths_of
from flashgen.shared.errors import LaunchError
from flashgen.tools.doctor.check import ProblemResult
from flashgen.tools.doctor.machine import Finding, MachineFacts, inspect, unfit
from flashgen.tools.doctor.problems import PROBLEMS, Problem

SECONDS = 600.0
"""The time limit for the problems of one code path, compilation and emulation included."""

NO_DEVICE = -1
"""The device of a child process that runs problems in the emulator alone."""

_REPORT = "report the output of `flashgen doctor --json`; FLASHGEN_ARCH chooses another path"
_TRY_AGAIN = "flashgen doctor, while no other process uses the GPU"

Tell = Callable[[str], None]
Each = Callable[[ProblemResult], None]


@dataclass(frozen=True)
class PathOfGpu:
    """A code path of the GPU.

    Attributes:
        taken: whether calls without the argument arch take it.
        why: what is known about it.
    """

    arch: str
    taken: bool
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """The state of flashgen on a machine.

    Attributes:
        gpu: the GPU on which the problems ran; None without one.
        paths: its code paths, the fastest one first.
        results: the outcome of each problem on each path; without a GPU, of one in the emulator.
        findings: what is wrong, with the way out.
        layouts: the path of each pass of the problem with a block layout, in calls without the
            argument arch; () where they have no choice.
    """

    machine: MachineFacts
    gpu: Gpu | None
    paths: tuple[PathOfGpu, ...] = ()
    results: tuple[ProblemResult, ...] = ()
    findings: tuple[Finding, ...] = field(default=())
    layouts: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 where all is well, 1 where something is wrong, 2 where only a GPU is missing."""
        return 1 if self.findings else 2 if self.gpu is None else 0

    def as_dict(self) -> dict[str, Any]:
        """All of it in types of JSON."""
        return {**asdict(self), "exit_code": self.exit_code}

    def __str__(self) -> str:
        return "\n".join(_screen(self)) + "\n"


def diagnose(
    device: int = 0,
    *,
    seconds: float = SECONDS,
    driver: Any = None,
    tell: Tell = lambda text: None,
    each: Each = lambda result: None,
) -> Diagnosis:
    """Checks versions, then runs the problems of `flashgen.tools.doctor.problems`.

    On a GPU they run in child processes, on each code path, and are compared with the float64
    reference and with the emulator. Their outcome is the verdict on a path that later calls use
    (`flashgen.calls.trust`). This process creates no context on the GPU. Without a GPU, the first
    problem runs in the emulator.

    Args:
        device: the number of the CUDA device.
        seconds: the time limit for the problems of one code path.
        driver: replaces ``cuda.bindings.driver``.
        tell: called with a line for each step.
        each: called with the outcome of each problem when it ends.
    """
    machine = inspect(driver)
    gpu = next((gpu for gpu in machine.gpus if gpu.index == device), None)
    findings = list(unfit(machine, device))
    if machine.gpus and gpu is None:
        there = ", ".join(str(gpu.index) for gpu in machine.gpus)
        findings.append(Finding(f"there is no CUDA device {device}", f"--device {there}"))
    if findings:  # the problems would only fail for the same reasons
        return Diagnosis(machine, gpu, findings=tuple(findings))
    if gpu is None:
        ran = run_path(DEFAULT_ARCH, NO_DEVICE, PROBLEMS[:1], seconds, tell, each)
        path = PathOfGpu(DEFAULT_ARCH, True, "the default of calls that run without a GPU")
        return Diagnosis(machine, None, (path,), ran.results, ran.findings)
    results: list[ProblemResult] = []
    for arch in paths_of(gpu.arch):
        ran = run_path(arch, device, PROBLEMS, seconds, tell, each)
        results += ran.results
        findings += ran.findings
        if ran.verdict is not None:
            verdicts.write(verdicts.subject_of(gpu, arch), ran.verdict)
    paths = _paths(gpu, driver)
    layouts = tuple(_layouts(paths))
    return Diagnosis(machine, gpu, paths, tuple(results), tuple(findings), layouts)


@dataclass(frozen=True)
class PathRun:
    """The problems of one code path.

    Attributes:
        results: the outcome of each problem that ran.
        hindrance: why the others could not be run; "" where all ran.
    """

    arch: str
    results: tuple[ProblemResult, ...]
    hindrance: str = ""

    @property
    def verdict(self) -> PathVerdict | None:
        """Failed with the first wrong problem, passed where all are right, else None."""
        wrong = next((each for each in self.results if not each.ok), None)
        if wrong is not None:
            return PathVerdict(f"{wrong.problem}: {wrong.text}")
        return None if self.hindrance else PathVerdict()

    @property
    def findings(self) -> tuple[Finding, ...]:
        found = [
            Finding(f"{each.arch}, {each.problem}: {each.text}", _REPORT)
            for each in self.results
            if not each.ok
        ]
        if self.hindrance:
            found.append(Finding(f"{self.arch}: {self.hindrance}", _TRY_AGAIN))
        return tuple(found)


def run_path(
    arch: str,
    device: int,
    problems: Sequence[Problem],
    seconds: float,
    tell: Tell,
    each: Each = lambda result: None,
) -> PathRun:
    """Runs the problems in a child process; if it crashes, starts another for the remaining ones.

    Args:
        device: the number of the CUDA device, or `NO_DEVICE`.
        seconds: the time limit for all of them.
        tell, each: as for `diagnose`.
    """
    deadline = time.monotonic() + seconds
    left = [problem.name for problem in problems]
    found: list[ProblemResult] = []

    def add(result: ProblemResult) -> None:
        found.append(result)
        each(result)

    def progress(event: trial.Event) -> None:
        tell(f"{arch}: {event['event']} {event.get('problem', '')}")
        if event["event"] == "result":
            add(ProblemResult(**{f.name: event[f.name] for f in fields(ProblemResult)}))

    while left:
        before = len(found)
        options = [word for name in left for word in ("--problem", name)]
        ended = trial.run(
            trial.command(arch, device, "--emulate", *options),
            seconds=max(1.0, deadline - time.monotonic()),
            tell=progress,
        )
        if ended.lost is not None:
            add(ProblemResult(ended.lost, arch, False, ended.reason))
        if len(found) == before:
            return PathRun(arch, tuple(found), ended.reason or "the child process ran nothing")
        left = left[len(found) - before :]
    return PathRun(arch, tuple(found))


def _paths(gpu: Gpu, driver: Any) -> tuple[PathOfGpu, ...]:
    """The code paths, and which one a call without the argument arch takes now."""
    known = {arch: decision.standing(gpu, arch) for arch in paths_of(gpu.arch)}
    why = {arch: each.why for arch, each in known.items()}
    taken = config.arch()
    if taken is not None:
        why[taken] = f"FLASHGEN_ARCH; {why.get(taken, 'not tried')}"
    else:
        with suppress(LaunchError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the screen shows it
            # As in a capture: nothing is tried again.
            chosen = decision.decide(gpu.index, capturing=lambda: True, driver=driver)
            taken = chosen.arch
            if not known[taken].passed:
                why[taken] = chosen.why
    return tuple(PathOfGpu(arch, arch == taken, reason) for arch, reason in why.items())


def _layouts(paths: Sequence[PathOfGpu]) -> Iterator[str]:
    """Which path calls without the argument arch take for a block layout, and why."""
    arch = next((path.arch for path in paths if path.taken), None)
    if arch is None or config.arch() is not None:
        return
    for spec in (problem.spec() for problem in PROBLEMS):
        yield from (path.why for path in paths_of_layout(spec, arch))


# ---- the screen ----------------------------------------------------------------------------------


def _screen(found: Diagnosis) -> Iterator[str]:
    for name, value in _facts(found):
        yield f"{name:<10} {value}"
    if found.results:
        yield ""
        yield from _table(found.results)
    for finding in found.findings:
        yield ""
        yield f"wrong      {finding.what}"
        yield f"try        {finding.way_out}"
    yield ""
    yield f"result     {_summary(found)}"


def _facts(found: Diagnosis) -> Iterator[tuple[str, str]]:
    machine = found.machine
    yield "flashgen", f"{machine.flashgen}, templates {machine.templates}"
    yield "python", f"{machine.python}, numpy {machine.numpy}, {machine.system}"
    cuda = f"for CUDA {machine.torch_cuda}" if machine.torch_cuda else "without CUDA"
    yield "torch", f"{machine.torch}, built {cuda}"
    yield "nvrtc", _nvrtc(machine)
    if machine.no_gpu:
        yield "gpu", f"none: {machine.no_gpu}"
    for gpu in machine.gpus:
        yield (
            f"gpu {gpu.index}",
            f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
            f"{gpu.sms} SMs, {gpu.memory_bytes / 2**30:.0f} GiB, mode {gpu.compute_mode}",
        )
    for gpu in machine.gpus[:1]:
        yield "driver", f"{gpu.driver}, supports CUDA {gpu.cuda[0]}.{gpu.cuda[1]}"
    for path in found.paths:
        yield "path", f"{path.arch}{' (taken)' if path.taken else ''}: {path.why}"
    for why in found.layouts:
        yield "layouts", why
    kept = machine.cache
    where = f"{kept.folder}, {kept.entries:,} kernels, {kept.bytes:,} B"
    yield "cache", "off" if kept.folder is None else where
    yield "native", machine.native or "calls on a GPU are made without Python"


def _nvrtc(machine: MachineFacts) -> str:
    bindings = f"cuda-bindings {machine.bindings or 'missing'}"
    made = machine.nvrtc
    if made is None:
        return f"unusable, {bindings}"
    archs = f"{made.archs[0]} to {made.archs[-1]}" if made.archs else "no architecture"
    return f"{made.version}, compiles for {archs}, {bindings}; {made.library}"


def _table(results: Sequence[ProblemResult]) -> Iterator[str]:
    titles = ("path", "problem", "result", "error / limit", "equal bits", "bitwise", "seconds")
    rows = [titles, *(_row(each) for each in results)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(titles))]
    for row in rows:
        cells = [
            text.ljust(width) if place < 3 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _row(result: ProblemResult) -> tuple[str, ...]:
    share = "" if result.share is None else f"{result.share:.2f}"
    equal = "" if result.equal is None else f"{result.equal:.2%}"
    outcome = "pass" if result.ok else "WRONG"
    bitwise = str(result.exact or "")
    return (result.arch, result.problem, outcome, share, equal, bitwise, f"{result.seconds:.1f}")


def _summary(found: Diagnosis) -> str:
    if found.findings:
        return f"{len(found.findings)} wrong"
    if found.gpu is None:
        return "no GPU; the compiler and the emulator work"
    return "all well"
