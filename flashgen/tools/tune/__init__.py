"""Tuning: the tiles of a pass ranked by predicted time, and measured where there is a GPU."""

from flashgen.shared.call import Inputs
from flashgen.tools.tune.measure import Measured, checked, fastest, judge_of, on_gpu
from flashgen.tools.tune.rank import TileChoice, by_time, derived, predicted, rank

__all__ = [
    "Inputs",
    "Measured",
    "TileChoice",
    "by_time",
    "checked",
    "derived",
    "fastest",
    "judge_of",
    "on_gpu",
    "predicted",
    "rank",
]
