"""The error rule, applied to all gradients of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flashgen.language.spec import AttentionSpec
from flashgen.reference.gradients import (
    errors_of_summands,
    gradients,
    kept_gradients,
    same_dtype_gradients,
)
from flashgen.reference.problem import OracleArguments
from flashgen.reference.verdict import GRADIENT_FACTOR, Verdict, compare

if TYPE_CHECKING:
    from typing import Unpack

Tensor = torch.Tensor


def judge_gradients(
    found: Sequence[Tensor],
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    **call: Unpack[OracleArguments],
) -> dict[str, Verdict]:
    """The verdicts of `compare` on dq, dk, dv and the gradients of learned tensors, by name.

    Args:
        found: dq, dk, dv, then the gradients of learned tensors in the order of spec.tensors.
        other arguments: as in `gradients`, whose errors this function also raises.

    Raises:
        ValueError: ``found`` has another number of gradients.
    """
    of = (spec, q, k, v, dout, dlse)
    learned = [f"d{tensor.name}" for tensor in spec.tensors if tensor.grad]
    summands: list[Tensor | None] = [None, None, None]
    if learned:
        summands += errors_of_summands(*of, **call)
    rows = zip(
        ("dq", "dk", "dv", *learned),
        found,
        gradients(*of, **call),
        same_dtype_gradients(*of, **call),
        kept_gradients(*of, **call),
        summands,
        strict=True,
    )
    return {
        name: compare(got, exact, same, factor=GRADIENT_FACTOR, kept=kept, summands=errors)
        for name, got, exact, same, kept, errors in rows
    }
