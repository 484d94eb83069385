"""Instructions that a spec's score_mod and dropout add per score element."""

from __future__ import annotations

import sympy

from flashgen.analysis import CodeBlock, analyse_score
from flashgen.language import SCORE, elements_of
from flashgen.language.spec import AttentionSpec
from flashgen.planner.models.fitted_common import (
    DROPOUT_INSTRUCTIONS,
    READ_INSTRUCTIONS,
    TRANSPOSED_DROPOUT_INSTRUCTIONS,
)
from flashgen.planner.models.kernel_model import KEY_KERNELS


def of_score(spec: AttentionSpec, kernel: str) -> int:
    """Instructions of score_mod, one per operation; in backward kernels with its derivative."""
    if spec.score == SCORE:
        return 0
    if kernel == "forward":
        return _operations(spec.score) + 1
    # Subexpressions that the value and the derivative share are counted once.
    code: CodeBlock = analyse_score(spec.score).value_and_derivative
    shared = sum(_operations(expr) for _, expr in code.lets)
    return shared + sum(_operations(expr) + 1 for expr in code.results)


def of_dropout(spec: AttentionSpec, kernel: str) -> int:
    """Instructions of dropout: random bits, comparison and selection."""
    if not spec.dropout:
        return 0
    # Kernels whose blocks own keys have transposed scores.
    return TRANSPOSED_DROPOUT_INSTRUCTIONS if kernel in KEY_KERNELS else DROPOUT_INSTRUCTIONS


def _operations(expr: sympy.Expr) -> int:
    """Operations of an expression, with those that address elements of captured tensors."""
    reads = sum(READ_INSTRUCTIONS * len(element.indices) for element in elements_of(expr))
    return int(sympy.count_ops(expr)) + reads
