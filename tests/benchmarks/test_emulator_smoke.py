"""benchmarks/emulator.py runs, at its smallest size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())


def test_the_smallest_size_is_measured_with_and_without_checkers() -> None:
    # In a process of its own: the benchmark sets the number of BLAS threads.
    program = "import benchmarks.emulator as b; b.REPEATS = 2; b.TARGETS = {}; b.main(((1, 64),))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +1 x 64 +1 +\d\.\d{3} +\d\.\d{3}", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^[1-9][\d,]+ warp instructions", done.stdout, re.MULTILINE), done.stdout
