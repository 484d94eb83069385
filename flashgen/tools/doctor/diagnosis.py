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
OnResult = Callable[[ProblemResult], None]


@dataclass(frozen=True)
class PathOfGpu:
    """A code path of the GPU.

    Attributes:
        taken: whether calls without the argument arch take it.
        why: the reason for its standing.
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
    on_result: OnResult = lambda result: None,
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
        on_result: called with the outcome of each problem when it ends.
    """
    machine = inspect(driver)
    gpu = next((gpu for gpu in machine.gpus if gpu.index == device), None)
    findings = list(unfit(machine, device))
    if machine.gpus and gpu is None:
        known_devices = ", ".join(str(gpu.index) for gpu in machine.gpus)
        findings.append(Finding(f"there is no CUDA device {device}", f"--device {known_devices}"))
    if findings:  # the problems would only fail for the same reasons
        return Diagnosis(machine, gpu, findings=tuple(findings))
    if gpu is None:
        path_run = run_path(DEFAULT_ARCH, NO_DEVICE, PROBLEMS[:1], seconds, tell, on_result)
        path = PathOfGpu(DEFAULT_ARCH, True, "the default of calls that run without a GPU")
        return Diagnosis(machine, None, (path,), path_run.results, path_run.findings)
    results: list[ProblemResult] = []
    for arch in paths_of(gpu.arch):
        path_run = run_path(arch, device, PROBLEMS, seconds, tell, on_result)
        results += path_run.results
        findings += path_run.findings
        if path_run.verdict is not None:
            verdicts.write(verdicts.subject_of(gpu, arch), path_run.verdict)
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
        wrong = next((result for result in self.results if not result.ok), None)
        if wrong is not None:
            return PathVerdict(f"{wrong.problem}: {wrong.text}")
        return None if self.hindrance else PathVerdict()

    @property
    def findings(self) -> tuple[Finding, ...]:
        findings = [
            Finding(f"{result.arch}, {result.problem}: {result.text}", _REPORT)
            for result in self.results
            if not result.ok
        ]
        if self.hindrance:
            findings.append(Finding(f"{self.arch}: {self.hindrance}", _TRY_AGAIN))
        return tuple(findings)


def run_path(
    arch: str,
    device: int,
    problems: Sequence[Problem],
    seconds: float,
    tell: Tell,
    on_result: OnResult = lambda result: None,
) -> PathRun:
    """Runs the problems in a child process; if it crashes, starts another for the remaining ones.

    Args:
        device: the number of the CUDA device, or `NO_DEVICE`.
        seconds: the time limit for all of them.
        tell, on_result: as for `diagnose`.
    """
    deadline = time.monotonic() + seconds
    left = [problem.name for problem in problems]
    results: list[ProblemResult] = []

    def add(result: ProblemResult) -> None:
        results.append(result)
        on_result(result)

    def progress(event: trial.Event) -> None:
        tell(f"{arch}: {event['event']} {event.get('problem', '')}")
        if event["event"] == "result":
            add(ProblemResult(**{f.name: event[f.name] for f in fields(ProblemResult)}))

    while left:
        before = len(results)
        options = [word for name in left for word in ("--problem", name)]
        ended = trial.run(
            trial.command(arch, device, "--emulate", *options),
            seconds=max(1.0, deadline - time.monotonic()),
            tell=progress,
        )
        if ended.lost is not None:
            add(ProblemResult(ended.lost, arch, False, ended.reason))
        if len(results) == before:
            return PathRun(arch, tuple(results), ended.reason or "the child process ran nothing")
        left = left[len(results) - before :]
    return PathRun(arch, tuple(results))


def _paths(gpu: Gpu, driver: Any) -> tuple[PathOfGpu, ...]:
    """The code paths, and which one a call without the argument arch takes now."""
    standings = {arch: decision.standing(gpu, arch) for arch in paths_of(gpu.arch)}
    why = {arch: standing.why for arch, standing in standings.items()}
    chosen_arch = config.arch()
    if chosen_arch is not None:
        why[chosen_arch] = f"FLASHGEN_ARCH; {why.get(chosen_arch, 'not tried')}"
    else:
        with suppress(LaunchError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the screen shows it
            # As in a capture: nothing is tried again.
            chosen = decision.decide(gpu.index, capturing=lambda: True, driver=driver)
            chosen_arch = chosen.arch
            if not standings[chosen_arch].passed:
                why[chosen_arch] = chosen.why
    return tuple(PathOfGpu(arch, arch == chosen_arch, reason) for arch, reason in why.items())


def _layouts(paths: Sequence[PathOfGpu]) -> Iterator[str]:
    """Which path calls without the argument arch take for a block layout, and why."""
    arch = next((path.arch for path in paths if path.taken), None)
    if arch is None or config.arch() is not None:
        return
    for spec in (problem.spec() for problem in PROBLEMS):
        yield from (path.why for path in paths_of_layout(spec, arch))


# ---- the screen ----------------------------------------------------------------------------------


def _screen(diagnosis: Diagnosis) -> Iterator[str]:
    for name, value in _machine_rows(diagnosis):
        yield f"{name:<10} {value}"
    if diagnosis.results:
        yield ""
        yield from _table(diagnosis.results)
    for finding in diagnosis.findings:
        yield ""
        yield f"wrong      {finding.what}"
        yield f"try        {finding.way_out}"
    yield ""
    yield f"result     {_summary(diagnosis)}"


def _machine_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    machine = diagnosis.machine
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
    for path in diagnosis.paths:
        yield "path", f"{path.arch}{' (taken)' if path.taken else ''}: {path.why}"
    for why in diagnosis.layouts:
        yield "layouts", why
    cache = machine.cache
    where = f"{cache.folder}, {cache.entries:,} kernels, {cache.bytes:,} B"
    yield "cache", "off" if cache.folder is None else where
    yield "native", machine.native or "calls on a GPU are made without Python"


def _nvrtc(machine: MachineFacts) -> str:
    bindings = f"cuda-bindings {machine.bindings or 'missing'}"
    nvrtc = machine.nvrtc
    if nvrtc is None:
        return f"unusable, {bindings}"
    archs = f"{nvrtc.archs[0]} to {nvrtc.archs[-1]}" if nvrtc.archs else "no architecture"
    return f"{nvrtc.version}, compiles for {archs}, {bindings}; {nvrtc.library}"


def _table(results: Sequence[ProblemResult]) -> Iterator[str]:
    titles = ("path", "problem", "result", "error / limit", "equal bits", "bitwise", "seconds")
    rows = [titles, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    for row in rows:
        cells = [
            text.ljust(width) if column < 3 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _row(result: ProblemResult) -> tuple[str, ...]:
    share = "" if result.share is None else f"{result.share:.2f}"
    equal = "" if result.equal is None else f"{result.equal:.2%}"
    outcome = "pass" if result.ok else "WRONG"
    bitwise = str(result.exact or "")
    return (result.arch, result.problem, outcome, share, equal, bitwise, f"{result.seconds:.1f}")


def _summary(diagnosis: Diagnosis) -> str:
    if diagnosis.findings:
        return f"{len(diagnosis.findings)} wrong"
    if diagnosis.gpu is None:
        return "no GPU; the compiler and the emulator work"
    return "all well"
