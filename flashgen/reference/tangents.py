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
    """The exact tangents as a pass finds them that starts from rounded results.

    The rounding of LSE to float32 scales all P of a row, as in
    `flashgen.reference.gradients.gradients`. With other weights whose sum W divides the output,
    O' = (X - W' O) / W with an O of the dtype of q and the W of `kept_sums`; with the
    softmax, a pass keeps the factor of O small by taking the tangents of scores relative to one of
    them. Arguments and errors are those of `tangents`.
    """
    out, lse = tangents(spec, q, k, v, moving, **call)
    if not spec.sums_weights:
        return out, lse
    own, of_rows = attention(spec, q, k, v, **call)
    if not spec.is_softmax:
        sums, moved = (x.flatten(0, 1)[..., None] for x in (of_rows, lse))
        kept, problem = sums.clone(), problem_of(spec, q, k, v, exact=True, **call)
        for part in problem.blocks():
            here = (part.pairs, part.rows)
            kept[here] = kept_sums(problem, problem.masked_scores(part))
        error = (own.to(q.dtype).double() - own).flatten(0, 1)
        total = sums * out.flatten(0, 1) - moved * error
        return torch.where(kept == 0, 0, total / kept).view_as(out), lse
    error = torch.where(of_rows.isfinite(), of_rows - of_rows.float().double(), 0)
    return out * error.exp()[..., None], lse


def gradient_tangents(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gradients: tuple[Tensor, Tensor | None],
    moving: Tangents,
    of_gradients: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    exact: bool = True,
    **call: Unpack[OracleArguments],
) -> tuple[Tensor, ...]:
    """The tangents of dq, dk, dv and of the gradients of learned tensors.

    Args:
        gradients: dout and dlse; a dlse of None stands for zeros.
        of_gradients: the tangents of dout and dlse; None for zeros.
        other arguments: as in `tangents`.
    """
    with forward_mode(), torch.enable_grad():
        duals, call["tensors"] = _duals(spec, (q, k, v), moving, call, exact, leaves=True)
        results = attention(spec, *duals[:3], exact=exact, **call)
        given = [
            None if x is None else _dual(x.to(of.dtype), way)
            for x, way, of in zip(
                gradients, ResultTangents(*of_gradients)[:2], results, strict=True
            )
        ]
        count = 1 if given[1] is None else 2
        found = torch.autograd.grad(
            results[:count], duals, given[:count], create_graph=True, allow_unused=True
        )
        return tuple(
            torch.zeros_like(x) if each is None else _tangent(each)
            for each, x in zip(found, duals, strict=True)
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
    ways: Sequence[Tensor | None] = (*moving[:3], *(moving.captured or (None,) * len(learned)))
    given = [*operands, *(tensors[name] for name in learned)]
    duals = []
    for tensor, way in zip(given, ways, strict=True):
        wide = tensor.detach().double() if exact else tensor.detach()
        leaf = wide.clone().requires_grad_() if leaves else wide
        duals.append(_dual(leaf, way))
    return duals, {**tensors, **dict(zip(learned, duals[3:], strict=True))}


def _dual(tensor: Tensor, way: Tensor | None) -> Tensor:
    if way is None:
        return tensor
    dual: Tensor = forward_ad.make_dual(tensor, way.detach().to(tensor.dtype))  # type: ignore[no-untyped-call]
    return dual


def _tangent(tensor: Tensor) -> Tensor:
    found = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(tensor) if found is None else found.detach()
