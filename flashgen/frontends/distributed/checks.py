"""Checks of a distributed call, and what the ranks agree on before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from flashgen.calls.ops import Attention
from flashgen.calls.ops.registration import operator_of
from flashgen.calls.runtime.arguments.options import check_names, draw_rng
from flashgen.calls.runtime.arguments.positions import offset_of
from flashgen.frontends.distributed.exchange import Exchange
from flashgen.frontends.distributed.sharding import Sharding
from flashgen.shared.dropout import BLOCK
from flashgen.shared.errors import InputError
from flashgen.shared.signature import OFFSETS
from flashgen.spec.language import SEQ_K, SEQ_Q, python_text
from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

WHERE = "flashgen.distributed.attention"


def check_operands(op: Any, operands: Mapping[str, Any]) -> None:
    """Refuses what is no operator, and operands that have no rows to compare with the chunks."""
    if not isinstance(op, Attention):
        refuse("no operator is given", "op", f"a {type(op).__name__}", "fg.attention(spec)")
    for name, x in operands.items():
        if not isinstance(x, Tensor) or x.dim() != 4:
            given = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            axes = "[batch, heads, own rows, head_dim]"
            refuse(f"{name} is not a tensor of 4 dimensions", name, given, f"a tensor {axes}")


def check_spec(
    op: Attention, method: str, whole: Mapping[str, int] | None, captures: Mapping[str, Any]
) -> None:
    """Refuses what cannot be computed on parts, and captures that are not those of the spec."""
    if whole is not None and not (isinstance(whole, Mapping) and set(whole) == {"heads"}):
        refuse(
            "the lengths of the whole follow from the chunks",
            "whole",
            f"given {whole!r:.200}",
            'whole={"heads": ...}, where this group has some of the heads',
        )
    spec = op.spec
    if spec.paged:
        refuse(
            "the pages of a cache cannot be divided over ranks",
            "op",
            f"spec {spec.name} has paged=True",
            "the operator itself on each rank, for some of the heads: h_offset= and whole=",
        )
    read = {SEQ_Q: "fg.seq_q", SEQ_K: "fg.seq_k"}
    found = [read[s] for s in spec.mask.free_symbols | spec.score.free_symbols if s in read]
    if found and spec.packed and method != "all_to_all":
        refuse(
            "a call on a part of a packed sequence does not know its length, which the spec reads",
            "op",
            f"spec {spec.name} reads {', '.join(sorted(found))}",
            'method="all_to_all"',
        )
    check_names(operator_of(spec).signature, dict(captures))


def offsets_of(
    spec: AttentionSpec,
    method: str,
    given: tuple[Any, Any],
    shardings: tuple[Sharding, Sharding],
    sharded: Mapping[str, int] | None,
) -> tuple[int, int]:
    """The positions of the first query and of the first key of the whole.

    Raises:
        InputError: they are not whole numbers, or the call has parts without a meaning elsewhere
            than at 0.
    """
    for name, value in zip(OFFSETS, given, strict=True):
        if isinstance(value, Tensor):
            refuse(
                "which ranks need which keys is decided on the host, by numbers",
                name,
                f"a tensor of {tuple(value.shape)}",
                f"{name}=int({name}), or one call for each batch entry",
            )
    q_offset, k_offset = (
        offset_of(name, value, sharding.length)
        for name, value, sharding in zip(OFFSETS, given, shardings, strict=True)
    )
    if not (q_offset or k_offset):
        return 0, 0
    name, number = OFFSETS[0 if q_offset else 1], q_offset or k_offset
    if spec.packed and method != "all_to_all":
        refuse(
            "parts of packed sequences have offsets of their own",
            name,
            f"{number}; spec {spec.name} has packed sequences",
            f'{name}=0, or method="all_to_all"',
        )
    if sharded:
        refuse(
            "a tensor that is divided like the sequence has no elements for positions before it",
            name,
            f"{number}, with sharded={dict(sharded)!r:.200}",
            f"{name}=0, or the whole tensor on every rank",
        )
    return q_offset, k_offset


def shared_rng(
    exchange: Exchange,
    spec: AttentionSpec,
    method: str,
    shardings: tuple[Sharding, Sharding],
    dropout_p: float,
    rng: Tensor | None,
    device: torch.device,
) -> Tensor:
    """The seed and offset of rank 0, with which all ranks drop the elements of one call."""
    divided = method != "all_to_all"
    if spec.packed and divided:
        refuse(
            f"with dropout, parts of sequences begin at multiples of {BLOCK}",
            "dropout_p",
            f"{dropout_p}; spec {spec.name} has packed sequences, which begin anywhere in a chunk",
            'method="all_to_all", or dropout_p=0',
        )
    starts = [chunk.start for sharding in shardings for chunk in sharding.chunks]
    if divided and any(start % BLOCK for start in starts):
        refuse(
            f"with dropout, chunks begin at multiples of {BLOCK}",
            "shard",
            f"a chunk begins at {next(start for start in starts if start % BLOCK)}",
            f"chunks whose lengths are multiples of {BLOCK}, or dropout_p=0",
        )
    drawn = draw_rng(dropout_p, device) if rng is None else rng.clone()
    assert drawn is not None, "dropout_p is above 0"
    exchange.from_first(drawn, "seed and offset of dropout")
    return drawn


def check_rows(exchange: Exchange, each: Any) -> None:
    for name, sharding, tensor in each:
        rows = sharding.rows(exchange.rank)
        if tensor.shape[2] != rows:
            refuse(
                f"{name} does not have the rows of this rank's chunks",
                name,
                f"rank {exchange.rank}: {tensor.shape[2]} rows, its chunks have {rows}",
                "the rows of the rank's chunks, one chunk behind the other",
            )


_agreed: set[Any] = set()


def compare_specs(exchange: Exchange, spec: AttentionSpec) -> str:
    """Compares the spec with those of the other ranks, once for each spec; returns its digest.

    Raises:
        InputError: the ranks have different specs; the error says what differs.
    """
    digest = spec.digest
    key = id(exchange.group), digest
    if key in _agreed:
        return digest
    mine = _parts_of(spec)
    everyone = exchange.everyones((digest, mine), "comparison of the specs")
    for rank, (other_digest, theirs) in enumerate(everyone):
        if other_digest != digest:
            differ = [name for name in mine if mine[name] != theirs[name]]
            shown = (
                ", ".join(f"{name} {_from_difference(own[name], other[name])}" for name in differ)
                for own, other in ((mine, theirs), (theirs, mine))
            )
            numbers = "\n".join(
                f"rank {number}: {text}"
                for number, text in zip((exchange.rank, rank), shown, strict=True)
            )
            what = f"the ranks have different specs: {', '.join(differ) or 'their expressions'}"
            refuse(what, "op", numbers, "the same spec on every rank")
    _agreed.add(key)
    return digest


def _parts_of(spec: AttentionSpec) -> dict[str, str]:
    """What a spec computes, part by part, in words that other ranks can compare."""
    plain = ("head_dim", "head_dim_v", "dtype", "scale", "dropout", "packed", "sink")
    sparse = spec.block_sparse
    return {
        "mask_mod": python_text(spec.mask),
        "score_mod": python_text(spec.score),
        **{name: str(getattr(spec, name)) for name in plain},
        "scalars": ", ".join(str(scalar.key) for scalar in spec.scalars),
        "tensors": ", ".join(str(tensor.key) for tensor in spec.tensors),
        "block_sparse": "None" if sparse is None else sparse.described,
        "name": str(spec.name),
    }


def _from_difference(text: str, other: str) -> str:
    """A text of at most 200 characters, those where it begins to differ among them."""
    pairs = enumerate(zip(text, other, strict=False))
    same = next((place for place, (own, their) in pairs if own != their), len(other))
    begin = 0 if len(text) <= 200 else max(0, same - 40)
    return ("..." if begin else "") + text[begin : begin + 200]


def compare(
    exchange: Exchange,
    facts: tuple[Any, ...],
    operands: tuple[Tensor, ...],
    captures: Mapping[str, Any],
    sharded: Mapping[str, int] | None,
) -> None:
    """Compares the call with those of the other ranks, once for each kind of call.

    Later calls of a kind are not compared: on a GPU, the host would have to wait for what it reads.

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
    said = (*facts[:2], repr(facts[2]), *facts[3:], repr(sorted(sharded.items())), repr(shapes))
    key = id(exchange.group), said
    if key in _agreed:
        return
    everyone = exchange.everyones(said, "comparison of the arguments")
    for rank, theirs in enumerate(everyone):
        if theirs != said:
            options = ("op", "method", "shard", "reduce_learned")
            names = (*options, "q_offset and k_offset", "deterministic", "sharded", "shapes")
            name, mine, other = next(
                (n, a, b) for n, a, b in zip(names, said, theirs, strict=True) if a != b
            )
            refuse(
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


def refuse(what: str, argument: str, numbers: str, way_out: str = "") -> NoReturn:
    raise InputError(
        what,
        where=f"argument {argument} of {WHERE}",
        numbers=numbers,
        way_out=way_out or "the operator itself, on one device",
    )
