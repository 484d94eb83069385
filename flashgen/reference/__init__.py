"""The oracle: standard attention and its gradients for any spec in float64, and the error rule."""

from flashgen.reference.gradients import (
    errors_of_summands,
    gradients,
    kept_gradients,
    same_dtype_gradients,
)
from flashgen.reference.interpret import evaluate
from flashgen.reference.oracle import attention, same_dtype
from flashgen.reference.statistics import statistics
from flashgen.reference.tangents import gradient_tangents, kept_tangents, tangents
from flashgen.reference.verdict import (
    ABSOLUTE,
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    RMS_FACTOR,
    Verdict,
    compare,
    judge_gradients,
    judge_tangents,
)

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
    "gradient_tangents",
    "gradients",
    "judge_gradients",
    "judge_tangents",
    "kept_gradients",
    "kept_tangents",
    "same_dtype",
    "same_dtype_gradients",
    "statistics",
    "tangents",
]
