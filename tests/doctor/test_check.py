"""One problem of doctor: right in the emulator, and wrong where a result is made wrong."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.kernels.pipeline import build, build_backward
from flashgen.shared.errors import CompileError, LaunchError
from flashgen.shared.paths import PATHS
from flashgen.tools.doctor import check, child
from flashgen.tools.doctor.check import ProblemResult
from flashgen.tools.doctor.problems import PROBLEMS, Problem, named
from tests.support.tiers import slow

CPU = torch.device("cpu")
TRIAL = [problem for problem in PROBLEMS if problem.trial]


ON_PATHS = [(arch, each.name) for arch in PATHS for each in PROBLEMS]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "problem"), ON_PATHS)
def test_every_problem_is_right_in_the_emulator(arch: str, problem: str) -> None:
    found = check.run(named(problem), arch, CPU, emulate=False)
    assert found.ok, found.text
    assert found.share is not None
    assert found.share < 1


def test_names_of_problems_are_unique_and_the_trial_has_few() -> None:
    assert len({problem.name for problem in PROBLEMS}) == len(PROBLEMS)
    assert 3 <= len(TRIAL) <= 6
    kinds = {(problem.spec().dtype, problem.spec().head_dim) for problem in PROBLEMS}
    assert {dtype for dtype, _ in kinds} == {"float16", "bfloat16", "float32"}
    assert {40, 64, 128, 256} <= {dim for _, dim in kinds}
    assert any(problem.sizes[4] == 1 for problem in TRIAL)
    assert any(problem.sizes[4] == 3 for problem in TRIAL)
    assert any(problem.spec().packed and problem.poisoned for problem in TRIAL)
    assert any(problem.dropout_p for problem in TRIAL)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("problem", TRIAL[1:2], ids=lambda problem: problem.name)
def test_a_trial_compiles_nothing_once_a_problem_runs(
    problem: Problem, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped while it compiles must not count as a kernel that hangs."""
    compiled = []
    real = check.run_forward

    def recording(*given: Any, **more: Any) -> Any:
        from flashgen.kernels import pipeline

        monkeypatch.setattr(pipeline, "compile", lambda *a, **b: compiled.append(a))
        return real(*given, **more)

    monkeypatch.setattr(check, "run_forward", recording)
    assert check.run(problem, arch, CPU, emulate=False).ok
    assert compiled == []


@pytest.mark.slow
def test_a_table_is_compared_bit_for_bit_and_one_bit_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = named("documents, float16, d 64")
    runs = check._runs(problem, problem.inputs(), "sm_80")
    bits = check.compare_bits(runs, runs)
    assert (bits.equal, bits.exact, bits.wrong) == (1.0, 2, ())  # a table in each pass
    (report,) = runs.forward.report.tables
    assert report.table is not None
    table = report.table.clone()
    table[0, 0, 0, 0] ^= 1
    main = replace(runs.forward.report, tables=(replace(report, table=table),))
    other = replace(runs, forward=replace(runs.forward, report=main))
    bits = check.compare_bits(other, runs)
    assert bits.wrong == ("documents_minmax_ids_1",)
    assert bits.equal < 1
    # A problem with such a result is wrong, although it meets the error rule.
    monkeypatch.setattr(check, "_runs", lambda *given: runs)
    monkeypatch.setattr(check, "_on_cpu", lambda found: other)
    found = check.run(problem, "sm_80", CPU, emulate=True)
    assert not found.ok
    assert "documents_minmax_ids_1: not the emulator's bits" in found.text
    assert (found.exact, found.share is not None and found.share < 1) == (2, True)


@pytest.mark.parametrize(("sums", "gpu"), [("hardware", "sm_80"), slow("rounded", None)])
def test_sums_of_tensor_cores_are_those_of_the_gpu_unless_the_emulator_rounds_them(
    monkeypatch: pytest.MonkeyPatch, sums: str, gpu: str | None
) -> None:
    given = []
    monkeypatch.setenv("FLASHGEN_EMULATOR_SUMS", sums)
    monkeypatch.setattr(check, "open_instructions", lambda ptx, gpu: given.append(gpu) or ["one"])
    assert check.run(TRIAL[0], "sm_80", CPU, emulate=True).ok
    assert set(given) == {gpu}


def test_the_share_of_equal_elements_counts_bits() -> None:
    problem = TRIAL[0]
    runs = check._runs(problem, problem.inputs(), "sm_80")
    out = runs.forward.out.clone()
    out.view(torch.int16)[0, 0, 0, :7] ^= 1
    other = replace(runs, forward=replace(runs.forward, out=out))
    every = [runs.forward.out, runs.forward.lse, runs.backward.dq, runs.backward.dk]
    total = sum(each.numel() for each in (*every, runs.backward.dv))
    bits = check.compare_bits(runs, other)
    assert bits.equal == pytest.approx(1 - 7 / total)
    assert bits.wrong == ()  # PTX leaves the bits of exp2 open


@pytest.mark.parametrize("spoil", [torch.nan, 1.0])
def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch, spoil: float) -> None:
    real = check._on_cpu

    def spoiled(runs: check.Runs) -> check.Runs:
        found = real(runs)
        found.backward.dk[0, 0, 0, 0] += spoil
        return found

    monkeypatch.setattr(check, "_on_cpu", spoiled)
    found = check.run(TRIAL[0], "sm_80", CPU, emulate=False)
    assert not found.ok
    assert found.text.startswith("dk FAIL")
    assert found.share is None if spoil != 1.0 else (found.share or 0) > 1


# ---- the child process ---------------------------------------------------------------------------


def events_of(runner: child.Runner) -> list[dict[str, Any]]:
    out = io.StringIO()
    child.report(PROBLEMS[:2], "sm_80", runner, out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def right(problem: Problem, step: check.Step) -> ProblemResult:
    step("building")
    step("running")
    return ProblemResult(problem.name, "sm_80", True, "out pass", 0.5)


def test_each_step_is_an_event() -> None:
    found = [each["event"] for each in events_of(right)]
    assert found == ["ready", *["building", "running", "result"] * 2, "end"]


def test_an_error_on_the_device_is_a_result_and_the_last_one() -> None:
    def failing(problem: Problem, step: check.Step) -> ProblemResult:
        right(problem, step)
        raise LaunchError("a kernel failed", where="here", numbers="code 719", way_out="none")

    found = events_of(failing)
    assert [each["event"] for each in found] == ["ready", "building", "running", "result"]
    assert not found[-1]["ok"]
    assert "code 719" in found[-1]["text"]


@pytest.mark.parametrize(
    ("when", "error"),
    [
        ("building", CompileError("no NVRTC", where="", numbers="", way_out="")),
        ("running", torch.OutOfMemoryError("CUDA out of memory")),
    ],
)
def test_what_says_nothing_about_the_kernels_is_no_result(when: str, error: Exception) -> None:
    def failing(problem: Problem, step: check.Step) -> ProblemResult:
        step(when)
        raise error

    with pytest.raises(type(error)):
        events_of(failing)


@pytest.mark.slow
def test_kernels_of_a_problem_are_those_that_build_gives() -> None:
    problem = TRIAL[2]
    runs = check._runs(problem, problem.inputs(), "sm_80")
    assert runs.forward.report.kernel is build(problem.spec(), "sm_80", access_bytes=16)
    made = [report.kernel for report in runs.backward.reports]
    assert made == list(build_backward(problem.spec(), "sm_80"))
