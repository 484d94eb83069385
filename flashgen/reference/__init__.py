"""The oracle: standard attention for any spec in float64, and the rule that kernels must meet."""

from .interpret import evaluate
from .oracle import attention, same_dtype
from .verdict import ABSOLUTE, GRADIENT_FACTOR, OUTPUT_FACTOR, RMS_FACTOR, Verdict, compare

__all__ = [
    "ABSOLUTE",
    "GRADIENT_FACTOR",
    "OUTPUT_FACTOR",
    "RMS_FACTOR",
    "Verdict",
    "attention",
    "compare",
    "evaluate",
    "same_dtype",
]
