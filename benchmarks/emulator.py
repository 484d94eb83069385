"""Speed of the emulator on the emitted causal forward (fp16, head_dim 64, sm_80).

Prints seconds per launch with the checkers off and on and with sums as tensor cores make them, and
the time per tile as the problem grows. Run from the repository: ``python benchmarks/emulator.py``.
Exits 1 when a target is missed: 1 head x 256 tokens under 0.1 s, 16 heads x 1024 tokens under 1 s;
checkers at most 4 times and sums of tensor cores at most 6 times as slow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Spinning BLAS threads cost more than they save in small matrix products.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import flashgen as fg  # noqa: E402
from flashgen.calls.ops import Report, run_forward  # noqa: E402

ARCH = "sm_80"
HEAD_DIM = 64
REPEATS = 4
SIZES = ((1, 256), (16, 256), (16, 512), (16, 1024), (16, 2048))  # heads, tokens
TARGETS = {(1, 256): 0.1, (16, 1024): 1.0}  # seconds, checkers off, rounded sums
CHECKED_FACTOR, HARDWARE_FACTOR = 4.0, 6.0
# Checkers, and how tensor cores add.
WAYS = {"plain": (False, "rounded"), "checked": (True, "rounded"), "hardware": (False, "hardware")}


def measure(spec: fg.AttentionSpec, heads: int, tokens: int) -> tuple[dict[str, float], Report]:
    """The best time of a launch in seconds by the names of `WAYS`, and the report of the last.

    The ways take turns, so that other load on the machine meets all of them. The first launch
    compiles the segments.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, heads, tokens, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator).half() for _ in range(3))
    best = dict.fromkeys(WAYS, float("inf"))
    earlier_value = os.environ.get("FLASHGEN_EMULATOR_SUMS", "")
    for _ in range(REPEATS):
        for name, (check, sums) in WAYS.items():
            os.environ["FLASHGEN_EMULATOR_SUMS"] = sums
            run = run_forward(spec, q, k, v, backend="emulator", arch=ARCH, check_memory=check)
            best[name] = min(best[name], run.report.run_seconds)
    os.environ["FLASHGEN_EMULATOR_SUMS"] = earlier_value
    return best, run.report


def tiles(report: Report, heads: int, tokens: int) -> int:
    """Tiles that the causal kernel visits."""
    assert report.kernel is not None
    rows, columns = report.kernel.plan.block_q, report.kernel.plan.block_k
    return heads * sum(-(-min(first + rows, tokens) // columns) for first in range(0, tokens, rows))


def main(sizes: Sequence[tuple[int, int]] = SIZES) -> int:
    """Prints one line per size (heads, tokens); returns 1 when a target is missed, else 0."""
    spec = fg.load(str(ROOT / "specs" / "causal.py")).replace(dtype="float16", head_dim=HEAD_DIM)
    print(f"causal fp16 d={HEAD_DIM}, {ARCH}")
    print(
        f"{'heads x tokens':>16} {'tiles':>6} {'off s':>8} {'on s':>8} {'on/off':>7} "
        f"{'us/tile':>8} {'hardware s':>10} {'/ off':>6}"
    )
    missed = []
    for heads, tokens in sizes:
        seconds, report = measure(spec, heads, tokens)
        plain, checked, hardware = (seconds[name] for name in WAYS)
        count = tiles(report, heads, tokens)
        print(
            f"{heads:>7} x {tokens:<6} {count:>6} {plain:8.3f} {checked:8.3f} "
            f"{checked / plain:7.2f} {plain / count * 1e6:8.1f} "
            f"{hardware:10.3f} {hardware / plain:6.2f}"
        )
        target = TARGETS.get((heads, tokens))
        if target is not None and plain > target:
            missed.append(f"{heads} x {tokens}: {plain:.3f} s, target {target} s")
        if target is not None and checked > CHECKED_FACTOR * plain:
            missed.append(f"{heads} x {tokens}: checkers cost {checked / plain:.1f} times")
        if target is not None and hardware > HARDWARE_FACTOR * plain:
            missed.append(
                f"{heads} x {tokens}: tensor cores' sums cost {hardware / plain:.1f} times"
            )
    print(f"{report.counters.warp_instructions:,} warp instructions in the last launch")
    for line in missed:
        print("missed", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
