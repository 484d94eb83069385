"""Tracing of Python mods to sympy expressions: symbols, traced values, captures, expressions."""

from flashgen.language.python_printer import python_text
from flashgen.language.scalar import Scalar
from flashgen.language.symbols import (
    BATCH,
    CORNERS,
    HEADS,
    K_HI,
    K_LO,
    LOWEST_SCORE,
    Q_HI,
    Q_LO,
    SCORE,
    SEQ_K,
    SEQ_Q,
    B,
    H,
    K,
    Q,
    is_condition,
    is_int,
)
from flashgen.language.sympy_functions import (
    Floor,
    FloorDiv,
    FloorMod,
    Log2,
    Maximum,
    Minimum,
    Sigmoid,
)
from flashgen.language.tensor import Tensor
from flashgen.language.tensor_elements import (
    Element,
    Extreme,
    Greatest,
    Least,
    TensorSymbol,
    elements_of,
)
from flashgen.language.traced import Traced
from flashgen.language.tracing import trace_mask, trace_score

__all__ = [
    "BATCH",
    "CORNERS",
    "HEADS",
    "K_HI",
    "K_LO",
    "LOWEST_SCORE",
    "Q_HI",
    "Q_LO",
    "SCORE",
    "SEQ_K",
    "SEQ_Q",
    "B",
    "Element",
    "Extreme",
    "Floor",
    "FloorDiv",
    "FloorMod",
    "Greatest",
    "H",
    "K",
    "Least",
    "Log2",
    "Maximum",
    "Minimum",
    "Q",
    "Scalar",
    "Sigmoid",
    "Tensor",
    "TensorSymbol",
    "Traced",
    "elements_of",
    "is_condition",
    "is_int",
    "python_text",
    "trace_mask",
    "trace_score",
]
