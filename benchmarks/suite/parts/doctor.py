"""`flashgen doctor`: every code path on its problems, against float64 and against the emulator.

A path that passes all of them is recorded as passed, which `benchmarks.suite.proven` reads. In a
dry run the emulator takes the GPU's place, with one problem on Hopper's path; the part "packed" has
one on the other.
"""

from __future__ import annotations

from benchmarks.suite.context import Context
from flashgen.kernels.codegen.environment import template_digest
from flashgen.tools.doctor.check import ProblemResult
from flashgen.tools.doctor.diagnosis import NO_DEVICE, diagnose, run_path
from flashgen.tools.doctor.problems import PROBLEMS

DRY_PATH = "sm_90a"


def run(context: Context) -> None:
    # For each path; the second one seldom needs all that the first one left.
    seconds = 0.6 * context.budget.left

    def alive(text: str) -> None:
        context.journal.path.touch()

    if context.device.kind == "gpu":
        found = diagnose(context.device.torch.index or 0, seconds=seconds, tell=alive)
        (context.work / "doctor.log").write_text(str(found), encoding="utf-8")
        results, wrong = found.results, found.findings
        paths = {path.arch for path in found.paths}
    else:
        ran = run_path(DRY_PATH, NO_DEVICE, PROBLEMS[:1], seconds, alive)
        results, wrong, paths = ran.results, ran.findings, {DRY_PATH}
    for result in results:
        record(context, result)
    for finding in wrong:
        context.journal.failed(f"doctor: {finding.what}; {finding.way_out}")
    for arch in sorted(paths):
        right = [result.ok for result in results if result.arch == arch]
        passed = len(right) == len(PROBLEMS) and all(right)
        note, setting = f"{len(right)} problems", f"templates={template_digest()}"
        context.writer.measure(arch, "path passed", int(passed), "", setting, note)


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
