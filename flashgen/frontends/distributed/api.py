"""`flashgen.distributed.attention`: one call of an operator over the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashgen.calls.ops import Attention
from flashgen.calls.ops import attention as operator
from flashgen.calls.runtime.arguments.options import settled
from flashgen.calls.runtime.arguments.refusals import untraced
from flashgen.calls.runtime.arguments.slices import scalars_of
from flashgen.calls.runtime.arguments.tensors import as_declared
from flashgen.calls.runtime.block_layouts import with_layout
from flashgen.calls.runtime.programs import SpecProgram, program_of
from flashgen.frontends.distributed import gathered, ring
from flashgen.frontends.distributed.checks import (
    WHERE,
    check_operands,
    check_rows,
    check_spec,
    compare,
    compare_specs,
    offsets_of,
    refuse,
    shared_rng,
)
from flashgen.frontends.distributed.context import Context, context_of
from flashgen.frontends.distributed.exchange import Exchange, group_of
from flashgen.frontends.distributed.heads import Exchanged, Replicated
from flashgen.frontends.distributed.part_calls import Whole
from flashgen.frontends.distributed.sharded_tensors import check_local, gathered_tensor
from flashgen.frontends.distributed.sharding import METHODS, Sharding, sharding_of
from flashgen.shared.call import CallOptions, Operands, OutputGradients
from flashgen.shared.signature import OFFSETS
from flashgen.spec.language.signature import signature_of

Tensor = torch.Tensor

_MODULES = {"all_gather": gathered, "ring": ring}


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
        InputError: an argument is invalid, or ranks disagree about it; nothing has been computed.
        DistributedError: a rank has ended, or the time limit of the group has passed.
    """
    exchange = Exchange(group_of(group, WHERE))
    if method not in METHODS:
        refuse("no such method", "method", f"{method!r}; available: {', '.join(METHODS)}")
    check_local({"q": q, "k": k, "v": v, **captures})
    check_operands(op, {"q": q, "k": k, "v": v})
    program = program_of(op.spec).of_dtype(q.dtype)
    if isinstance(program, SpecProgram) and program.spec is not op.spec:
        op = operator(program.spec)
    digest = compare_specs(exchange, op.spec)
    signature = signature_of(op.spec)
    captures = {**with_layout(signature, captures)}
    check_spec(op, method, whole, captures)
    names = [tensor.name for tensor in signature.tensors]
    captures |= zip(names, as_declared(signature, [captures[n] for n in names]), strict=True)
    first_head, heads, *_ = scalars_of(h_offset, whole, q, k).values()
    queries = sharding_of(shard, exchange.world, q.shape[2])
    keys = sharding_of(shard, exchange.world, k.shape[2])
    check_rows(exchange, (("q", queries, q), ("k", keys, k)))
    starts = offsets_of(op.spec, method, (q_offset, k_offset), (queries, keys), sharded)
    positions = queries.moved(starts[0]), keys.moved(starts[1])
    settled(deterministic)
    said = digest, method, shard, reduce_learned, starts, deterministic
    compare(exchange, said, (q, k, v), captures, sharded)
    for name, dim in (sharded or {}).items():
        captures[name] = gathered_tensor(exchange, name, captures.get(name), dim, (keys, queries))
    if dropout_p:
        rng = shared_rng(exchange, op.spec, method, positions, dropout_p, rng, q.device)
    numbers: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, "rng": rng}
    numbers |= {"backend": backend, "arch": arch, "deterministic": deterministic}
    offsets = dict(zip(OFFSETS, starts, strict=True))
    if exchange.world == 1:
        numbers |= {"h_offset": h_offset, "whole": whole, **offsets, **captures}
        return op(q, k, v, return_lse=return_lse, **numbers)  # type: ignore[call-overload,no-any-return]
    summed = frozenset(captures if reduce_learned else sharded or ())
    if method == "all_to_all":
        first = first_head + exchange.rank * (q.shape[1] // exchange.world)
        numbers |= {"h_offset": first, "whole": {"heads": heads}, **offsets}
        result = _by_heads(exchange, op, (q, k, v), (queries, keys), numbers, captures, summed)
    else:
        options = CallOptions(scale, 0, 0, backend, arch, deterministic, (), float(dropout_p))
        of_whole = Whole(first_head, heads, queries.length, keys.length)
        context = context_of(exchange, op, q, positions, of_whole, options, captures, summed)
        tensors = [captures[name] for name in context.names]
        result = _Attend.apply(_MODULES[method], context, q, k, v, rng, *tensors)  # type: ignore[no-untyped-call]
    return result if return_lse else result[0]


class _Attend(torch.autograd.Function):
    """out and lse of this rank's rows, by the method "all_gather" or "ring"."""

    @staticmethod
    def forward(ctx: Any, method: Any, context: Context, *tensors: Any) -> tuple[Tensor, Tensor]:
        """The tensors are q, k, v, rng and the captured tensors."""
        q, k, v, rng, *captured = tensors
        out, lse = method.forward(context, Operands(q, k, v, tuple(captured), rng))
        ctx.method, ctx.context = method, context
        ctx.save_for_backward(q, k, v, rng, out, lse, *captured)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, rng, out, lse, *captured = ctx.saved_tensors
        context: Context = ctx.context
        # Every rank takes part in every transfer, whatever its own results are used for.
        results = OutputGradients(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        operands = Operands(q, k, v, tuple(captured), rng)
        dq, dk, dv, learned = ctx.method.backward(context, operands, results)
        totals = context.learned_gradients(learned, operands, results)
        rest = (
            totals[name].to(x.dtype) if name in totals else None
            for name, x in zip(context.names, captured, strict=True)
        )
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, *rest


def _by_heads(
    exchange: Exchange,
    op: Attention,
    operands: tuple[Tensor, Tensor, Tensor],
    shardings: tuple[Sharding, Sharding],
    numbers: dict[str, Any],
    captures: dict[str, Any],
    summed: frozenset[str],
) -> tuple[Tensor, Tensor]:
    """The method "all_to_all"; ``numbers`` are the keyword arguments of the rank's call."""
    world, heads_kv = exchange.world, operands[1].shape[1]
    if heads_kv % world:
        refuse(
            "all_to_all gives each rank some of the key heads",
            "method",
            f"{heads_kv} key heads, {world} ranks",
            'method="all_gather" or "ring"',
        )
    q, k, v = (
        Exchanged.apply(exchange, sharding, True, x)  # type: ignore[no-untyped-call]
        for x, sharding in zip(operands, (shardings[0], shardings[1], shardings[1]), strict=True)
    )
    given = {
        name: Replicated.apply(exchange, numbers["deterministic"], x)  # type: ignore[no-untyped-call]
        if name in summed and isinstance(x, Tensor) and x.requires_grad
        else x
        for name, x in captures.items()
    }
    out, lse = op(q, k, v, return_lse=True, **numbers, **given)
    results = (
        Exchanged.apply(exchange, shardings[0], False, x)  # type: ignore[no-untyped-call]
        for x in (out, lse[..., None])
    )
    out, lse = results
    return out, lse[..., 0]
