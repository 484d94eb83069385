"""Gradients of standard attention: the oracle's, written out, and PyTorch's own.

Algorithm 3 of Dao et al., "FlashAttention", 2022 (its appendix B), with the spec's score, dropout
and a gradient of the LSE. With s = scale * Q K^T, s' the score function of s, P the softmax of s'
and Z the dropout (0 for a dropped element, 1 / keep probability for a kept one):

    O  = (P Z) V          LSE = log sum exp s'
    dV = (P Z)^T dO
    dP = Z * (dO V^T)
    dS = P * (dP - D + dLSE) * ds'/ds          D = rowsum(P * dP)
    dQ = scale * dS K
    dK = scale * dS^T Q

    dT[i] = sum of P * (dP - D + dLSE) * ds'/dT[i]     T a captured tensor, i one of its elements

A sink t is like a key whose V is 0: P = exp(t - LSE), its dP is 0, and dt is the sum of its dS.

dK and dV are sums over the query heads of a group. Where s' is -inf, by the mask or by the score
function itself, dS and the summands of dT are 0, whatever the derivative of the score function is
there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.errors import InputError
from flashgen.spec import AttentionSpec

from .captures import added_to_captures, flows_to_captures, learned_of, with_sink
from .oracle import softmax_times_v
from .problem import Number, Part, Problem, State, problem_of

Tensor = torch.Tensor


def gradients(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    scalars: Mapping[str, Number] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: State | None = None,
) -> tuple[Tensor, ...]:
    """Gradients in float64: what every backward kernel is measured against.

    Nothing is differentiated by autograd but the score function, element by element, and what reads
    elements of captured tensors.

    Args:
        spec, q, k, v, scalars, tensors, q_offset, k_offset, scale, dropout_p, rng: as in
            `attention`.
        dout: [batch, heads_q, seq_q, head_dim_v], gradient of out, any floating dtype.
        dlse: [batch, heads_q, seq_q], gradient of lse; None for 0. That of a row without a key goes
            to the sink, and is ignored without one.

    Returns:
        dq, dk and dv, then the gradient of each learnable tensor, in the order of spec.tensors;
        float64, of the shapes of what they are the gradients of.

    Raises:
        InputError: as in `attention`, and for a dout or dlse of another shape.
    """
    problem = problem_of(
        spec, q, k, v, scalars=scalars, tensors=tensors, q_offset=q_offset, k_offset=k_offset,
        scale=scale, dropout_p=dropout_p, rng=rng, exact=True,
    )  # fmt: skip
    return _exact(problem, dout, dlse, kept=False)


def kept_gradients(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    scalars: Mapping[str, Number] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: State | None = None,
) -> tuple[Tensor, ...]:
    """What exact arithmetic makes of what Algorithm 4 has: O in its dtype, the others in float32.

    An LSE of 6 in float32 is off by up to 2.4e-7, and with it all of its row's P, by the same
    factor: no backward pass that starts from it does better, while PyTorch keeps P itself. And D
    comes from O, so that in dP - D two float32 sums are subtracted that were rounded apart; with
    one key it should be 0, and is in PyTorch. In float32 with few keys these are as much as all
    other rounding; `compare` takes them in.

    Arguments, results and errors as in `gradients`.
    """
    problem = problem_of(
        spec, q, k, v, scalars=scalars, tensors=tensors, q_offset=q_offset, k_offset=k_offset,
        scale=scale, dropout_p=dropout_p, rng=rng, exact=True,
    )  # fmt: skip
    return _exact(problem, dout, dlse, kept=True)


def _exact(
    problem: Problem, dout: Tensor, dlse: Tensor | None, *, kept: bool
) -> tuple[Tensor, ...]:
    _check(problem, dout, dlse)
    with torch.no_grad():
        total = _Gradients(problem, torch.float64)
        for part in problem.parts():
            total.add(part, _algorithm_3(problem, part, dout, dlse, kept=kept))
        return total.results(torch.float64)


def same_dtype_gradients(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    scalars: Mapping[str, Number] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: State | None = None,
) -> tuple[Tensor, ...]:
    """PyTorch's autograd through `same_dtype`: the yardstick of the error rule for gradients.

    Every gradient inside is a tensor of the dtype of what it is the gradient of, as autograd has
    it. Only the score function is differentiated forward instead of backward, in float32, because
    autograd makes NaN of a derivative that is infinite where the mask is false. dk and dv of each
    query head are of the dtype; they are added over a group, and over slices of query rows where
    there is more than one, in float32 and rounded once, as torch's sum over a group does. Gradients
    of captured tensors are added up in float32 and rounded once.

    Arguments and errors as in `gradients`; dout is rounded to the dtype of q, dlse to float32.

    Returns:
        dq, dk and dv, then the gradient of each learnable tensor, in the order of spec.tensors, in
        the dtypes of what they are the gradients of.
    """
    problem = problem_of(
        spec, q, k, v, scalars=scalars, tensors=tensors, q_offset=q_offset, k_offset=k_offset,
        scale=scale, dropout_p=dropout_p, rng=rng, exact=False,
    )  # fmt: skip
    _check(problem, dout, dlse)
    total = _Gradients(problem, problem.real)
    with torch.enable_grad():
        for part in problem.parts():
            total.add(part, _autograd(problem, part, dout, dlse))
    return total.results()


def errors_of_summands(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    **numbers: Any,
) -> tuple[Tensor, ...]:
    """How far PyTorch's gradients of captured tensors are off, as their summands say.

    The gradient of a tensor of few elements is a sum of very many numbers. Its one error may be
    small by luck; the root of the sum of squares of the errors of what is added up is not.

    Arguments and errors as in `gradients`.

    Returns:
        For each learnable tensor, in the order of spec.tensors, float64 of its shape.
    """
    exact, same = (problem_of(spec, q, k, v, **numbers, exact=exact) for exact in (True, False))
    total = [torch.zeros(x.shape, dtype=torch.float64) for x in learned_of(exact).values()]
    for part, ordinary in zip(exact.parts(), same.parts(), strict=True):
        ours = _algorithm_3(exact, part, dout, dlse, kept=False)
        with torch.enable_grad():
            theirs = _autograd(same, ordinary, dout, dlse)
        squares = tuple(
            (b.double() - a).square() for a, b in zip(ours.flows, theirs.flows, strict=True)
        )
        added = added_to_captures(exact, part, ours.scores, squares)
        if ours.of_sink is not None and theirs.of_sink is not None:
            squares_of_sink = (theirs.of_sink.double() - ours.of_sink).square()
            added = with_sink(exact, part, added, squares_of_sink)
        for sums, each in zip(total, added, strict=True):
            sums += each.to(sums.device)
    return tuple(sums.sqrt() for sums in total)


def _algorithm_3(
    problem: Problem, part: Part, dout: Tensor, dlse: Tensor | None, *, kept: bool
) -> _OfPart:
    """The gradients that one part gives.

    Args:
        kept: P and D come from the LSE and the O that a forward pass keeps, as in Algorithm 4.
    """
    do = part.of_rows(dout).to(problem.work)
    raw = (part.q @ part.k.transpose(1, 2)) * problem.factor
    scores, slope = problem.score_and_slope(raw, part)
    scores = part.masked(scores)
    dead = scores == -math.inf
    if part.sink is not None:
        scores = torch.cat([scores, part.sink.expand(*scores.shape[:2], 1)], dim=-1)
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1).masked_fill(empty, 0)
    p = weights[..., : dead.shape[-1]]

    dp = part.dropped(do @ part.v.transpose(1, 2))
    if kept:
        out = (part.dropped(p) @ part.v).to(problem.q.dtype).to(problem.work)
        d = (do * out).sum(dim=-1, keepdim=True).float().to(problem.work)
        in_float32 = do.float() @ part.v.float().transpose(1, 2)
        dp = part.dropped(in_float32.to(problem.work))
        lse = torch.logsumexp(scores, dim=-1, keepdim=True).float().to(problem.work)
        weights = torch.exp(scores - lse).masked_fill(empty, 0)
        p = weights[..., : dead.shape[-1]]
    else:
        d = (p * dp).sum(dim=-1, keepdim=True)
    dv = part.dropped(p).transpose(1, 2) @ do
    if dlse is not None:
        d = d - part.of_rows(dlse).to(problem.work)[..., None]
    ds = p * (dp - d)
    flows = flows_to_captures(problem, part, raw, ds, dead)
    captured = added_to_captures(problem, part, raw, flows)
    of_sink = None
    if part.sink is not None:
        of_sink = -weights[..., -1:] * d
        captured = with_sink(problem, part, captured, of_sink)
    if slope is not None:
        ds = ds * slope
    ds = ds.masked_fill(dead, 0)
    dq = problem.factor * (ds @ part.k)
    dk = problem.factor * (ds.transpose(1, 2) @ part.q)
    return _OfPart(dq, dk, dv, captured, flows, raw.detach(), of_sink)


def _autograd(problem: Problem, part: Part, dout: Tensor, dlse: Tensor | None) -> _OfPart:
    """The same by autograd, which is cut in two at the score function."""
    q, k, v = (operand.detach().requires_grad_() for operand in (part.q, part.k, part.v))
    raw = (q @ k.transpose(1, 2)) * problem.factor
    modified, slope = problem.score_and_slope(raw.detach(), part)
    scores = part.masked(modified).detach().requires_grad_()
    dead = scores == -math.inf
    sink = None
    if part.sink is not None:
        sink = part.sink.expand(*scores.shape[:2], 1).clone().requires_grad_()
    out, lse = softmax_times_v(scores, v, part, problem.real, sink)

    of, given = [out], [part.of_rows(dout).to(problem.work)]
    if dlse is not None:
        of, given = [out, lse], [*given, part.of_rows(dlse).to(problem.real)]
    leaves = [scores, v] if sink is None else [scores, v, sink]
    ds, dv, *rest = torch.autograd.grad(of, leaves, given)
    flows = flows_to_captures(problem, part, raw.detach(), ds, dead)
    captured = added_to_captures(problem, part, raw.detach(), flows)
    of_sink = rest[0] if rest else None
    if of_sink is not None:
        captured = with_sink(problem, part, captured, of_sink)
    if slope is not None:
        ds = (ds.to(problem.real) * slope).to(problem.work)
    ds = ds.masked_fill(dead, 0)
    dq, dk = torch.autograd.grad(raw, [q, k], ds)
    return _OfPart(dq, dk, dv, captured, flows, raw.detach(), of_sink)


@dataclass(frozen=True)
class _OfPart:
    """Gradients that one part gives.

    Attributes:
        dq, dk, dv: of each pair, [n, rows, d], [n, seq_k, d] and [n, seq_k, d_v].
        captured: of the learnable tensors, whole.
        flows: what was added up to those, [n, seq_q, seq_k] for each element that the score reads.
        scores: s, before the score function.
        of_sink: what each row gives to the sink's gradient, [n, seq_q, 1]; None without a sink.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    captured: tuple[Tensor, ...]
    flows: tuple[Tensor, ...]
    scores: Tensor
    of_sink: Tensor | None


class _Gradients:
    """Sums of the parts' gradients: dq by row, dk and dv over rows and the heads of a group."""

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        self.operands = (problem.q, problem.k, problem.v)
        self.learned = tuple(learned_of(problem).values())
        device = problem.q.device
        self.sums = [
            torch.zeros(x.shape[0] * x.shape[1], *x.shape[2:], dtype=dtype, device=device)
            for x in self.operands
        ]
        self.captured = [torch.zeros(x.shape, dtype=dtype, device=device) for x in self.learned]

    def add(self, part: Part, of: _OfPart) -> None:
        dtype = self.sums[0].dtype
        self.sums[0][part.pairs, part.rows] = of.dq.to(dtype)
        for total, gradient in zip(self.sums[1:], (of.dk, of.dv), strict=True):
            total[:, part.keys].index_add_(0, part.kv, gradient.to(dtype))
        for total, gradient in zip(self.captured, of.captured, strict=True):
            total += gradient

    def results(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """In ``dtype``, or each in the dtype of what it is the gradient of."""
        sums, of = [*self.sums, *self.captured], [*self.operands, *self.learned]
        return tuple(
            total.view(x.shape).to(dtype or x.dtype) for total, x in zip(sums, of, strict=True)
        )


def _check(problem: Problem, dout: Tensor, dlse: Tensor | None) -> None:
    """Shapes that broadcasting would hide.

    Raises:
        InputError: dout or dlse is not of the shape of what it is the gradient of.
    """
    rows = tuple(problem.q.shape[:3])
    wanted = {"dout": (*rows, problem.v.shape[3]), "dlse": rows}
    for name, tensor in (("dout", dout), ("dlse", dlse)):
        if tensor is not None and tuple(tensor.shape) != wanted[name]:
            raise InputError(
                f"{name} is not of the shape of what it is the gradient of",
                where=f"reference of {problem.spec.name}, argument {name}",
                numbers=f"{name} {tuple(tensor.shape)}, wanted {wanted[name]}",
                way_out=f"a gradient of shape {wanted[name]}",
            )
