"""`flashgen.distributed.attention`: one call of an operator over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashgen.calls.ops import Attention
from flashgen.calls.runtime.arguments.options import state_of
from flashgen.calls.runtime.arguments.refusals import untraced
from flashgen.frontends.distributed import gathered as all_gather
from flashgen.frontends.distributed import passes, ring
from flashgen.frontends.distributed.checks import Divided, Request, checked, compare, leave_refusal
from flashgen.frontends.distributed.context import Context, context_of
from flashgen.frontends.distributed.exchange import WHERE, Exchange, group_of
from flashgen.frontends.distributed.first_derivatives import FirstDerivative, first_only
from flashgen.frontends.distributed.heads import Exchanged, Replicated
from flashgen.frontends.distributed.sharded_tensors import gathered
from flashgen.shared.call import CallOptions, Operands, OutputGradients
from flashgen.shared.errors import called_by_users
from flashgen.shared.random_numbers import RANDOM_STATE

Tensor = torch.Tensor

_STEPS = {"all_gather": all_gather.steps, "ring": ring.steps}


@called_by_users()
@untraced(
    "flashgen.distributed.attention exchanges tensors between ranks and is not compiled; without "
    "fullgraph=True, a call is one break in the graph"
)
def attention(
    op: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    method: str = "all_gather",
    shard: Any = "contiguous",
    sharded: Mapping[str, int] | None = None,
    h_offset: int = 0,
    whole: Mapping[str, int] | None = None,
    scale: float | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    return_lse: bool = False,
    reduce_learned: bool = True,
    deterministic: bool | None = None,
    backend: str | None = None,
    arch: str | None = None,
    **captures: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes ``op`` for a sequence whose positions are divided over the ranks of a group.

    The results are those of one call on the whole: positions in the mask and the score are global,
    and the parts of a row are merged in float32 with their LSE. Gradients flow to q, k, v and to
    learned tensors.

    Args:
        op: the operator, made by `flashgen.attention`.
        q: [batch, heads_q, own rows, head_dim]: the positions of this rank.
        k: [batch, heads_kv, own rows, head_dim].
        v: [batch, heads_kv, own rows, head_dim_v].
        group: a process group or a DeviceMesh of one dimension; the default group if None.
        method: "all_gather": ranks receive the keys that their queries reach. "ring": keys travel
            from rank to rank; memory is linear in a rank's share. "all_to_all": ranks receive all
            positions of some heads; heads_kv is a multiple of the number of ranks.
        shard: "contiguous": rank r has the r-th part. "head_tail": rank r has chunks r and
            2W - 1 - r of 2W, one behind the other, which balances causal masks. Or the chunks of
            each rank, such as `balance(...).chunks`.
        sharded: captured tensors that lie on the ranks like the sequence, by name, with the
            dimension along which they are divided; all others are the same on every rank.
        h_offset: as for ``op``, where the group has some of the heads, as beside tensor parallel
            heads.
        whole: {"heads": ...}, the number of all query heads then.
        scale: as for ``op``.
        q_offset: global position of the first query of the whole, an int.
        k_offset: global position of the first key of the whole, an int.
        dropout_p: as for ``op``; above 0 chunks begin at multiples of 16, and the elements are
            those that one call drops.
        rng: as for ``op``; that of rank 0 is taken on all ranks.
        return_lse: as for ``op``.
        reduce_learned: whether the gradients of learned tensors are summed over the ranks here.
            False leaves each rank the part that its queries make, for parameters that FSDP, DDP or
            a loop over all parameters reduces. Those of ``sharded`` tensors are always complete.
        deterministic: as for ``op``; all sums have a fixed order then.
        backend: as for ``op``.
        arch: as for ``op``.
        captures: the scalars and the tensors that the spec captures, as for ``op``.

    Returns:
        out [batch, heads_q, own rows, head_dim_v], or with return_lse a tuple (out, lse).

    Raises:
        InputError: an argument is invalid, here or on another rank, or ranks disagree about it;
            nothing has been computed.
        DistributedError: a rank has ended, or the time limit of the group has passed.
    """
    exchange = Exchange(group_of(group, WHERE))
    options = CallOptions(
        scale, q_offset, k_offset, backend, arch, deterministic, None, (), dropout_p
    )
    part = {"h_offset": h_offset, "whole": whole}
    divided = Divided(method, shard, sharded, reduce_learned)
    try:
        request = checked(
            exchange, op, (q, k, v, rng), options, captures, divided, part, return_lse
        )
    except Exception as error:
        leave_refusal(exchange, error)
        raise
    compare(exchange, request.op.spec, request.descriptions)
    op, options, captures, rng = request.op, request.options, request.captures, request.rng
    for name, (dim, sharding) in request.sharded.items():
        captures[name] = gathered(exchange, captures[name], dim, sharding)
    draws = RANDOM_STATE in captures
    if (options.dropout_p or draws) and rng is not None:
        rng = rng.clone()
        exchange.from_first(rng, "seed and offset of random numbers")
        if draws:
            captures[RANDOM_STATE] = state_of(rng, q)
    summed = frozenset(captures if reduce_learned else request.sharded)
    numbers = {name: x for name, x in options._asdict().items() if name != "scalars"} | {"rng": rng}
    if exchange.world == 1 and request.queries.in_order and request.keys.in_order:
        attend: Callable[..., Tensor | tuple[Tensor, Tensor]] = op
        return attend(q, k, v, return_lse=return_lse, **numbers | part, **captures)
    if method == "all_to_all":
        result = _by_heads(exchange, request, (q, k, v), numbers, summed)
    else:
        context = context_of(exchange, request, q, summed)
        tensors = [captures[name] for name in context.names]
        drops = rng if op.spec.dropout else None
        result = _Attend.apply(_STEPS[method], context, q, k, v, drops, *tensors)  # type: ignore[no-untyped-call]
    return result if return_lse else result[0]


class _Attend(FirstDerivative):
    """out and lse of this rank's rows, by the method "all_gather" or "ring"."""

    @staticmethod
    def forward(ctx: Any, method: Any, context: Context, *tensors: Any) -> tuple[Tensor, Tensor]:
        """The tensors are q, k, v, rng and the captured tensors."""
        q, k, v, rng, *captured = tensors
        with context.exchange.finishing():
            out, lse = passes.forward(method, context, Operands(q, k, v, tuple(captured), rng))
        ctx.method, ctx.context = method, context
        ctx.save_for_backward(q, k, v, rng, out, lse, *captured)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_only
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, rng, out, lse, *captured = ctx.saved_tensors
        context: Context = ctx.context
        # Every rank takes part in every transfer, whatever its own results are used for.
        results = OutputGradients(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        operands = Operands(q, k, v, tuple(captured), rng)
        with context.exchange.finishing():
            dq, dk, dv, learned = passes.backward(ctx.method, context, operands, results)
        totals = context.learned_gradients(learned, operands, results)
        rest = (
            totals[name].to(x.dtype) if name in totals else None
            for name, x in zip(context.names, captured, strict=True)
        )
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, *rest


def _by_heads(
    exchange: Exchange,
    request: Request,
    operands: tuple[Tensor, Tensor, Tensor],
    numbers: dict[str, Any],
    summed: frozenset[str],
) -> tuple[Tensor, Tensor]:
    """The method "all_to_all"; ``numbers`` are keyword arguments of the rank's call."""
    whole = request.whole
    first_head = whole.first_head + exchange.rank * (whole.heads_q // exchange.world)
    shardings = request.queries, request.keys, request.keys
    q, k, v = (
        Exchanged.apply(exchange, sharding, True, x)  # type: ignore[no-untyped-call]
        for x, sharding in zip(operands, shardings, strict=True)
    )
    captures = {
        name: Replicated.apply(exchange, request.options.deterministic, x)  # type: ignore[no-untyped-call]
        if name in summed and isinstance(x, Tensor) and x.requires_grad
        else x
        for name, x in request.captures.items()
    }
    part = {"h_offset": first_head, "whole": {"heads": whole.heads}}
    if not request.op.spec.is_softmax:
        out = request.op(q, k, v, return_lse=False, **part, **numbers, **captures)
        out = Exchanged.apply(exchange, request.queries, False, out)  # type: ignore[no-untyped-call]
        return out, out.new_zeros(())
    out, lse = request.op(q, k, v, return_lse=True, **part, **numbers, **captures)
    results = (
        Exchanged.apply(exchange, request.queries, False, x)  # type: ignore[no-untyped-call]
        for x in (out, lse[..., None])
    )
    out, lse = results
    return out, lse[..., 0]
