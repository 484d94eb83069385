"""The decision which code path a GPU takes, and the trial of a path that has no verdict yet."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from flashgen.calls.launch import Gpu, gpu_facts, loads
from flashgen.calls.trust import trial, verdicts
from flashgen.calls.trust.verdicts import PathVerdict, Subject, subject_of
from flashgen.kernels.compile import cache
from flashgen.shared import config
from flashgen.shared.arch import paths_of
from flashgen.shared.errors import LaunchError

DOCTOR = "run `flashgen doctor` while no other process uses the GPU, which tries it"


class TrustWarning(UserWarning):
    """A code path is not taken because it failed, or is taken although it was not tried."""


@dataclass(frozen=True)
class Decision:
    """The code path that a GPU takes.

    Attributes:
        arch: the architecture that kernels are compiled for, which names the path.
        why: the reason, in words.
        is_final: whether the decision holds for all later calls of the process.
    """

    arch: str
    why: str
    is_final: bool = True


@dataclass(frozen=True)
class Standing:
    """The state of a path: passed, failed, or None where it has not been tried.

    Attributes:
        why: the proof, the failure, or why the path was not tried.
    """

    passed: bool | None
    why: str


_decided: dict[tuple[Any, int], Decision] = {}
_guard = threading.RLock()


def decide(
    index: int, *, capturing: Callable[[], bool] = lambda: False, driver: Any = None
) -> Decision:
    """The code path of a GPU. A path without a verdict is tried now, once for all processes.

    Args:
        index: the number of the CUDA device.
        capturing: whether the caller's stream is being captured into a CUDA graph; called where
            nothing is decided yet. In a capture nothing is tried, and the decision holds for this
            call only.
        driver: replaces ``cuda.bindings.driver``.

    Raises:
        LaunchError: there is no such device, or every code path of it has failed.
        PlanError: the generation of the GPU is not supported.
        CompileError: NVRTC is missing.
    """
    decision = _decided.get((driver, index))
    if decision is not None:
        return decision
    with _guard:  # threads wait for the trial of the first one
        decision = _decided.get((driver, index))
        if decision is None:
            decision = _chosen(gpu_facts(index, driver=driver), capturing())
            if decision.is_final:
                _decided[driver, index] = decision
        return decision


def forget() -> None:
    """Drops the decisions and verdicts in the memory of the process."""
    with _guard:
        _decided.clear()
    verdicts.forget()


def standing(gpu: Gpu, arch: str) -> Standing:
    """The standing of a path by records and earlier trials, without a trial.

    A failure on this machine counts more than a record, which is of another machine.
    """
    subject = subject_of(gpu, arch)
    verdict = verdicts.read(subject)
    if verdicts.is_proven(subject) and (verdict is None or verdict.passed):
        return Standing(True, f"{arch} is proven on {gpu.name} by flashgen's records")
    if verdict is None:
        return Standing(None, f"{arch} has not been tried on this GPU")
    return _standing_by_verdict(subject, verdict)


def _standing_by_verdict(subject: Subject, verdict: PathVerdict) -> Standing:
    if verdict.passed:
        return Standing(True, f"{subject.arch} passed on this GPU, driver and compiler")
    return Standing(False, f"{subject.arch} failed on this GPU: {verdict.failure}")


def _chosen(gpu: Gpu, capturing: bool) -> Decision:
    paths, mode = paths_of(gpu.arch), config.trust()
    if mode == "always":
        return Decision(paths[0], f"FLASHGEN_TRUST=always: {paths[0]} is taken without a trial")
    if mode == "never":
        return _by_records(gpu, paths)
    hindrance = _hindrance(gpu, capturing)
    standings: dict[str, Standing] = {}
    for arch in paths:
        path_standing = standing(gpu, arch)
        if path_standing.passed is None and hindrance is not None:
            path_standing = Standing(None, f"{path_standing.why}: {hindrance.why}")
        elif path_standing.passed is None:
            path_standing = attempt(gpu, arch)
        standings[arch] = path_standing
        if path_standing.passed:
            break
    why = "; ".join(state.why for state in standings.values())
    untried = [arch for arch, state in standings.items() if state.passed is None]
    temporary = hindrance is not None and hindrance.temporary and bool(untried)
    if not path_standing.passed:
        if not untried:
            raise _every_path_failed(gpu, why)
        arch = untried[-1]
        why += f"; {arch} is taken untried"
    if not temporary and (len(standings) > 1 or not path_standing.passed):
        failed = any(state.passed is False for state in standings.values())
        report = ". Please report the output of `flashgen doctor --json`" if failed else ""
        _warn(f"the code path {arch} is taken on {gpu.name}: {why}{report}")
    return Decision(arch, why, is_final=not temporary)


@dataclass(frozen=True)
class Hindrance:
    """Why nothing can be tried now; ``temporary`` where that can be over at the next call."""

    why: str
    temporary: bool


def _hindrance(gpu: Gpu, capturing: bool) -> Hindrance | None:
    from flashgen.kernels.compile import nvrtc

    if capturing:
        return Hindrance("a CUDA graph is being captured, during which nothing is tried", True)
    if not loads(gpu.cuda, int(nvrtc.version().split(".")[0])):  # a launch raises an error
        return Hindrance("the driver is older than the compiler", True)
    if gpu.is_exclusive:
        return Hindrance(f"the GPU is in exclusive compute mode; {DOCTOR}", False)
    return None


def _by_records(gpu: Gpu, paths: tuple[str, ...]) -> Decision:
    for arch in paths:
        if verdicts.is_proven(subject_of(gpu, arch)):
            return Decision(arch, standing(gpu, arch).why)
    why = f"FLASHGEN_TRUST=never, and no record proves a code path on {gpu.name}"
    _warn(f"{why}: {paths[-1]}, whose instructions every GPU has, is taken")
    return Decision(paths[-1], why)


def attempt(gpu: Gpu, arch: str) -> Standing:
    """Tries a path in a child process; processes that come at the same time wait for the first."""
    subject, root = subject_of(gpu, arch), cache.usable_root()
    # Twice the limit: the holder's child compiles and is then stopped.
    name = f"trust-{subject.key}"
    begin = time.monotonic()
    with nullcontext(True) if root is None else cache.locked(root, name, 2 * trial.SECONDS):
        verdict = verdicts.read(subject)
        if verdict is not None:
            return _standing_by_verdict(subject, verdict)
        if time.monotonic() - begin > 1:
            why = "another process has just tried it without a result"
            return Standing(None, f"{arch} has not been tried: {why}; {DOCTOR}")
        return _tried(gpu, subject)


def _tried(gpu: Gpu, subject: Subject) -> Standing:
    arch = subject.arch
    _tell(f"trying the code path {arch} on {gpu.name}, once, at most {trial.SECONDS:.0f} s ...")
    begin = time.monotonic()
    ended = trial.run(trial.command(arch, gpu.index, "--trial"), seconds=trial.SECONDS)
    took = f"after {time.monotonic() - begin:.0f} s"
    verdict = verdict_of(ended)
    if verdict is None:
        why = f"{arch} could not be tried: {ended.reason or 'there was no problem to run'}"
        _tell(f"{why}, {took}")
        return Standing(None, f"{why}; {DOCTOR}")
    _tell(f"{arch} {'passed' if verdict.passed else 'failed'} {took}")
    verdicts.write(subject, verdict)
    return _standing_by_verdict(subject, verdict)


def verdict_of(ended: trial.Ended) -> PathVerdict | None:
    """The verdict of a child process; None where it proves neither.

    A process that is lost while a problem is on the device has failed. One that cannot use the
    device, or that is stopped while it compiles, proves nothing.
    """
    for result in ended.results:
        if not result["ok"]:
            return PathVerdict(f"{result['problem']}: {result['text']}")
    if ended.lost is not None:
        return PathVerdict(f"{ended.lost}: {ended.reason}")
    return None if ended.reason or not ended.results else PathVerdict()


def _every_path_failed(gpu: Gpu, why: str) -> LaunchError:
    return LaunchError(
        "no code path of this GPU passes its trial",
        where=f"{gpu.name}, CUDA device {gpu.index}, driver {gpu.driver}",
        numbers=why,
        way_out="report the output of `flashgen doctor --json`, which also tries again; until then "
        "CPU tensors, or FLASHGEN_TRUST=always at your own risk",
    )


def _warn(text: str) -> None:
    warnings.warn(text, TrustWarning, stacklevel=4)


def _tell(text: str) -> None:
    print(f"flashgen: {text}", file=sys.stderr, flush=True)
