"""Functions on several processes of a gloo group, each a rank."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from tests.support.paths import ROOT

LIMIT = timedelta(seconds=240)
"""Of a transfer: less than pytest gives a test, so that a rank that waits in vain can say so."""


def run_ranks(world: int, functions: Sequence[str]) -> list[dict[str, tuple[Any, str]]]:
    """For each rank and function what it returned, and the traceback of its exception or "".

    Each rank calls ``module:function`` by turns. The time limit is that of the test, at which
    pytest raises here; no rank outlives the call.
    """
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "tests.support.ranks", str(world), name]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ranks = subprocess.Popen(
            [*command, ",".join(functions)], cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            ranks.wait()
        except BaseException:
            os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()
            raise
        return [results_of(Path(name), number) for number in range(world)]


def returned_by(ranks: Sequence[dict[str, tuple[Any, str]]], function: str) -> list[Any]:
    """What each rank returned for a function; fails with the traceback of a rank."""
    for number, results in enumerate(ranks):
        _, error = results[function]
        assert not error, f"rank {number}: {error}"
    return [results[function][0] for results in ranks]


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


def _main(world: str, folder: str, names: str) -> None:
    """Starts the ranks as copies of one process that has imported what all of them need."""
    modules = [name.partition(":")[0] for name in names.split(",")]
    for module in (*modules, "torch._inductor.compile_fx"):  # Dynamo's, at the first compilation
        with suppress(Exception):  # each rank reports it
            importlib.import_module(module)
    ranks = []
    for rank in range(int(world)):
        child = os.fork()
        if child == 0:
            _be_rank(rank, int(world), Path(folder), names.split(","))
        ranks.append(child)
    for child in ranks:
        os.waitpid(child, 0)


def _be_rank(rank: int, world: int, folder: Path, names: Sequence[str]) -> NoReturn:
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=LIMIT,
        )
        results: dict[str, tuple[Any, str]] = {}
        for name in names:
            module, _, function = name.partition(":")
            try:
                results[name] = getattr(importlib.import_module(module), function)(), ""
            except Exception:
                results[name] = None, traceback.format_exc()
            (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(results))
    finally:
        os._exit(0)  # without waiting for ranks that have ended


if __name__ == "__main__":
    _main(*sys.argv[1:])
