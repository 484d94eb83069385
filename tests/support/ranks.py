"""Functions on several processes of a gloo group: each is a rank, and imports the function anew."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT


def start_ranks(
    world: int, functions: Sequence[str], folder: Path, seconds: float = 120
) -> list[subprocess.Popen[bytes]]:
    """Starts the ranks; each calls ``module:function`` by turns and writes what they return.

    Args:
        seconds: the time limit of the group.
    """
    names = ",".join(functions)
    command = [sys.executable, "-m", "tests.support.ranks", str(world), str(folder), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen([*command, str(rank), names], cwd=ROOT, env=environment)
        for rank in range(world)
    ]


def run_ranks(
    world: int, functions: Sequence[str], seconds: float = 120
) -> list[dict[str, tuple[Any, str]]]:
    """For each rank and function what it returned, and the traceback of its exception or ""."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = start_ranks(world, functions, folder, seconds)
        for rank in ranks:
            rank.wait(seconds * 2)
        return [results_of(folder, number) for number in range(world)]


def run_ranks_once(
    folder: Path, world: int, functions: Sequence[str]
) -> list[dict[str, tuple[Any, str]]]:
    """The result of `run_ranks`, for all processes of a test run that have the folder."""
    file = folder / f"ranks-{world}-{hashlib.sha256(repr(functions).encode()).hexdigest()}.pickle"
    with (folder / "ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_bytes(pickle.dumps(run_ranks(world, functions)))
    found: list[dict[str, tuple[Any, str]]] = pickle.loads(file.read_bytes())
    return found


def results_of(folder: Path, rank: int) -> dict[str, tuple[Any, str]]:
    file = folder / f"rank{rank}.pickle"
    found: dict[str, tuple[Any, str]] = pickle.loads(file.read_bytes()) if file.exists() else {}
    return found


def _main(world: str, folder: str, seconds: str, rank: str, names: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=float(seconds)),
    )
    results: dict[str, tuple[Any, str]] = {}
    for name in names.split(","):
        module, _, function = name.partition(":")
        try:
            results[name] = getattr(importlib.import_module(module), function)(), ""
        except Exception:
            results[name] = None, traceback.format_exc()
        Path(folder, f"rank{rank}.pickle").write_bytes(pickle.dumps(results))
    os._exit(0)  # without waiting for ranks that have ended


if __name__ == "__main__":
    _main(*sys.argv[1:])
