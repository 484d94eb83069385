"""The fastest tiles for a shape: ranked by the model, and measured where there is a GPU."""

from flashgen.tune.measure import Inputs, Measured, checked, fastest, on_gpu
from flashgen.tune.rank import Choice, by_time, derived, predicted, rank

__all__ = [
    "Choice",
    "Inputs",
    "Measured",
    "by_time",
    "checked",
    "derived",
    "fastest",
    "on_gpu",
    "predicted",
    "rank",
]
