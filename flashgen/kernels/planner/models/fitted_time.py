"""Constants of the time model, fitted to published measurements of other libraries' kernels.

``python benchmarks/fit_duration.py --fit`` fits them: it predicts the durations of kernels whose
tiles are known, and minimises the squared logarithms of predicted over measured durations. The
measurements and their sources are in benchmarks/published.json. Measured times of flashgen's own
kernels (benchmarks/results) are not among them; ``python benchmarks/report.py --model-errors``
compares the predictions with these too.
"""

from __future__ import annotations

from flashgen.kernels.planner.quantities import Number

CONSTANTS: dict[str, Number] = {
    # Path sm_80. Anything from 150 to 250 fits nearly as well; from 210 on, the tile chosen on
    # A100 at head dim 64 is close to those that FlashAttention-2 and -3 were tuned to there.
    "barrier": 220,
    # Path sm_90a.
    "exposed": 0.37,
    "queued": 0.12,
    # Both.
    "atomic_share": 0.25,
}
"""By name; `flashgen.kernels.planner.quantities.QUANTITIES` has the meanings."""

# An instruction of a mask takes as long as this number of others: a score's follow each other, each
# waiting for the one before.
MASK_STALL = 1.0

POINTS = 149
MEDIAN_ERROR = 0.037
WORST_ERROR = 0.176
"""The errors of predicted durations on the published measurements, those included that no constant
was fitted to: |predicted / measured - 1|."""

STATED_ERROR = (
    f"model error on {POINTS} published timings: median {MEDIAN_ERROR:.0%}, worst {WORST_ERROR:.0%}"
)
"""The clause that every printed prediction carries."""

STATED_TIME_ERROR = f"{STATED_ERROR}; a mask's instructions are not counted"
"""The same of a predicted duration. Kernels of which most tiles evaluate a mask take longer."""
