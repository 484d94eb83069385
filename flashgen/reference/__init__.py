"""The oracle: standard attention and its gradients for any spec in float64, and the error rule."""

from .gradients import (
    errors_of_summands,
    gradients,
    kept_gradients,
    same_dtype_gradients,
)
from .interpret import evaluate
from .judge import judge_gradients
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
    "errors_of_summands",
    "evaluate",
    "gradients",
    "judge_gradients",
    "kept_gradients",
    "same_dtype",
    "same_dtype_gradients",
]
