"""Each script of benchmarks/ runs to its end on the smallest sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.tiers import slow

SCRIPTS: dict[str, list[str]] = {
    "build.py": ["specs/full.py"],
    "instructions.py": ["--head-dim", "64", "specs/full.py"],
    "overhead.py": ["--calls", "2", "--rounds", "2"],
    "paper.py": ["--length", "64", "--no-figures", "--densities", "0.5", "--output", "OUT"],
    "ranking.py": [
        "--head-dims",
        "32",
        "--length",
        "64",
        "--every",
        "30",
        "--output",
        "OUT/ranking.json",
    ],
    "report.py": [],
    "work_per_score.py": ["--variants=full", "--head-dims=64", "--output=OUT/work.json"],
}
MANY_KERNELS = ("paper.py",)
ELSEWHERE = {"gpu.py": "test_dry.py", "emulator.py": "test_emulator.py"}


def test_every_script_of_the_benchmarks_has_a_smoke_test() -> None:
    found = [path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert {path.name for path in found} == SCRIPTS.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("script", [slow(n) if n in MANY_KERNELS else n for n in SCRIPTS])
def test_a_benchmark_runs_on_the_smallest_sizes(script: str, tmp_path: Path) -> None:
    """Exit code 1 is a limit that is exceeded: times on a busy machine, or sizes too small."""
    arguments = [argument.replace("OUT", str(tmp_path)) for argument in SCRIPTS[script]]
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) > 2 or script == "report.py"
    if "OUT" in " ".join(SCRIPTS[script]):
        assert list(tmp_path.iterdir())
