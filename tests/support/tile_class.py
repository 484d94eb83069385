"""The class of a tile by the conditions that kernels evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.mask import MaskAnalysis
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO


def classify(
    mask: MaskAnalysis,
    env: Mapping[sympy.Symbol, Any],
    q_range: tuple[int, int],
    k_range: tuple[int, int],
) -> str:
    """The class of one tile: "empty", "full" or "mixed".

    Args:
        env: values of b, h, the sizes, scalars and tensors (numpy arrays) that the mask uses.
        q_range, k_range: first and last global position, both inclusive.
    """
    corners = {Q_LO: q_range[0], Q_HI: q_range[1], K_LO: k_range[0], K_HI: k_range[1]}
    values = {**env, **corners}
    if not evaluate(mask.may, values):
        return "empty"
    return "full" if evaluate(mask.must, values) else "mixed"
