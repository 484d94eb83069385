"""The error rule for all gradients of a call at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashgen.spec import AttentionSpec

from .gradients import errors_of_summands, gradients, kept_gradients, same_dtype_gradients
from .verdict import GRADIENT_FACTOR, Verdict, compare

Tensor = torch.Tensor


def judge_gradients(
    found: Sequence[Tensor],
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    **numbers: Any,
) -> dict[str, Verdict]:
    """What `compare` says of dq, dk, dv and the gradients of learnable tensors, by name.

    Args:
        found: these gradients, in this order, the tensors' in that of spec.tensors.
        numbers: scalars, tensors, offsets, scale, dropout_p and rng, as in `gradients`; as are the
            other arguments and the errors raised.

    Raises:
        ValueError: ``found`` has another number of gradients.
    """
    of = (spec, q, k, v, dout, dlse)
    learned = [f"d{tensor.name}" for tensor in spec.tensors if tensor.grad]
    summands: list[Tensor | None] = [None, None, None]
    if learned:
        summands += errors_of_summands(*of, **numbers)
    rows = zip(
        ("dq", "dk", "dv", *learned),
        found,
        gradients(*of, **numbers),
        same_dtype_gradients(*of, **numbers),
        kept_gradients(*of, **numbers),
        summands,
        strict=True,
    )
    return {
        name: compare(got, exact, same, factor=GRADIENT_FACTOR, kept=kept, summands=errors)
        for name, got, exact, same, kept, errors in rows
    }
