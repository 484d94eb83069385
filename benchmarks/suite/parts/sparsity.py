"""Time against the live share of a mask, 5% to 100%.

There are no block-sparse layouts yet, so the masks are windows |q - k| <= W, whose bounds the
compiler derives, of the wanted density.
"""

from __future__ import annotations

import math

from benchmarks.suite.cases import Case, grid, make, windowed
from benchmarks.suite.contenders import contenders
from benchmarks.suite.context import Context
from benchmarks.suite.one_case import run_case

SHARES = (0.05, 1.0, 0.25, 0.5, 0.1, 0.75)
NOTE = "a window of this density, not a block-sparse layout"
NAMES = ("flashgen", "flex", "sdpa", "cuDNN", "FlashAttention-4")


def run(context: Context) -> None:
    base = grid("full", 8192, 128, key=True)
    if context.tiny:
        base = make("sparsity", "full", 1, 1, 1, 128, 128, 64, key=True)
    shares = (0.25, 1.0) if context.tiny else SHARES
    compared = [c for c in contenders(context.device) if c.name.split()[0] in NAMES]
    for share in shares:
        case = with_share(base, share)
        if context.budget.out:
            context.journal.skipped(f"live share {share:.0%}")
            continue
        seconds = 0.01 if context.tiny else 0.8
        run_case(context, case, compared, passes=("forward",), seconds=seconds, note=NOTE)


def with_share(base: Case, share: float) -> Case:
    """``base`` with the narrowest window that keeps at least this share of a square S."""
    return windowed(base, window_of(base.seq_q, share))


def window_of(seq: int, share: float) -> int:
    """The least W for which |q - k| <= W keeps at least ``share`` of seq * seq elements.

    Kept are seq (2 W + 1) - W (W + 1) elements: a parabola in W.
    """
    kept_scores = share * seq * seq
    window = int(seq - 0.5 - math.sqrt(max(0.0, (seq - 0.5) ** 2 - (kept_scores - seq))))
    window = max(0, min(seq - 1, window - 2))
    while window < seq - 1 and seq * (2 * window + 1) - window * (window + 1) < kept_scores:
        window += 1
    return window
