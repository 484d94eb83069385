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

With another weight w than exp, and a row's normaliser n, which is 1 or the sum of the weights,

    O  = (P Z) V           P = w / n
    dS = (dP - D) / n * dw/ds     D = rowsum(P * dP), or 0 where n is 1
    dT[i] = sum of (dP - D) / n * dw/dT[i]

and all is 0 in a row whose weights sum to 0. A sink t is like a key whose V is 0: P = exp(t - LSE),
its dP is 0, and dt is the sum of its dS.

An element T[i] that the score reads is a variable like the score itself: torch's forward mode gives
ds'/dT[i] at every position, and where two branches have different slopes it selects the slope of
the selected value (see `OracleProblem`). Masked positions are then removed, so that an infinite
slope there is not multiplied by 0. autograd propagates the rest through the reading of the tensor,
which is linear: each position adds to the element that it read.

dK and dV are sums over the query heads of a group. Where s' is -inf, by the mask or by the score
function itself, dS and the summands of dT are 0 for any derivative of the score function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flashgen.reference.interpret import evaluate
from flashgen.reference.oracle import added_weights, kept_sums, out_and_lse
from flashgen.reference.problem import OracleArguments, OracleProblem, ScoreBlock, problem_of
from flashgen.shared.errors import InputError
from flashgen.spec.language.lets import elements_of
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SCORE
from flashgen.spec.language.tensor_elements import Element, TensorSymbol

if TYPE_CHECKING:
    from typing import Unpack

Tensor = torch.Tensor


def gradients(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    from_rounded: bool = False,
    **call: Unpack[OracleArguments],
) -> tuple[Tensor, ...]:
    """Computes gradients in float64: the reference of every backward kernel.

    With ``from_rounded``, it starts from the rounded results of Algorithm 4: O in its dtype, LSE in
    float32, and the sums of the weights that `flashgen.reference.oracle.added_weights` has. The
    float32 rounding error of an LSE of 6 is up to 2.4e-7, and scales all of its row's P. Every
    backward pass that starts from LSE has this error; PyTorch, which stores P, does not. D is
    computed from O, so that dP - D subtracts two float32 sums with different rounding; with one key
    the difference should be 0, and is in PyTorch. In float32 with few keys these errors are as
    large as all other rounding; `compare` allows for them.

    autograd differentiates only the score function, element by element, and the reading of elements
    of captured tensors.

    Args:
        spec, q, k, v, call: as in `attention`.
        dout: [batch, heads_q, seq_q, head_dim_v], gradient of out, any floating dtype.
        dlse: [batch, heads_q, seq_q], gradient of lse; None for 0. For a row without a key it
            contributes to the sink alone.

    Returns:
        dq, dk and dv, then the gradient of each learned tensor, in the order of spec.tensors;
        float64, in the shapes of the tensors.

    Raises:
        InputError: as in `attention`, and for a dout or dlse of another shape.
    """
    problem = problem_of(spec, q, k, v, exact=True, **call)
    _check(problem, dout, dlse)
    with torch.no_grad():
        total = _Gradients(problem, torch.float64)
        for part in problem.blocks():
            total.add(part, _algorithm_3(problem, part, dout, dlse, from_rounded=from_rounded))
        return total.results(torch.float64)


kept_gradients = functools.partial(gradients, from_rounded=True)


def same_dtype_gradients(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    **call: Unpack[OracleArguments],
) -> tuple[Tensor, ...]:
    """PyTorch's autograd through `same_dtype`: the baseline of the error rule for gradients.

    Every intermediate gradient has the dtype of its tensor, as in autograd. Only the score function
    is differentiated in forward mode, in float32, because reverse mode gives NaN for a derivative
    that is infinite where the mask is false. dk and dv of each query head have the dtype. They are
    summed over a group, and over slices of query rows where there are several, in float32 and
    rounded once, as in torch's sum over a group. Gradients of captured tensors are summed in
    float32 and rounded once.

    Arguments and errors are as in `gradients`; dout is rounded to q's dtype, dlse to float32.

    Returns:
        dq, dk and dv, then the gradient of each learned tensor, in the order of spec.tensors; each
        in the dtype of its tensor.
    """
    problem = problem_of(spec, q, k, v, exact=False, **call)
    _check(problem, dout, dlse)
    total = _Gradients(problem, problem.real)
    with torch.enable_grad():
        for part in problem.blocks():
            total.add(part, _autograd(problem, part, dout, dlse))
    return total.results()


def with_kv_gradient(gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """dq, dkv and the rest of gradients dq, dk, dv and so on: v is the first columns of kv."""
    dq, dk, dv, *learned = gradients
    return dq, dk + torch.nn.functional.pad(dv, (0, dk.shape[-1] - dv.shape[-1])), *learned


def errors_of_summands(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    **call: Unpack[OracleArguments],
) -> tuple[Tensor, ...]:
    """The expected error of PyTorch's gradients of learned tensors, from the errors of summands.

    The gradient of a tensor with few elements is a sum of very many numbers, whose error may be
    small by chance. This is the root of the sum of squares of the errors of the summands.

    Arguments and errors are as in `gradients`.

    Returns:
        A float64 tensor of the same shape for each learned tensor, in the order of spec.tensors.
    """
    exact, same = (problem_of(spec, q, k, v, exact=exact, **call) for exact in (True, False))
    total = [torch.zeros(x.shape, dtype=torch.float64) for x in _learned(exact).values()]
    for part, ordinary in zip(exact.blocks(), same.blocks(), strict=True):
        exact_block = _algorithm_3(exact, part, dout, dlse, from_rounded=False)
        with torch.enable_grad():
            same_block = _autograd(same, ordinary, dout, dlse)
        squares = tuple(
            (b.double() - a).square()
            for a, b in zip(exact_block.flows, same_block.flows, strict=True)
        )
        sink_squares = None
        if exact_block.sink_flow is not None and same_block.sink_flow is not None:
            sink_squares = (same_block.sink_flow.double() - exact_block.sink_flow).square()
        added = _added(exact, part, exact_block.scores, squares, sink_squares)
        for sums, squares_sum in zip(total, added, strict=True):
            sums += squares_sum.to(sums.device)
    return tuple(sums.sqrt() for sums in total)


def _algorithm_3(
    problem: OracleProblem,
    part: ScoreBlock,
    dout: Tensor,
    dlse: Tensor | None,
    *,
    from_rounded: bool,
) -> BlockGradients:
    """The contributions of one block of scores to the gradients.

    Args:
        from_rounded: whether P and D are computed from the rounded LSE and O, as in Algorithm 4.
    """
    do = part.rows_of(dout).to(problem.work)
    raw = (part.q @ part.k.transpose(1, 2)) * problem.factor
    scores, slope = problem.score_and_slope(raw, part)
    scores = problem.masked(scores, part)
    if not problem.spec.is_softmax:
        return _algorithm_3_of_weights(
            problem, part, do, raw, scores, slope, from_rounded=from_rounded
        )
    dead = scores == -math.inf
    if part.sink is not None:
        scores = torch.cat([scores, part.sink.expand(*scores.shape[:2], 1)], dim=-1)
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1).masked_fill(empty, 0)
    p = part.weighted(weights[..., : dead.shape[-1]])

    dp = part.dropped(do @ part.v.transpose(1, 2))
    if from_rounded:
        out = (part.dropped(p) @ part.v).to(problem.q.dtype).to(problem.work)
        d = (do * out).sum(dim=-1, keepdim=True).float().to(problem.work)
        dp = _truncated(problem, dp)
        lse = torch.logsumexp(scores, dim=-1, keepdim=True).float().to(problem.work)
        above = scores - lse
        # A difference within the rounding error of LSE is none: the score is all of LSE.
        above = above.masked_fill(above.abs() <= lse.abs() * 2.0**-24, 0)
        weights = torch.exp(above).masked_fill(empty, 0)
        p = part.weighted(weights[..., : dead.shape[-1]])
    else:
        d = (p * dp).sum(dim=-1, keepdim=True)
    dead &= p == 0  # a score of -inf in a row with NaN or +inf has the weight NaN
    dv = part.dropped(p).transpose(1, 2) @ do
    if dlse is not None:
        d = d - part.rows_of(dlse).to(problem.work)[..., None]
    ds = p * (dp - d)
    flows = _flows(problem, part, raw, ds, dead)
    sink_flow = None if part.sink is None else -weights[..., -1:] * d
    if slope is not None:
        ds = ds * slope
    ds = ds.masked_fill(dead, 0)
    dq = problem.factor * (ds @ part.k)
    dk = problem.factor * (ds.transpose(1, 2) @ part.q)
    return BlockGradients(dq, dk, dv, flows, raw.detach(), sink_flow)


def _truncated(problem: OracleProblem, products: Tensor) -> Tensor:
    """dP with the expected error of tensor cores, which truncate the sum with each 16 products.

    A truncation takes half a unit in the last place, about 2^-25 of the result. A product of
    float32 numbers is six of 16-bit numbers.
    """
    times = math.ceil(problem.v.shape[3] / 16) * (1 if problem.q.dtype.itemsize == 2 else 6)
    return products * (1 - times * 2.0**-25)


def _algorithm_3_of_weights(
    problem: OracleProblem,
    part: ScoreBlock,
    do: Tensor,
    raw: Tensor,
    weights: Tensor,
    slope: Tensor | None,
    *,
    from_rounded: bool,
) -> BlockGradients:
    """`_algorithm_3` with weights that are no exponentials.

    Args:
        do: dO of the block.
        raw: scores before the score function.
        weights: 0 where the mask is false.
        slope: their derivatives by the scores.
    """
    dp = part.dropped(do @ part.v.transpose(1, 2))
    dp = _truncated(problem, dp) if from_rounded else dp
    factor, d = torch.ones_like(weights[..., :1]), torch.zeros_like(weights[..., :1])
    if problem.spec.sums_weights:
        added = added_weights(problem, weights) if from_rounded else weights
        sums = kept_sums(problem, weights) if from_rounded else weights.sum(dim=-1, keepdim=True)
        factor = torch.where(sums == 0, 0, 1 / sums)
        out = part.dropped(added * factor) @ part.v
        out = out.to(problem.q.dtype).to(problem.work) if from_rounded else out
        d = (do * out).sum(dim=-1, keepdim=True)
        d = d.float().to(problem.work) if from_rounded else d
    dv = part.dropped(weights * factor).transpose(1, 2) @ do
    dp_difference = factor * (dp - d)
    dead = torch.zeros_like(raw, dtype=torch.bool) if part.mask is None else ~part.mask
    flows = _flows(problem, part, raw, dp_difference, dead)
    ds = (dp_difference if slope is None else dp_difference * slope).masked_fill(dead, 0)
    dq = problem.factor * (ds @ part.k)
    dk = problem.factor * (ds.transpose(1, 2) @ part.q)
    return BlockGradients(dq, dk, dv, flows, raw.detach())


def _autograd(
    problem: OracleProblem, part: ScoreBlock, dout: Tensor, dlse: Tensor | None
) -> BlockGradients:
    """`_algorithm_3` by autograd, in two parts around the score function."""
    q, k, v = (operand.detach().requires_grad_() for operand in (part.q, part.k, part.v))
    raw = (q @ k.transpose(1, 2)) * problem.factor
    modified, slope = problem.score_and_slope(raw.detach(), part)
    scores = problem.masked(modified, part).detach().requires_grad_()
    dead = scores == -math.inf
    if not problem.spec.is_softmax:
        dead = torch.zeros_like(dead) if part.mask is None else ~part.mask
    sink = None
    if part.sink is not None:
        sink = part.sink.detach().expand(*scores.shape[:2], 1).clone().requires_grad_()
    out, lse = out_and_lse(problem, scores, v, part, sink)

    outputs, output_gradients = [out], [part.rows_of(dout).to(problem.work)]
    if dlse is not None:
        outputs.append(lse)
        output_gradients.append(part.rows_of(dlse).to(problem.real))
    leaves = [scores, v] if sink is None else [scores, v, sink]
    ds, dv, *sink_flow = torch.autograd.grad(outputs, leaves, output_gradients)
    flows = _flows(problem, part, raw.detach(), ds, dead)
    if slope is not None:
        ds = (ds.to(problem.real) * slope).to(problem.work)
    ds = ds.masked_fill(dead, 0)
    dq, dk = torch.autograd.grad(raw, [q, k], ds)
    return BlockGradients(dq, dk, dv, flows, raw.detach(), *sink_flow)


@dataclass(frozen=True)
class BlockGradients:
    """The contributions of one block of scores to the gradients.

    Attributes:
        dq, dk, dv: contributions of each pair, [n, rows, d], [n, seq_k, d] and [n, seq_k, d_v].
        flows: contributions of each score to the elements of learned tensors that it reads,
            [n, seq_q, seq_k] for each of `_elements`.
        scores: s, before the score function.
        sink_flow: contribution of each row to the sink's gradient, [n, seq_q, 1]; None without a
            sink.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    flows: tuple[Tensor, ...]
    scores: Tensor
    sink_flow: Tensor | None = None


class _Gradients:
    """Sums of the contributions: dq by row, dk and dv over rows and the heads of a group."""

    def __init__(self, problem: OracleProblem, dtype: torch.dtype) -> None:
        self.problem = problem
        self.operands = (problem.q, problem.k, problem.v)
        self.learned = tuple(_learned(problem).values())
        device = problem.q.device
        self.sums = [
            torch.zeros(x.shape[0] * x.shape[1], *x.shape[2:], dtype=dtype, device=device)
            for x in self.operands
        ]
        self.captured = [torch.zeros(x.shape, dtype=dtype, device=device) for x in self.learned]

    def add(self, part: ScoreBlock, block: BlockGradients) -> None:
        dtype = self.sums[0].dtype
        self.sums[0][part.pairs, part.rows] = block.dq.to(dtype)
        for total, gradient in zip(self.sums[1:], (block.dk, block.dv), strict=True):
            total[:, part.keys].index_add_(0, part.kv, gradient.to(dtype))
        added = _added(self.problem, part, block.scores, block.flows, block.sink_flow)
        for total, gradient in zip(self.captured, added, strict=True):
            total += gradient

    def results(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """The gradients in ``dtype``; where it is None, each in the dtype of its tensor."""
        sums, tensors = [*self.sums, *self.captured], [*self.operands, *self.learned]
        return tuple(
            total.view(x.shape).to(dtype or x.dtype) for total, x in zip(sums, tensors, strict=True)
        )


def _learned(problem: OracleProblem) -> dict[TensorSymbol, Tensor]:
    """The learned tensors by symbol, in the order of spec.tensors."""
    return {x.symbol: problem.values[x.symbol] for x in problem.spec.tensors if x.grad}


def _flows(
    problem: OracleProblem, part: ScoreBlock, scores: Tensor, ds: Tensor, dead: Tensor
) -> tuple[Tensor, ...]:
    """The contribution of each position to each element of a learned tensor that the score reads.

    Args:
        scores: s, before the score function.
        ds: gradient of s', before the factor ds'/ds; both [n, rows, seq_k].
        dead: bool of the same shape, true where s' is -inf, by the mask or the score function.

    Returns:
        A tensor [n, rows, seq_k] in `problem.real` for each of `_elements`.
    """
    slopes = (problem.slope_by(element, scores, part) for element in _elements(problem))
    return tuple((ds.to(problem.real) * slope).masked_fill(dead, 0) for slope in slopes)


def _added(
    problem: OracleProblem,
    part: ScoreBlock,
    scores: Tensor,
    flows: tuple[Tensor, ...],
    sink_flow: Tensor | None,
) -> tuple[Tensor, ...]:
    """The sums of one block's contributions by element: gradients in the tensors' shapes.

    Args:
        flows: the result of `_flows`.
        sink_flow: the rows' contributions to the gradient of the sink, [n, rows, 1].

    Returns:
        A tensor in `problem.real` for each learned tensor, including a learned sink.
    """
    real = problem.real
    leaves = {
        symbol: tensor.detach().to(real, copy=True).requires_grad_()
        for symbol, tensor in _learned(problem).items()
    }
    total = {symbol: torch.zeros_like(leaf) for symbol, leaf in leaves.items()}
    sink = problem.spec.sink
    elements = _elements(problem)
    if sink_flow is not None and sink.symbol in total:
        elements, flows = [*elements, problem.sink_element], (*flows, sink_flow)
    if flows:
        values = {**part.values, SCORE: scores.to(real), **leaves}
        with torch.enable_grad():
            read = [evaluate(element, values, real) for element in elements]
        flow_sums = [flow.sum_to_size(x.shape).to(x) for flow, x in zip(flows, read, strict=True)]
        tensor_gradients = torch.autograd.grad(
            read, list(leaves.values()), flow_sums, allow_unused=True
        )
        total |= {s: x for s, x in zip(leaves, tensor_gradients, strict=True) if x is not None}
    return tuple(total.values())


def _elements(problem: OracleProblem) -> list[Element]:
    learned = _learned(problem)
    return [e for e in elements_of(problem.spec.score) if e.tensor in learned]


def _check(problem: OracleProblem, dout: Tensor, dlse: Tensor | None) -> None:
    """Checks shapes that would broadcast without an error.

    Raises:
        InputError: dout or dlse does not have the shape of out or lse.
    """
    rows = tuple(problem.q.shape[:3])
    wanted = {"dout": (*rows, problem.v.shape[3]), "dlse": rows}
    for name, tensor in (("dout", dout), ("dlse", dlse)):
        if tensor is not None and tuple(tensor.shape) != wanted[name]:
            raise InputError(
                f"{name} does not have the shape of {name[1:]}",
                where=f"reference of {problem.spec.name}, argument {name}",
                numbers=f"{name} {tuple(tensor.shape)}, expected {wanted[name]}",
                way_out=f"a gradient of shape {wanted[name]}",
            )
    if dlse is not None and not problem.spec.is_softmax:
        raise InputError(
            "weights that are no exponentials have no lse, and dlse no meaning",
            where=f"reference of {problem.spec.name}, argument dlse",
            numbers=f"normalize {problem.spec.normalize!r}, dlse {tuple(dlse.shape)}",
            way_out="dlse=None",
        )
