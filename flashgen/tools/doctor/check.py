"""One problem on a device: compared with the float64 reference and with the emulator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flashgen.calls.launch import device_arch
from flashgen.calls.ops import BackwardRun, ForwardRun, run_backward, run_forward
from flashgen.calls.runtime.reports import Report
from flashgen.reference import Verdict
from flashgen.shared import config
from flashgen.shared.call import Inputs
from flashgen.tools.doctor.exactness import open_instructions
from flashgen.tools.doctor.problems import Problem
from flashgen.tools.tune.measure import judge_of

if TYPE_CHECKING:
    from flashgen.kernels.pipeline import Build

Tensor = torch.Tensor
Step = Callable[[str], None]


@dataclass(frozen=True)
class ProblemResult:
    """The outcome of one problem.

    Attributes:
        problem, arch: the problem's name, and the architecture that its kernels were compiled for.
        ok: whether every result meets the error rule and, where bits are determined, has them.
        text: the result that is furthest beyond its limit or nearest to it; or the error.
        share: the error of that result divided by its limit; None where nothing was compared, and
            where the result has NaN or infinities that do not match.
        equal: the share of elements whose bits are those of the emulator; None without it.
        exact: the number of results whose bits are determined and that were compared bit for bit.
        seconds: duration, compilation and comparison included.
    """

    problem: str
    arch: str
    ok: bool
    text: str
    share: float | None = None
    equal: float | None = None
    exact: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Runs:
    """The forward and the backward run of a problem."""

    forward: ForwardRun
    backward: BackwardRun


def run(
    problem: Problem,
    arch: str,
    device: torch.device,
    *,
    emulate: bool,
    step: Step = lambda name: None,
) -> ProblemResult:
    """Runs a problem and compares it.

    Args:
        device: a CUDA device; on the CPU the emulator takes its place.
        emulate: whether to run the problem in the emulator too, and compare its bits.
        step: called with "building" before kernels are compiled, with "running" before they are
            launched, and with "comparing" when their results have arrived.

    Raises:
        FlashgenError: a kernel cannot be compiled or launched.
    """
    begin = time.perf_counter()
    step("building")
    _build(problem, arch)
    step("running")
    runs = _on_cpu(_runs(problem, problem.inputs(device), arch))
    step("comparing")
    clean, spec = problem.inputs(poison=False), problem.spec()
    verdicts = {
        **judge_of(spec, clean, "forward")(runs.forward),
        **judge_of(spec, clean, "backward")(runs.backward),
    }
    worst = max(verdicts, key=lambda name: (not verdicts[name], _share(verdicts[name])))
    ok, text = all(verdicts.values()), f"{worst} {verdicts[worst]}"
    bits = Bits()
    if emulate:
        emulated = _runs(problem, problem.inputs(), arch, runs.forward)
        bits = compare_bits(runs, emulated, _gpu(device, arch))
        if ok and bits.wrong:
            ok = False
            text = f"{', '.join(bits.wrong)}: not the emulator's bits, which are determined"
    share = _share(verdicts[worst])
    return ProblemResult(
        problem.name,
        arch,
        ok,
        text,
        share if math.isfinite(share) else None,
        bits.equal if emulate else None,
        bits.exact,
        time.perf_counter() - begin,
    )


def _build(problem: Problem, arch: str) -> None:
    """Compiles the kernels of a problem, so that running it needs no compiler."""
    from flashgen.kernels.pipeline import build, build_backward, build_minmax_tables

    spec = problem.spec()
    build(spec, arch, access_bytes=16)
    build_backward(spec, arch)
    build_minmax_tables(spec, arch)


def _runs(problem: Problem, inputs: Inputs, arch: str, first: ForwardRun | None = None) -> Runs:
    """Both passes where the inputs are: on a GPU, or in the emulator.

    Args:
        first: the forward run whose results the backward pass takes instead of its own.
    """
    spec = problem.spec()
    run_options: dict[str, Any] = {"arch": arch, "backend": "gpu", **inputs.options}
    if inputs.operands[0].device.type == "cpu":
        run_options |= {"backend": "emulator", "check_memory": False}
    forward = run_forward(spec, *inputs.operands, **run_options)
    forward_results = first or forward
    arguments = (*inputs.operands, forward_results.out, forward_results.lse, *inputs.gradients)
    return Runs(forward, run_backward(spec, *arguments, **run_options, deterministic=False))


def _on_cpu(runs: Runs) -> Runs:
    """The runs with their tensors on the CPU, which waits for the device."""

    def with_table(report: Report) -> Report:
        return report if report.table is None else replace(report, table=report.table.cpu())

    forward, backward = runs.forward, runs.backward
    main = replace(forward.report, tables=tuple(map(with_table, forward.report.tables)))
    return Runs(
        replace(forward, out=forward.out.cpu(), lse=forward.lse.cpu(), report=main),
        replace(
            backward,
            dq=backward.dq.cpu(),
            dk=backward.dk.cpu(),
            dv=backward.dv.cpu(),
            captured=tuple(gradient.cpu() for gradient in backward.captured),
            reports=tuple(map(with_table, backward.reports)),
        ),
    )


def _share(verdict: Verdict) -> float:
    """The error divided by its limit; infinite for NaN and infinities that do not match."""
    if verdict.nans or verdict.infinities:
        return math.inf
    return verdict.max_error / verdict.max_allowed


# ---- bits ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bits:
    """The comparison of results bit for bit.

    Attributes:
        equal: the share of elements with the same bits.
        exact: the number of results whose bits are determined.
        wrong: the names of the determined results that differ.
    """

    equal: float = 1.0
    exact: int = 0
    wrong: tuple[str, ...] = ()


def _gpu(device: torch.device, arch: str) -> str | None:
    """The architecture whose tensor cores the emulator models; None where its sums are rounded."""
    if config.emulator_sums() != "hardware":
        return None
    return arch if device.type == "cpu" else device_arch(device.index or 0)


def compare_bits(left: Runs, right: Runs, gpu: str | None = None) -> Bits:
    """Compares two runs of the same problem, whose backward passes had the same inputs.

    Args:
        gpu: the architecture of the GPU of ``left``, if sums of tensor cores count as determined
            where the emulator adds as this GPU does.
    """
    same = total = exact = 0
    wrong = []
    for (name, tensor, kernels), (_, other, _) in zip(_results(left), _results(right), strict=True):
        equal = _bits(tensor) == _bits(other)
        same, total = same + int(equal.sum()), total + equal.numel()
        if not any(open_instructions(kernel.ptx, gpu) for kernel in kernels):
            exact += 1
            wrong += [] if equal.all() else [name]
    return Bits(same / max(total, 1), exact, tuple(wrong))


def _results(runs: Runs) -> Iterator[tuple[str, Tensor, tuple[Build, ...]]]:
    """Each result with its name and the kernels that it comes from."""
    forward, backward = runs.forward, runs.backward
    for report in (*forward.report.tables, *backward.reports):
        if report.table is not None and report.kernel is not None:
            yield report.kernel.source.name, _defined(report.table), (report.kernel,)
    if forward.report.kernel is not None:
        for name, tensor in (("out", forward.out), ("lse", forward.lse)):
            yield name, tensor, (forward.report.kernel,)
    kernels = tuple(r.kernel for r in backward.reports if r.kernel is not None and r.table is None)
    for index, tensor in enumerate((backward.dq, backward.dk, backward.dv, *backward.captured)):
        yield f"gradient {index}", tensor, kernels


def _defined(table: Tensor) -> Tensor:
    """The entries of a min/max table that its kernel writes, as one row."""
    entries = table.shape[3]
    rows = [table[level, ..., : entries - (1 << level) + 1] for level in range(table.shape[0])]
    return torch.cat([row.flatten() for row in rows])


def _bits(tensor: Tensor) -> Tensor:
    """The bit patterns: NaN equals itself, and -0 differs from 0."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])
