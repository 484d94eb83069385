"""`flashgen.distributed.attention`: one call of an operator over the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch

from flashgen.call import CallOptions, Operands, OutputGradients
from flashgen.distributed import gathered, ring
from flashgen.distributed.context import Context
from flashgen.distributed.exchange import Exchange, group_of
from flashgen.distributed.heads import Exchanged, Replicated
from flashgen.distributed.reach import reached
from flashgen.distributed.sharded_tensors import check_local, whole
from flashgen.distributed.sharding import METHODS, Sharding, sharding_of
from flashgen.dropout import BLOCK
from flashgen.errors import InputError
from flashgen.language import SEQ_K, SEQ_Q, H
from flashgen.language.signature import partial
from flashgen.ops import Attention
from flashgen.ops.registration import operator_of
from flashgen.runtime.number_arguments import check_names, draw_rng

Tensor = torch.Tensor

_MODULES = {"all_gather": gathered, "ring": ring}

_WHERE = "flashgen.distributed.attention"


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
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    return_lse: bool = False,
    reduce_learned: bool = True,
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
            positions of some heads; heads_kv is a multiple of the number of ranks, the spec does
            not depend on heads, and nothing is dropped.
        shard: "contiguous": rank r has the r-th part. "head_tail": rank r has chunks r and
            2W - 1 - r of 2W, one behind the other, which balances causal masks. Or the chunks of
            each rank, such as `balance(...).chunks`.
        sharded: captured tensors that lie on the ranks like the sequence, by name, with the
            dimension along which they are divided; all others are the same on every rank.
        scale: as for ``op``.
        dropout_p: as for ``op``; above 0 chunks begin at multiples of 16, and the elements are
            those that one call drops.
        rng: as for ``op``; that of rank 0 is taken on all ranks.
        return_lse: as for ``op``.
        reduce_learned: whether the gradients of learned tensors are summed over the ranks here.
            False leaves each rank the part that its queries make, for parameters that FSDP, DDP or
            a loop over all parameters reduces. Those of ``sharded`` tensors are always complete.
        backend: as for ``op``.
        arch: as for ``op``.
        captures: the scalars and the tensors that the spec captures, as for ``op``.

    Returns:
        out [batch, heads_q, own rows, head_dim_v], or with return_lse a tuple (out, lse).

    Raises:
        InputError: an argument is invalid, or ranks disagree about it; nothing has been computed.
        DistributedError: a rank has ended, or the time limit of the group has passed.
    """
    exchange = Exchange(group_of(group, _WHERE))
    if method not in METHODS:
        _refuse("no such method", "method", f"{method!r}; available: {', '.join(METHODS)}")
    check_local({"q": q, "k": k, "v": v, **captures})
    _check(op, q, k, captures)
    queries = sharding_of(shard, exchange.world, q.shape[2])
    keys = sharding_of(shard, exchange.world, k.shape[2])
    _check_rows(exchange, (("q", queries, q), ("k", keys, k)))
    said = op.spec.digest, method, shard, reduce_learned
    _compare(exchange, said, (q, k, v), captures, sharded)
    for name, dim in (sharded or {}).items():
        captures[name] = whole(exchange, name, captures.get(name), dim, (keys, queries))
    if dropout_p:
        rng = _rng(exchange, method, (queries, keys), dropout_p, rng, q.device)
    if exchange.world == 1:
        numbers = {"scale": scale, "dropout_p": dropout_p, "rng": rng}
        given = {**numbers, "backend": backend, "arch": arch, **captures}
        return op(q, k, v, return_lse=return_lse, **given)  # type: ignore[call-overload,no-any-return]
    options = CallOptions(scale, 0, 0, backend, arch, None, (), float(dropout_p))
    summed = frozenset(captures if reduce_learned else sharded or ())
    if method == "all_to_all":
        result = _by_heads(exchange, op, (q, k, v), (queries, keys), options, captures, summed)
    else:
        context = _context(exchange, op, q, (queries, keys), options, captures)
        context = replace(context, summed=summed)
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


def _context(
    exchange: Exchange,
    op: Attention,
    q: Tensor,
    shardings: tuple[Sharding, Sharding],
    options: CallOptions,
    captures: Mapping[str, Any],
) -> Context:
    spec, operator = op.spec, operator_of(op.spec)
    sinkless = spec if spec.sink is None else spec.replace(sink=None)
    queries, keys = shardings
    scalars = {name: captures[name] for name in operator.scalars}
    tensors = {name: captures[name] for name in operator.tensors}
    sizes = q.shape[0], q.shape[1], queries.length, keys.length
    return Context(
        exchange,
        spec,
        operator,
        operator_of(partial(sinkless)),
        operator_of(sinkless),
        options._replace(scalars=tuple(scalars.values())),
        queries,
        keys,
        reached(spec, queries.chunks, keys.chunks, sizes, scalars, tensors),
        operator.tensors,
    )


def _by_heads(
    exchange: Exchange,
    op: Attention,
    operands: tuple[Tensor, Tensor, Tensor],
    shardings: tuple[Sharding, Sharding],
    options: CallOptions,
    captures: dict[str, Any],
    summed: frozenset[str],
) -> tuple[Tensor, Tensor]:
    world, spec = exchange.world, op.spec
    heads_kv = operands[1].shape[1]
    others = 'method="all_gather" or "ring"'
    if heads_kv % world:
        _refuse(
            "all_to_all gives each rank some of the key heads",
            "method",
            f"{heads_kv} key heads, {world} ranks",
            others,
        )
    if H in spec.mask.free_symbols | spec.score.free_symbols or spec.sink is not None:
        _refuse(
            "all_to_all computes with some of the heads, whose numbers the spec reads",
            "method",
            f"spec {spec.name}",
            others,
        )
    q, k, v = (
        Exchanged.apply(exchange, sharding, True, x)  # type: ignore[no-untyped-call]
        for x, sharding in zip(operands, (shardings[0], shardings[1], shardings[1]), strict=True)
    )
    given = {
        name: Replicated.apply(exchange, x)  # type: ignore[no-untyped-call]
        if name in summed and isinstance(x, Tensor) and x.requires_grad
        else x
        for name, x in captures.items()
    }
    numbers = {"scale": options.scale, "backend": options.backend, "arch": options.arch}
    out, lse = op(q, k, v, return_lse=True, **numbers, **given)
    results = (
        Exchanged.apply(exchange, shardings[0], False, x)  # type: ignore[no-untyped-call]
        for x in (out, lse[..., None])
    )
    out, lse = results
    return out, lse[..., 0]


# Checks.


def _check(op: Any, q: Tensor, k: Tensor, captures: Mapping[str, Any]) -> None:
    if not isinstance(op, Attention):
        _refuse("no operator is given", "op", f"a {type(op).__name__}", "fg.attention(spec)")
    for name in ("q_offset", "k_offset", "deterministic"):
        if captures.get(name):
            _refuse(f"{name} cannot be given to a distributed call yet", name, f"{captures[name]}")
    spec = op.spec
    if spec.packed or spec.block_sparse is not None:
        what = "packed sequences" if spec.packed else "a block layout"
        _refuse(f"a spec with {what} cannot be distributed yet", "op", f"spec {spec.name}")
    read = {SEQ_Q: "fg.seq_q", SEQ_K: "fg.seq_k"}
    found = [read[s] for s in spec.mask.free_symbols | spec.score.free_symbols if s in read]
    if found:
        _refuse(
            "a call on a part does not know the lengths of the whole, which the spec reads",
            "op",
            f"spec {spec.name} reads {', '.join(sorted(found))}",
            "a fg.Scalar for the length, given with each call",
        )
    check_names(operator_of(spec).signature, dict(captures))


def _rng(
    exchange: Exchange,
    method: str,
    shardings: tuple[Sharding, Sharding],
    dropout_p: float,
    rng: Tensor | None,
    device: torch.device,
) -> Tensor:
    """The seed and offset of rank 0, with which all ranks drop the elements of one call."""
    if method == "all_to_all" and exchange.world > 1:
        _refuse(
            "which elements are dropped depends on the head, of which all_to_all has some",
            "dropout_p",
            f"{dropout_p}",
            'method="all_gather" or "ring"',
        )
    starts = [chunk.start for sharding in shardings for chunk in sharding.chunks]
    if any(start % BLOCK for start in starts):
        _refuse(
            f"with dropout, chunks begin at multiples of {BLOCK}",
            "shard",
            f"a chunk begins at {next(start for start in starts if start % BLOCK)}",
            f"chunks whose lengths are multiples of {BLOCK}, or dropout_p=0",
        )
    drawn = draw_rng(dropout_p, device) if rng is None else rng.clone()
    assert drawn is not None, "dropout_p is above 0"
    exchange.from_first(drawn, "seed and offset of dropout")
    return drawn


def _check_rows(exchange: Exchange, each: Any) -> None:
    for name, sharding, tensor in each:
        rows = sharding.rows(exchange.rank)
        if tensor.shape[2] != rows:
            _refuse(
                f"{name} does not have the rows of this rank's chunks",
                name,
                f"rank {exchange.rank}: {tensor.shape[2]} rows, its chunks have {rows}",
                "the rows of the rank's chunks, one chunk behind the other",
            )


_agreed: set[Any] = set()


def _compare(
    exchange: Exchange,
    facts: tuple[Any, ...],
    operands: tuple[Tensor, ...],
    captures: Mapping[str, Any],
    sharded: Mapping[str, int] | None,
) -> None:
    """Compares the call with those of the other ranks, once for each kind of call.

    Raises:
        InputError: the ranks call different operators, or with tensors that do not fit together.
    """
    sharded = sharded or {}
    shapes = {
        name: _shape(x, sharded.get(name)) if isinstance(x, Tensor) else x
        for name, x in (*zip("qkv", operands, strict=True), *captures.items())
    }
    if not isinstance(facts[2], str):  # rows may differ, and are those of the chunks
        shapes |= {n: _shape(x, 2) for n, x in zip("qkv", operands, strict=True)}
    said = (*facts[:2], repr(facts[2]), facts[3], repr(sorted(sharded.items())), repr(shapes))
    key = id(exchange.group), said
    if key in _agreed:
        return
    everyone = exchange.everyones(said, "comparison of the arguments")
    for rank, theirs in enumerate(everyone):
        if theirs != said:
            names = ("spec", "method", "shard", "reduce_learned", "sharded", "shapes")
            name, mine, other = next(
                (n, a, b) for n, a, b in zip(names, said, theirs, strict=True) if a != b
            )
            _refuse(
                "the ranks call with different arguments",
                name,
                f"rank {exchange.rank}: {mine!s:.300}\nrank {rank}: {other!s:.300}",
                "the same operator, options and captured tensors on every rank",
            )
    _agreed.add(key)


def _shape(tensor: Tensor, divided: int | None) -> tuple[Any, ...]:
    """Shape and dtype of a tensor, without the dimension along which it is divided."""
    shape: list[Any] = list(tensor.shape)
    if divided is not None:
        shape[divided] = "divided"
    return (*shape, str(tensor.dtype))


def _refuse(what: str, argument: str, numbers: str, way_out: str = "") -> NoReturn:
    raise InputError(
        what,
        where=f"argument {argument} of {_WHERE}",
        numbers=numbers,
        way_out=way_out or "the operator itself, on one device",
    )
