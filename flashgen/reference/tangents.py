"""Tangents of standard attention and of its gradients, by forward mode through the oracle.

A tangent is the derivative along given directions of the operands. That of the gradients is taken
forward over reverse: forward mode through reverse mode through the whole matrix of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from flashgen.reference.oracle import attention, kept_sums
from flashgen.reference.problem import OracleArguments, forward_mode, problem_of
from flashgen.shared.call import ResultTangents, Tangents
from flashgen.spec.language.spec import AttentionSpec

if TYPE_CHECKING:
    from typing import Unpack

Tensor = torch.Tensor


def tangents(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    moving: Tangents,
    *,
    exact: bool = True,
    **call: Unpack[OracleArguments],
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse: the reference of tangent passes, and their baseline.

    Args:
        spec, q, k, v, exact, call: as in `attention`; without ``exact`` these are the tangents of
            `same_dtype`.
        moving: the tangents of q, k, v and of the learned tensors.
    """
    with forward_mode():
        duals, call["tensors"] = _duals(spec, (q, k, v), moving, call, exact)
        out, lse = attention(spec, *duals[:3], exact=exact, **call)
        return _tangent(out), _tangent(lse)


def kept_tangents(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    moving: Tangents,
    **call: Unpack[OracleArguments],
) -> tuple[Tensor, Tensor]:
    """The exact tangents of a pass that starts from rounded results.

    The rounding of LSE to float32 scales all P of a row, as in
    `flashgen.reference.gradients.gradients`. With other weights whose sum W divides the output,
    O' = (X - W' O) / W with an O of the dtype of q and the W of `kept_sums`; with the
    softmax, a pass keeps the factor of O small by taking the tangents of scores relative to one of
    them. Arguments and errors are as in `tangents`.
    """
    out, lse = tangents(spec, q, k, v, moving, **call)
    if not spec.sums_weights:
        return out, lse
    exact_out, row_statistics = attention(spec, q, k, v, **call)
    if not spec.is_softmax:
        sums, sum_tangents = (x.flatten(0, 1)[..., None] for x in (row_statistics, lse))
        rounded_sums, problem = sums.clone(), problem_of(spec, q, k, v, exact=True, **call)
        for part in problem.blocks():
            block_rows = (part.pairs, part.rows)
            rounded_sums[block_rows] = kept_sums(problem, problem.masked_scores(part))
        error = (exact_out.to(q.dtype).double() - exact_out).flatten(0, 1)
        total = sums * out.flatten(0, 1) - sum_tangents * error
        return torch.where(rounded_sums == 0, 0, total / rounded_sums).view_as(out), lse
    error = torch.where(
        row_statistics.isfinite(), row_statistics - row_statistics.float().double(), 0
    )
    return out * error.exp()[..., None], lse


def gradient_tangents(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gradients: tuple[Tensor, Tensor | None],
    moving: Tangents,
    cotangent_tangents: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    exact: bool = True,
    **call: Unpack[OracleArguments],
) -> tuple[Tensor, ...]:
    """The tangents of dq, dk, dv and of the gradients of learned tensors.

    Args:
        gradients: dout and dlse; a dlse of None stands for zeros.
        cotangent_tangents: the tangents of dout and dlse; None for zeros.
        other arguments: as in `tangents`.
    """
    with forward_mode(), torch.enable_grad():
        duals, call["tensors"] = _duals(spec, (q, k, v), moving, call, exact, leaves=True)
        results = attention(spec, *duals[:3], exact=exact, **call)
        cotangents = [
            None if x is None else _dual(x.to(result.dtype), tangent)
            for x, tangent, result in zip(
                gradients, ResultTangents(*cotangent_tangents)[:2], results, strict=True
            )
        ]
        count = 1 if cotangents[1] is None else 2
        grads = torch.autograd.grad(
            results[:count], duals, cotangents[:count], create_graph=True, allow_unused=True
        )
        return tuple(
            torch.zeros_like(x) if grad is None else _tangent(grad)
            for grad, x in zip(grads, duals, strict=True)
        )


def _duals(
    spec: AttentionSpec,
    operands: tuple[Tensor, Tensor, Tensor],
    moving: Tangents,
    call: Any,
    exact: bool,
    leaves: bool = False,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """q, k, v and the learned tensors with their tangents; and all captured tensors by name."""
    tensors = dict(call.get("tensors") or {})
    learned = [tensor.name for tensor in spec.tensors if tensor.grad]
    tangents: Sequence[Tensor | None] = (*moving[:3], *(moving.captured or (None,) * len(learned)))
    primals = [*operands, *(tensors[name] for name in learned)]
    duals = []
    for tensor, tangent in zip(primals, tangents, strict=True):
        wide = tensor.detach().double() if exact else tensor.detach()
        leaf = wide.clone().requires_grad_() if leaves else wide
        duals.append(_dual(leaf, tangent))
    return duals, {**tensors, **dict(zip(learned, duals[3:], strict=True))}


def _dual(tensor: Tensor, tangent: Tensor | None) -> Tensor:
    if tangent is None:
        return tensor
    dual: Tensor = forward_ad.make_dual(tensor, tangent.detach().to(tensor.dtype))  # type: ignore[no-untyped-call]
    return dual


def _tangent(tensor: Tensor) -> Tensor:
    tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(tensor) if tangent is None else tangent.detach()
