"""`flashgen doctor`: every code path on its problems, against float64 and against the emulator.

Each problem is recorded when it ends, and a path that has passed all of them as passed, which
`benchmarks.suite.proven` reads. In a dry run the emulator takes the GPU's place, with one problem
on Hopper's path; the part "packed" has one on the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.suite.context import Context
from flashgen.kernels.codegen.environment import template_digest
from flashgen.tools.doctor.check import ProblemResult
from flashgen.tools.doctor.diagnosis import NO_DEVICE, PathRun, diagnose, run_path
from flashgen.tools.doctor.problems import PROBLEMS

DRY_PATH = "sm_90a"


def run(context: Context) -> None:
    # For each path; the second one seldom needs all that the first one left.
    seconds = 0.6 * context.budget.left
    results_by_arch: dict[str, list[ProblemResult]] = {}

    def alive(text: str) -> None:
        context.journal.path.touch()

    def on_result(result: ProblemResult) -> None:
        """Its rows at once: this process may be stopped before the next problem ends."""
        results = results_by_arch.setdefault(result.arch, [])
        results.append(result)
        record(context, result)
        if not result.ok:
            context.journal.failed(f"doctor: {result.arch}, {result.problem}: {result.text}")
        if len(results) == len(PROBLEMS):
            passed(context, result.arch, results)

    if context.device.kind == "gpu":
        ended = diagnose(
            context.device.torch.index or 0, seconds=seconds, tell=alive, on_result=on_result
        )
        (context.work / "doctor.log").write_text(str(ended), encoding="utf-8")
        wrong, paths = ended.findings, {path.arch for path in ended.paths}
    else:
        wrong = run_path(DRY_PATH, NO_DEVICE, PROBLEMS[:1], seconds, alive, on_result).findings
        paths = {DRY_PATH}
    findings = [
        f for results in results_by_arch.values() for f in PathRun("", tuple(results)).findings
    ]
    for finding in wrong:
        if finding not in findings:
            context.journal.failed(f"doctor: {finding.what}; {finding.way_out}")
    for arch in sorted(paths):
        if len(results_by_arch.get(arch, ())) < len(PROBLEMS):
            passed(context, arch, results_by_arch.get(arch, ()))


def passed(context: Context, arch: str, results: Sequence[ProblemResult]) -> None:
    """The row that says whether a path has passed all problems."""
    right = len(results) == len(PROBLEMS) and all(result.ok for result in results)
    setting, note = f"templates={template_digest()}", f"{len(results)} problems"
    context.writer.measure(arch, "path passed", int(right), "", setting, note)


def record(context: Context, result: ProblemResult) -> None:
    """The rows of one problem."""
    setting = f"path={result.arch}"

    def measure(metric: str, value: object, note: str = "") -> None:
        context.writer.measure(result.problem, metric, value, "", setting, note)

    measure("right", int(result.ok), result.text)
    if result.share is not None:
        measure("error / allowed", result.share)
    if result.equal is not None:
        measure("bits equal to the emulator's", result.equal)
