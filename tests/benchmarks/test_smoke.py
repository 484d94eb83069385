"""Each script of benchmarks/ runs to its end on the smallest sizes."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.tiers import slow

SCRIPTS = {
    "build.py": "specs/full.py",
    "cpu.py": "--length 64 --heads 2 --rounds 1 --calls 2",
    "compile_all.py": "--arch sm_90a specs/full.py",
    "instructions.py": "--head-dim 64 specs/full.py",
    "lines.py": "",
    "overhead.py": "--calls 2 --rounds 2",
    "report.py": "",
    "work_per_score.py": "--variants=full --head-dims=128 --output=OUT/work.json",
}
# The parts of work_per_score.py have tests of their own, compile_all.py is the test of every
# release of NVRTC, lines.py reads all files, and the others measure times.
SLOW = (
    "build.py",
    "compile_all.py",
    "lines.py",
    "overhead.py",
    "work_per_score.py",
)
ELSEWHERE = {
    "chosen_keys.py": "test_chosen_keys.py",
    "gpu.py": "test_dry.py",
    "emulator.py": "below",
    "fit_duration.py": "test_fit_duration.py",
    "peer_kernels.py": "test_peer_kernels.py",
    "peers.py": "test_peers.py",
    "statistic_bytes.py": "test_statistic_bytes.py",
}


def test_every_script_of_the_benchmarks_has_a_smoke_test() -> None:
    found = [path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert {path.name for path in found} == SCRIPTS.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("script", [slow(n) if n in SLOW else n for n in SCRIPTS])
def test_a_benchmark_runs_on_the_smallest_sizes(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its exit code is 1 where times on a busy machine, or sizes too small, exceed a limit."""
    arguments = SCRIPTS[script].replace("OUT", str(tmp_path)).split()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which a script adds the repository
    monkeypatch.chdir(ROOT)
    # Given back afterwards: compile_all.py turns the cache off.
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", os.environ["FLASHGEN_CACHE_DIR"])
    if script == "overhead.py":  # it pretends that there is a GPU
        print(run_python(f"benchmarks/{script}", *arguments, status=(0, 1)).stdout)
    else:
        with contextlib.suppress(SystemExit):
            runpy.run_path(f"benchmarks/{script}", run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) > 2 or script == "report.py"
    if "OUT" in SCRIPTS[script]:
        assert list(tmp_path.iterdir())


def test_the_emulator_is_measured_with_checkers_and_with_both_kinds_of_sums(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import emulator

    monkeypatch.setenv("FLASHGEN_EMULATOR_SUMS", "")  # given back afterwards
    monkeypatch.setattr(emulator, "REPEATS", 2)
    monkeypatch.setattr(emulator, "TARGETS", {})
    emulator.main(((1, 64),))
    out = capsys.readouterr().out
    row = r"^ +1 x 64 +1 +\d\.\d{3} +\d\.\d{3} +\d+\.\d\d +[\d.]+ +\d\.\d{3} +\d+\.\d\d$"
    assert re.search(row, out, re.MULTILINE), out
    assert re.search(r"^[1-9][\d,]+ warp instructions", out, re.MULTILINE), out


def test_lines_count_code_and_control_lines_alone() -> None:
    from benchmarks import lines

    python = (
        '"""Doc."""\n\n# why\nx = (\n    1,  # one\n)\n\n\n'
        'def f():\n    """Doc.\n\n    More.\n    """\n    return """a\nb"""\n'
    )
    assert lines.code_lines_of_python(python) == 6
    template = (
        "//# comment of Jinja\n/*# another\nof two lines #*/\n// comment\n\n"
        '/*% include "x" %*/\n/*% if a %*/\n  int b = /*{ b }*/;  // why\n/*% set c =\n  1 %*/\n'
        "//% endif\n/*% if d %*/ /*% endif %*/\n/*{ e }*/\n/*% if f %*/ g /*% endif %*/\n"
    )
    assert lines.code_lines_of_template(template) == 9
    assert lines.control_lines(template) == 5
