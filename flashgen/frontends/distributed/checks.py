"""Checks of a distributed call, and what the ranks agree on before anything is computed.

Each rank checks its arguments as one call on the whole sequence would check them. Before a call of
a new kind the ranks exchange notes, a hash of what they ask for or the error of a rank that
refuses its arguments, so that none waits for a rank that will not come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from flashgen.calls.ops import Attention
from flashgen.calls.ops import attention as operator
from flashgen.calls.runtime.arguments.call import Call, check, check_contents
from flashgen.calls.runtime.arguments.options import (
    check_names,
    draw_rng,
    is_deterministic,
    new_rng,
    probability_of,
    refuse_return_lse,
    state_of,
)
from flashgen.calls.runtime.arguments.positions import offset_of
from flashgen.calls.runtime.arguments.tensors import as_declared
from flashgen.calls.runtime.arguments.tensors import check_operands as check_own
from flashgen.calls.runtime.block_layouts import with_layout
from flashgen.calls.runtime.programs import SpecProgram, Variant, program_of
from flashgen.frontends.distributed.exchange import REFUSAL, WHERE, Exchange, refuse
from flashgen.frontends.distributed.reach import decisive
from flashgen.frontends.distributed.sharded_tensors import (
    check_local,
    check_sharded,
    zeros_of_length,
)
from flashgen.frontends.distributed.sharding import Sharding, check_method, sharding_of
from flashgen.shared.arch import facts as facts_of
from flashgen.shared.call import CallOptions, CheckedCall, Operands
from flashgen.shared.dropout import BLOCK
from flashgen.shared.errors import FlashgenError, InputError
from flashgen.shared.random_numbers import RANDOM_STATE
from flashgen.shared.signature import OFFSETS
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SEQ_K, SEQ_Q

Tensor = torch.Tensor


class Request(NamedTuple):
    """What a call asks for, checked on this rank.

    Attributes:
        op: for the dtype of q.
        queries, keys: the positions that each rank has, from 0 on.
        whole: the sizes and the numbers of one call on the whole.
        options: of that call, without scalars.
        captures: the scalars and the captured tensors by name, as the spec declares them.
        sharded: the dimension along which each divided captured tensor is divided, and how.
        rng: seed and offset of random numbers; None where there are none.
        descriptions: in words, the arguments that all ranks have to give alike, by name.
    """

    op: Attention
    queries: Sharding
    keys: Sharding
    whole: CheckedCall
    options: CallOptions
    captures: dict[str, Any]
    sharded: dict[str, tuple[int, Sharding]]
    rng: Tensor | None
    descriptions: dict[str, str]


class Divided(NamedTuple):
    """How a call is divided over ranks: arguments of `flashgen.distributed.attention`."""

    method: Any
    shard: Any
    sharded: Any
    reduce_learned: Any


def checked(
    exchange: Exchange,
    op: Any,
    operands: tuple[Any, Any, Any, Any],
    options: CallOptions,
    captures: Mapping[str, Any],
    divided: Divided,
    part: Mapping[str, Any],
    return_lse: Any,
) -> Request:
    """Checks the arguments of `flashgen.distributed.attention` on this rank.

    Args:
        operands: q, k, v and rng.
        part: h_offset and whole.

    Raises:
        FlashgenError: an argument is invalid.
    """
    method, shard, sharded, _ = divided
    _check_switches(op, captures, divided, return_lse)
    q, k, v, rng = operands
    by_name: dict[str, Any] = {"q": q, "k": k, "v": v}
    check_local({**by_name, **captures})
    _check_kinds(op, by_name)
    program = program_of(op.spec).with_dtype(q.dtype)
    assert isinstance(program, SpecProgram), "that of a spec"
    op, signature = operator(program.spec), program.signature
    captures = dict(with_layout(signature, captures))
    if signature.draws:
        rng = new_rng(q.device) if rng is None else rng
        captures[RANDOM_STATE] = state_of(rng, q)
    _check_spec(op.spec, method, part["whole"])
    check_names(signature, captures)
    names = [tensor.name for tensor in signature.tensors]
    captures |= zip(names, as_declared(signature, [captures[n] for n in names]), strict=True)
    check_own(signature, q, k, v)
    queries, keys = (sharding_of(shard, exchange.world, x.shape[2]) for x in (q, k))
    _check_shares(exchange, method, (queries, keys), q, k)
    q_offset, k_offset = _offsets_of(op.spec, method, options, (queries, keys), sharded)
    sharded = check_sharded(exchange.rank, captures, sharded, (keys, queries))
    options = options._replace(
        q_offset=q_offset,
        k_offset=k_offset,
        deterministic=is_deterministic(options.deterministic),
        dropout_p=probability_of(options.dropout_p),
    )
    if options.dropout_p and rng is None:
        rng = draw_rng(options.dropout_p, q.device)
    if options.dropout_p and method != "all_to_all":
        _check_blocks(op.spec, options, (queries.shifted(q_offset), keys.shifted(k_offset)))
    # As one device would have them: the checks read shapes, and the values of what is not divided.
    lengths = queries.length, keys.length, keys.length
    q, k, v = (zeros_of_length(x, 2, length) for x, length in zip((q, k, v), lengths, strict=True))
    zeros = {n: zeros_of_length(captures[n], dim, s.length) for n, (dim, s) in sharded.items()}
    call = Call.from_arguments(
        program,
        lambda *fields: program_of(program.variant(Variant(*fields))),
        Operands(q, k, v, (), rng),
        options,
        {**captures, **zeros},
        **part,
    )
    signature = call.program.signature
    whole = check(signature, call.operands, call.options)
    captured_names = [tensor.name for tensor in signature.tensors]
    check_contents(
        signature, dict(zip(captured_names, call.operands.captured, strict=True)), whole, k
    )
    facts_of(call.program.target(options.backend, options.arch, q.device).arch)
    request = Request(op, queries, keys, whole, options, captures, sharded, rng, {})
    return request._replace(descriptions=_descriptions(exchange, request, divided, by_name))


def _check_switches(op: Any, captures: Mapping[str, Any], divided: Divided, lse: Any) -> None:
    """Refuses options that no distributed call has; ``lse``: return_lse."""
    check_method(divided.method)
    if lse is not False and (lse is not True or not op.spec.is_softmax):
        refuse_return_lse(lse)
    if "return_aux" in captures:
        refuse(
            "a distributed call returns no statistics",
            "return_aux",
            "each rank sees some of the keys of its rows, and some of the queries of its keys",
            "return_lse=True; or flashgen.attention on all keys, which method='all_to_all' divides "
            "by heads",
        )
    reduce_learned = divided.reduce_learned
    if type(reduce_learned) is not bool:
        what, numbers = "reduce_learned is neither True nor False", f"given {reduce_learned!r:.200}"
        refuse(what, "reduce_learned", numbers, "reduce_learned=False beside FSDP or DDP")


def _check_shares(
    exchange: Exchange, method: str, shardings: tuple[Sharding, Sharding], q: Tensor, k: Tensor
) -> None:
    """Refuses operands that are not this rank's part of a divided call."""
    for name, sharding, x in zip("qk", shardings, (q, k), strict=True):
        if x.shape[2] != (rows := sharding.rows(exchange.rank)):
            refuse(
                f"{name} does not have the rows of this rank's chunks",
                name,
                f"rank {exchange.rank}: {x.shape[2]} rows, its chunks have {rows}",
                "the rows of the rank's chunks, one chunk behind the other",
            )
    if method == "all_to_all" and k.shape[1] % exchange.world:
        refuse(
            "all_to_all gives each rank some of the key heads",
            "method",
            f"{k.shape[1]} key heads, {exchange.world} ranks",
            'method="all_gather" or "ring"',
        )


def _descriptions(
    exchange: Exchange, request: Request, divided: Divided, operands: dict[str, Tensor]
) -> dict[str, str]:
    """`Request.descriptions`; ``operands``: q, k and v of this rank."""
    shard, whole = divided.shard, request.whole
    dims = {name: dim for name, (dim, _) in request.sharded.items()} | dict.fromkeys("qkv", 2)
    described = {n: _described(x, dims.get(n)) for n, x in (operands | request.captures).items()}
    if exchange.world > 1 and exchange.device == "cpu":
        # Ranks that decide what travels by different contents would wait for one another.
        for name in (decisive(request.op.spec) & request.captures.keys()) - request.sharded.keys():
            described[name] += f", of contents {_contents(request.captures[name])}"
    row_counts = [str(sharding.rows(exchange.rank)) for sharding in (request.queries, request.keys)]
    options = request.options._asdict()
    return {
        "method": divided.method,
        "shard": shard if isinstance(shard, str) else str(request.keys.chunks_by_rank),
        # Those of a list of chunks may differ.
        **({_ROWS: ", ".join(row_counts)} if isinstance(shard, str) else {}),
        "reduce_learned": str(divided.reduce_learned),
        **{name: str(value) for name, value in options.items() if name != "scalars"},
        "heads": f"{whole.first_head} of {whole.heads}",
        **described,
    }


def _check_kinds(op: Any, operands: Mapping[str, Any]) -> None:
    """Refuses objects that are no operator, and operands without rows to compare with chunks."""
    if not isinstance(op, Attention) or not isinstance(op.spec, AttentionSpec):
        refuse("no operator of a spec is given", "op", f"{op!r:.200}", "fg.attention(spec)")
    for name, x in operands.items():
        if not isinstance(x, Tensor) or x.dim() != 4:
            numbers = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            axes = "[batch, heads, own rows, head_dim]"
            refuse(f"{name} is not a tensor of 4 dimensions", name, numbers, f"a tensor {axes}")


def _check_spec(spec: AttentionSpec, method: str, whole: Any) -> None:
    """Refuses specs that cannot be computed on parts."""
    if whole is not None and not (isinstance(whole, Mapping) and set(whole) == {"heads"}):
        refuse(
            "the lengths of the whole follow from the chunks",
            "whole",
            f"given {whole!r:.200}",
            'whole={"heads": ...}, where this group has some of the heads',
        )
    if spec.paged:
        refuse(
            "the pages of a cache cannot be divided over ranks",
            "op",
            f"spec {spec.name} has paged=True",
            "the operator itself on each rank, for some of the heads: h_offset= and whole=",
        )
    if spec.chooses:
        refuse(
            "lists of blocks of keys are those of a whole sequence",
            "op",
            f"spec {spec.name} has {spec.block_sparse!r}",
            "the operator itself on each rank, with the lists of its batch entries or key heads",
        )
    if spec.shared_kv:
        refuse(
            "keys and values travel between ranks as two tensors",
            "op",
            f"spec {spec.name} has shared_kv=True",
            f"spec.replace(shared_kv=False), and kv[..., :{spec.head_dim_v}] as v: gradients add",
        )
    read = {SEQ_Q: "fg.seq_q", SEQ_K: "fg.seq_k"}
    lengths_read = [read[s] for s in spec.mask.free_symbols | spec.score.free_symbols if s in read]
    if lengths_read and spec.packed and method != "all_to_all":
        refuse(
            "a call on a part of a packed sequence does not know its length, which the spec reads",
            "op",
            f"spec {spec.name} reads {', '.join(sorted(lengths_read))}",
            'method="all_to_all"',
        )


def _offsets_of(
    spec: AttentionSpec,
    method: str,
    options: CallOptions,
    shardings: tuple[Sharding, Sharding],
    sharded: Any,
) -> list[int]:
    """The positions of the first query and of the first key of the whole.

    Raises:
        InputError: they are not whole numbers, or the call has parts without a meaning elsewhere
            than at 0.
    """
    offsets = []
    for name, sharding in zip(OFFSETS, shardings, strict=True):
        value = getattr(options, name)
        if isinstance(value, Tensor):
            refuse(
                "which ranks need which keys is decided on the host, by numbers",
                name,
                f"a tensor of {tuple(value.shape)}",
                f"{name}=int({name}), or one call for each batch entry",
            )
        offsets.append(number := offset_of(name, value, sharding.length))
        if number and spec.packed and method != "all_to_all":
            refuse(
                "parts of packed sequences have offsets of their own",
                name,
                f"{number}; spec {spec.name} has packed sequences",
                f'{name}=0, or method="all_to_all"',
            )
        if number and sharded:
            refuse(
                "a tensor that is divided like the sequence has no elements for positions before "
                "it",
                name,
                f"{number}, with sharded={sharded!r:.200}",
                f"{name}=0, or the whole tensor on every rank",
            )
    return offsets


def _check_blocks(spec: AttentionSpec, options: CallOptions, shardings: tuple[Any, Any]) -> None:
    """Refuses dropout where parts of sequences begin inside of a block of random bits."""
    if spec.packed:
        refuse(
            f"with dropout, parts of sequences begin at multiples of {BLOCK}",
            "dropout_p",
            f"{options.dropout_p}; spec {spec.name} has packed sequences, which begin anywhere in "
            "a chunk",
            'method="all_to_all", or dropout_p=0',
        )
    starts = [chunk.start for sharding in shardings for chunk in sharding.chunks]
    inside = [start for start in starts if start % BLOCK]
    if inside:
        refuse(
            f"with dropout, chunks begin at multiples of {BLOCK}",
            "shard",
            f"a chunk begins at {inside[0]}",
            f"chunks whose lengths are multiples of {BLOCK}, or dropout_p=0",
        )


def _described(value: Any, divided: int | None) -> str:
    """A capture in words; of a tensor, without the size along which it is divided."""
    if not isinstance(value, Tensor):
        return str(value)
    shape: list[Any] = list(value.shape)
    if divided is not None:
        shape[divided] = "divided"
    text = f"({', '.join(map(str, shape))}), {value.dtype}, on {value.device.type}"
    gradient = value.requires_grad and torch.is_grad_enabled()
    return text + (", needs a gradient" if gradient else "")


def _contents(tensor: Tensor) -> str:
    """A short hash of the elements of a tensor."""
    elements = tensor.detach().cpu().reshape(-1).clone()  # see `reach._array`
    return hashlib.sha256(elements.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


# ---- agreement -----------------------------------------------------------------------------------

_STEP = "comparison of the calls"

_ROWS = "rows of q and k"

_agreed: WeakKeyDictionary[Any, set[bytes]] = WeakKeyDictionary()
"""The calls that the ranks of a group agree on."""


def leave_refusal(exchange: Exchange, error: Exception) -> None:
    """Tells the ranks that compare their calls with this rank's call what is wrong with it."""
    parts = [str(error)]
    if isinstance(error, FlashgenError):
        parts = [error.what, error.where, error.numbers]
    exchange.leave_note(REFUSAL + "; ".join(parts).encode(errors="replace"), _STEP)


def compare(exchange: Exchange, spec: AttentionSpec, descriptions: Mapping[str, str]) -> None:
    """Compares the call with those of the other ranks.

    On GPUs this is once for each kind of call, because the host has to wait for what it reads.

    Raises:
        InputError: the ranks ask for different things, or a rank has refused its arguments.
        DistributedError: a rank has ended, or the time limit of the group has passed.
    """
    digest = hashlib.sha256(repr((spec.digest, descriptions)).encode()).hexdigest().encode()
    if exchange.world == 1 or digest in _agreed.get(exchange.group, ()):
        return
    notes = exchange.notes(digest, _STEP)
    for rank, note in enumerate(notes):
        if note.startswith(REFUSAL):
            raise InputError(
                "another rank has refused its arguments",
                where=WHERE,
                numbers=f"rank {rank}: {note[len(REFUSAL) :].decode(errors='replace')}",
                way_out=f"see the error of rank {rank}: the call needs all ranks",
            )
    if notes != [digest] * exchange.world:
        own_values = spec.digest, _parts_of(spec), descriptions
        _refuse_difference(exchange.rank, exchange.values_of_ranks(own_values, _STEP))
    if exchange.device == "cuda":
        _agreed.setdefault(exchange.group, set()).add(digest)


def _refuse_difference(rank: int, values: list[Any]) -> None:
    digest, *own_values = values[rank]
    number = next(n for n, other_values in enumerate(values) if other_values != values[rank])
    other_digest, *other_values = values[number]
    specs = digest != other_digest
    own, other = (parts[0 if specs else 1] for parts in (own_values, other_values))
    differ = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    named = ", ".join(differ) or "their expressions"
    lines = (
        ", ".join(f"{n} {_from_difference(a.get(n, ''), b.get(n, ''))}" for n in differ)
        for a, b in ((own, other), (other, own))
    )
    if specs:
        way_out = "the same spec on every rank"
    elif differ == [_ROWS]:
        way_out = _chunks_of([descriptions for _, _, descriptions in values])
    else:
        way_out = "the same options, and tensors that belong together, on every rank"
    refuse(
        f"the ranks have different specs: {named}"
        if specs
        else f"the ranks call with different arguments: {named}",
        "op" if specs else "shard" if differ[0] == _ROWS else differ[0],
        "\n".join(f"rank {n}: {text}" for n, text in zip((rank, number), lines, strict=True)),
        way_out,
    )


def _chunks_of(descriptions: list[Mapping[str, str]]) -> str:
    """The way out where ranks have different numbers of rows."""
    rows = [by_name[_ROWS].split(", ") for by_name in descriptions]
    if descriptions[0]["shard"] != "contiguous" or any(q != k for q, k in rows):
        return "as many rows on every rank, the last ones padding; or a list of chunks as shard"
    ends = accumulate((int(q) for q, _ in rows), initial=0)
    return f"shard={[[range(*pair)] for pair in pairwise(ends)]}"


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
    """At most 200 characters of a text, with the first one that differs from the other text."""
    pairs = enumerate(zip(text, other, strict=False))
    same = next((index for index, (a, b) in pairs if a != b), len(other))
    begin = 0 if len(text) <= 200 else max(0, same - 40)
    return ("..." if begin else "") + text[begin : begin + 200]
