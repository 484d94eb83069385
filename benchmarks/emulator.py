"""Speed of the emulator on the emitted causal forward (fp16, head_dim 64, sm_80).

Prints seconds per launch with the checkers off and on, and the time per tile as the problem grows.
Run from the repository: ``python benchmarks/emulator.py``. Exits 1 when a target is missed:
1 head x 256 tokens under 0.1 s, 16 heads x 1024 tokens under 1 s, checkers at most 4 times as slow.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# Threads that spin in small matrix products cost far more than they bring.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import flashgen as fg  # noqa: E402
from flashgen import emulator  # noqa: E402
from flashgen.emulator import Counters  # noqa: E402
from flashgen.pipeline import Build  # noqa: E402

HEAD_DIM = 64
REPEATS = 4
TARGETS = {(1, 256): 0.1, (16, 1024): 1.0}
CHECKED_FACTOR = 4.0


def measure(kernel: Build, heads: int, tokens: int, check: bool) -> tuple[float, Counters]:
    """Best wall time of a launch in seconds, after one that compiles the segments."""
    rng = np.random.default_rng(0)
    shape = (1, heads, tokens, HEAD_DIM)
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for _ in range(3))
    o, lse = np.zeros_like(q), np.zeros(shape[:3], np.float32)
    strides = [np.int64(s // 2) for s in q.strides[:3]]
    sizes = [np.int32(n) for n in (1, heads, heads, tokens, tokens, 0, 0)]
    values = (q, k, v, o, lse, *strides * 4, *sizes, np.float32(HEAD_DIM**-0.5))
    plan = kernel.plan
    grid = -(-tokens // plan.block_q) * heads
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        counters = emulator.launch(
            kernel.ptx,
            kernel.source.name,
            grid,
            plan.threads,
            [values],
            plan.smem_bytes,
            check=check,
        )
        best = min(best, time.perf_counter() - begin)
    return best, counters


def tiles(kernel: Build, heads: int, tokens: int) -> int:
    """Tiles of the causal walk."""
    rows, columns = kernel.plan.block_q, kernel.plan.block_k
    return heads * sum(-(-min(first + rows, tokens) // columns) for first in range(0, tokens, rows))


def main() -> int:
    spec = fg.load(str(ROOT / "specs" / "causal.py")).replace(dtype="float16", head_dim=HEAD_DIM)
    kernel = fg.build(spec, "sm_80")
    plan = kernel.plan
    print(f"causal fp16 d={HEAD_DIM}, tile {plan.block_q} x {plan.block_k}, {plan.warps} warps")
    print(
        f"{'heads x tokens':>16} {'tiles':>6} {'off s':>8} {'on s':>8} {'on/off':>7} {'us/tile':>8}"
    )
    missed = []
    for heads, tokens in ((1, 256), (16, 256), (16, 512), (16, 1024), (16, 2048)):
        plain, counters = measure(kernel, heads, tokens, False)
        checked, _ = measure(kernel, heads, tokens, True)
        count = tiles(kernel, heads, tokens)
        print(
            f"{heads:>7} x {tokens:<6} {count:>6} {plain:8.3f} {checked:8.3f} "
            f"{checked / plain:7.2f} {plain / count * 1e6:8.1f}"
        )
        target = TARGETS.get((heads, tokens))
        if target is not None and plain > target:
            missed.append(f"{heads} x {tokens}: {plain:.3f} s, target {target} s")
        if target is not None and checked > CHECKED_FACTOR * plain:
            missed.append(f"{heads} x {tokens}: checkers cost {checked / plain:.1f} times")
    print(f"{counters.warp_instructions:,} warp instructions in the last launch")
    for line in missed:
        print("missed", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
