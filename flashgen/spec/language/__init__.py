"""Tracing of Python mods to sympy expressions: symbols, traced values, captures, expressions."""

from flashgen.spec.language.float_functions import Abs
from flashgen.spec.language.float_operations import (
    AsFloat,
    FloatPower,
    FloatProduct,
    FloatQuotient,
    FloatSum,
)
from flashgen.spec.language.lets import elements_of
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.symbols import (
    BATCH,
    CORNERS,
    HEADS,
    K_HI,
    K_LO,
    LOWEST_LITERAL,
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
from flashgen.spec.language.sympy_functions import (
    Floor,
    FloorDiv,
    FloorMod,
    Maximum,
    Minimum,
    Round,
)
from flashgen.spec.language.tensor import Tensor
from flashgen.spec.language.tensor_elements import (
    Element,
    Extreme,
    Greatest,
    Least,
    TensorSymbol,
)
from flashgen.spec.language.traced import Traced
from flashgen.spec.language.tracing import trace_mask, trace_score

__all__ = [
    "BATCH",
    "CORNERS",
    "HEADS",
    "K_HI",
    "K_LO",
    "LOWEST_LITERAL",
    "Q_HI",
    "Q_LO",
    "SCORE",
    "SEQ_K",
    "SEQ_Q",
    "Abs",
    "AsFloat",
    "B",
    "Element",
    "Extreme",
    "FloatPower",
    "FloatProduct",
    "FloatQuotient",
    "FloatSum",
    "Floor",
    "FloorDiv",
    "FloorMod",
    "Greatest",
    "H",
    "K",
    "Least",
    "Maximum",
    "Minimum",
    "Q",
    "Round",
    "Scalar",
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
