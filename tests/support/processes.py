"""Python in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def run_python(
    *arguments: object,
    cwd: Path = ROOT,
    path: Path = ROOT,
    status: tuple[int, ...] | None = (0,),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """The finished process, which prints text.

    Args:
        path: what PYTHONPATH is.
        status: what its exit status may be, else its output is shown; None: any.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path), **environment},
    )
    assert status is None or done.returncode in status, done.stdout[-4000:] + done.stderr[-4000:]
    return done
