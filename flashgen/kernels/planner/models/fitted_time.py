"""Constants of the time model, by code path, and its error on measured durations.

Those of sm_90a are fitted to the times of flashgen's own kernels on two GPUs (benchmarks/results):
``python benchmarks/fit_duration.py --fit`` minimises the squared logarithms of predicted over
measured durations. Those of sm_80, of whose GPUs there is no record, are fitted to published times
of FlashAttention-2 on an A100 (benchmarks/published.json). `mask_stall`, of both paths, was fitted
to calls of former kernels of sm_90a, whose masks that divide had other code, and is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.kernels.planner.quantities import Number
from flashgen.shared.paths import CodePath

MASK_STALL = 3.4

CONSTANTS: dict[str, dict[str, Number]] = {
    "sm_90a": {
        "exposed_forward": 0.1437,
        "exposed_backward": 0.7203,
        "handover": 713,
        # Measured on an H200, not fitted: 14.9 of 35 B per clock, by bulk reductions and by lanes
        # alike, where the sums are in L2; half of it where they are not.
        "atomic_share": 0.426,
        "mask_stall": MASK_STALL,
    },
    # Anything from 150 to 250 clocks of a barrier fits nearly as well; from 210 on, the tile chosen
    # on A100 at head dim 64 is close to those that FlashAttention-2 and -3 were tuned to there.
    "sm_80": {"barrier": 220, "atomic_share": 0.25, "mask_stall": MASK_STALL},
}
"""By `CodePath.constants` and name, whose meanings are in `kernels.planner.quantities`."""


def constants_of(
    kernel: str, path: CodePath, constants: Mapping[str, Mapping[str, Number]] = CONSTANTS
) -> dict[str, Number]:
    """The constants of a kernel by the names of quantities; each pass has its own `exposed`."""
    pass_ = "forward" if kernel == "forward" else "backward"
    path_constants = constants[path.constants].items()
    of_pass = {name.removesuffix(f"_{pass_}"): value for name, value in path_constants}
    return {name: value for name, value in of_pass.items() if not name.startswith("exposed_")}


POINTS = 462
MEDIAN_ERROR = 0.059
WORST_ERROR = 0.418
"""The errors of predicted durations on the records, |predicted / measured - 1|."""

STATED_ERROR = (
    f"model error on {POINTS} measured calls: median {MEDIAN_ERROR:.0%}, worst {WORST_ERROR:.0%}"
)
"""The clause that every printed prediction carries."""
