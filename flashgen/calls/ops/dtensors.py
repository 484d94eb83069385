"""Calls of DTensors: each rank computes the batch entries and the heads that it has.

torch asks the rule here in place of DTensor's own way to find a sharding, for each registered
operator and each of its passes, in eager calls and in traces alike. Along a dimension of the device
mesh a call is divided by batch, by heads, or not at all. The local tensors of a rank are then the
operands of a call of their own where mask and score use the number of a batch entry or head only as
an index. Where they use it otherwise, and for dropout, the call is one on some heads of a whole
(`flashgen.spec.language.signature.in_whole`). Nothing but gradients of results is communicated:
other placements are refused.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flashgen.calls.ops.operator import NEEDED, Operator
from flashgen.calls.runtime.arguments.refusals import (
    is_dtensor,
    refuse,
    runs_while_traced,
    shape_of,
    shown,
)
from flashgen.calls.runtime.programs import Variant, program_of
from flashgen.shared.signature import (
    AXES,
    KEY_HEADS,
    LAYOUT_NAMES,
    PAGE_NAMES,
    WHOLE,
    CallSignature,
)
from flashgen.shared.signature import ROWS as OF_ROWS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Tensor = torch.Tensor
OperatorOf = Callable[[Any], Operator]

BATCH, HEADS = AXES
_ROWS = (BATCH, HEADS, "seq_q", "head_dim")
_MOST_PARTS = 256
"""Kinds of calls that an operator keeps."""

_FREE = ("out", "lse", "dout", "dlse")
"""Arguments of the backward operator that come in any placement, which users do not choose."""


def serve(operator: Operator, library: Any, operator_of: OperatorOf) -> None:
    """Registers the rules of an operator. This imports DTensor, which is slow where it is new.

    Args:
        operator_of: `flashgen.calls.ops.registration.operator_of`.
    """
    from torch.distributed.tensor import DTensor

    for name in (operator.name, f"{operator.name}_backward"):
        rule = functools.partial(_rule, operator, operator_of, name != operator.name)
        torch.library.register_torch_dispatch(f"flashgen::{name}", DTensor, rule, lib=library)

    def local_overload(*args: Any, **keywords: Any) -> Any:
        before, _calls.kept_uncached = _calls.kept_uncached, True
        try:
            return operator.overload(*args, **keywords)
        finally:
            _calls.kept_uncached = before

    operator.local_overload = local_overload


class _Calls(threading.local):
    """Whether the present call is one of a ``local_overload``."""

    kept_uncached = False


_calls = _Calls()


@runs_while_traced
def keep_uncached(operator: Operator) -> None:
    """Keeps programs that call ``operator.local_overload`` out of the cache of AOTAutograd.

    The program of a rank holds numbers of the rank, such as its first head, but the cache has one
    key for all ranks. It keeps no program that calls a function of Python.
    """
    torch.compiler.allow_in_graph(operator.local_overload)  # type: ignore[no-untyped-call]


def _check_uncached(operator: Operator) -> None:
    if get_proxy_mode() is not None and not _calls.kept_uncached:
        refuse(
            "a compiled call of DTensors has numbers of its rank, and torch would cache it for all",
            f"torch.ops.flashgen.{operator.name}",
            "traced with DTensors, without a mark for the cache",
            "fg.attention(spec)(q, k, v, ...), which sets the mark",
        )


def _rule(
    operator: Operator,
    operator_of: OperatorOf,
    backward: bool,
    cls: Any,
    overload: Any,
    types: Any,
    args: tuple[Any, ...],
    keywords: dict[str, Any] | None = None,
) -> tuple[DTensor, ...]:
    """The results of an operator for arguments among which are DTensors."""
    keywords = keywords or {}
    with torch.no_grad():  # the rule is below autograd
        key = _key(backward, args, keywords)
        part = operator.parts.get(key) if key is not None else None
        if part is None:
            if not backward:
                _check_uncached(operator)
            names = [argument.name for argument in overload._schema.arguments]
            # torch omits arguments with their defaults.
            arguments = dict(zip(names, args, strict=False))
            part = _part_of(operator, backward, arguments, keywords, operator_of)
            if key is not None and len(operator.parts) < _MOST_PARTS:
                operator.parts[key] = part
        return _computed(operator, part, backward, args, key is None)


class _Part(NamedTuple):
    """The work of a rank in calls of one kind.

    Attributes:
        operator, keywords: the operator that computes the part, with its keyword arguments.
        mesh: where the results lie.
        wanted: for each argument the placements of what the operator reads; None for what is no
            tensor of the mesh.
        results: the shape and the placements of each result; a shape of None is that of the local
            tensor.
        specs: the results' `DTensorSpec`, once they are known: making one takes longer than a call.
    """

    operator: Operator
    keywords: dict[str, Any]
    mesh: DeviceMesh
    wanted: tuple[tuple[Any, ...] | None, ...]
    results: tuple[tuple[Sequence[int] | None, tuple[Any, ...]], ...]
    specs: list[Any]


def _key(backward: bool, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The facts on which a `_Part` depends; None in a trace, whose sizes are symbols."""
    key_parts: list[Any] = [backward, repr(keywords) if keywords else ""]
    for x in args:
        if not is_dtensor(x):
            key_parts.append(None if x is None else x.shape)
            continue
        local = x._local_tensor
        if type(local) is not Tensor:
            return None
        key_parts += x._spec, local.stride()
    return None if torch._C._len_torch_dispatch_stack() else tuple(key_parts)


class _Division(NamedTuple):
    """How the ranks of a mesh divide a call.

    Attributes:
        axes: for each dimension of the mesh the axis of `AXES` that it divides, or "".
        sizes: the length of the whole along each dimension that may be divided.
        drops: whether elements are dropped.
        in_whole: why a rank computes some heads of a whole, with whole captured tensors; "" where
            its part is a call of its own.
    """

    signature: CallSignature
    mesh: DeviceMesh
    axes: tuple[str, ...]
    sizes: dict[str, int]
    drops: bool
    in_whole: str = ""

    @property
    def everywhere(self) -> tuple[Any, ...]:
        """The placements of what all ranks have."""
        from torch.distributed.tensor import Replicate

        return (Replicate(),) * self.mesh.ndim

    def dims(self, name: str) -> tuple[str | int, ...]:
        """The names of the dimensions of an argument."""
        if name in ("k", "v") and self.signature.paged:
            return ("pages", *_ROWS[1:])
        if name in ("q", "k", "v", *_FREE):
            return _ROWS[:3] if name in ("lse", "dlse") else _ROWS
        return next((x.dims for x in self.signature.tensors if x.name == name), ())

    def placements(self, name: str, shape: Sequence[int]) -> tuple[Any, ...]:
        """The placements of an argument on the mesh."""
        from torch.distributed.tensor import Replicate, Shard

        captured = name not in ("q", "k", "v", *_FREE, *OF_ROWS)
        placements: list[Any] = []
        for axis in self.axes:
            names = {BATCH: (BATCH,), HEADS: (HEADS, KEY_HEADS)}.get(axis, ())
            if captured and axis == HEADS and self.in_whole:
                names = ()
            shard_axes = [
                i
                for i, dim in enumerate(self.dims(name))
                if dim in names and not (captured and shape[i] == 1 < self.sizes[str(dim)])
            ]  # one element may be that of all
            placements.append(Shard(shard_axes[0]) if shard_axes else Replicate())
        return tuple(placements)

    def gradient_placements(self, name: str, shape: Sequence[int]) -> tuple[Any, ...]:
        """The placements of the gradient of an argument: sums where all parts read the argument."""
        from torch.distributed.tensor import Partial

        pairs = zip(self.axes, self.placements(name, shape), strict=True)
        return tuple(Partial() if axis and x.is_replicate() else x for axis, x in pairs)

    def first(self, axis: str, size: int) -> int:
        """Where the part of this rank begins along an axis, divided as torch.chunk divides it."""
        start = 0
        for number, divided in enumerate(self.axes):
            if divided == axis:
                step = -(-size // self.mesh.size(number))
                before = min(self.mesh.get_local_rank(number) * step, size)
                start, size = start + before, min(step, size - before)
        return start


def _division_of(signature: CallSignature, arguments: dict[str, Any]) -> _Division:
    """How the placements of q, k and v divide a call.

    Raises:
        InputError: in another way than along batch and heads, or one that the spec does not allow.
    """
    if signature.kv_dtype is not None:
        refuse(
            "a cache of 8 bits is not divided by DTensors",
            "argument k_scale",
            f"spec {signature.name} has kv_dtype {signature.kv_dtype!r}",
            "the local tensors of each rank, whose heads are a call of their own; or a cache of "
            "the dtype of q",
        )
    for name, x in check_spread(signature, arguments).items():
        for _, order in getattr(x._spec, "shard_order", None) or ():
            if list(order) != sorted(order):
                _refuse_placement(name, x)
        if x.device_mesh != arguments["q"].device_mesh:
            refuse(
                "the DTensors of a call are on different device meshes",
                f"argument {name}",
                f"{name} on {x.device_mesh}, q on {arguments['q'].device_mesh}",
                f"distribute_tensor({name}, q.device_mesh, ...)",
            )
    mesh = arguments["q"].device_mesh
    if mesh.get_coordinate() is None:
        refuse(
            "this rank is not part of the device mesh",
            "argument q",
            f"{mesh}",
            "a call on the ranks of the mesh alone",
        )
    drops = signature.dropout and arguments.get("dropout_p") is not None
    q, k = arguments["q"], arguments["k"]
    sizes = {BATCH: q.shape[0], HEADS: q.shape[1], KEY_HEADS: k.shape[1]}
    division = _Division(signature, mesh, (), sizes, drops)
    axes = tuple(_axis_of(division, arguments, number) for number in range(mesh.ndim))
    division = division._replace(axes=axes)
    if HEADS in axes:
        _check_heads(division, arguments)
    if BATCH in axes:
        _check_batch(division, arguments)
    why = _counts_heads(division) if HEADS in axes else ""
    if why and signature.choice is not None:
        refuse(
            "a rank cannot compute some heads of a whole whose queries choose their keys",
            "argument q",
            f"{why}; placements {arguments['q'].placements}",
            "Shard(0), the batch; or the call on q.to_local() and the others, whose heads count "
            "from 0 on each rank",
        )
    if drops and any(axes):
        why = why or "dropout counts batch entries and heads as in the whole"
    return division._replace(in_whole=why)


def check_spread(signature: CallSignature, arguments: dict[str, Any]) -> dict[str, Any]:
    """The tensors among the arguments of a call of DTensors that lie on the mesh.

    Raises:
        InputError: one of them is an ordinary tensor.
    """
    tensors = {name: x for name, x in arguments.items() if _is_spread(signature, name, x)}
    for name, x in tensors.items():
        if not is_dtensor(x):
            other = next(other for other in tensors if is_dtensor(tensors[other]))
            refuse(
                f"{name} is an ordinary tensor beside DTensors",
                f"argument {name}",
                f"shape {shape_of(x)}, on each rank; {other} is on {tensors[other].device_mesh}",
                f"{_on_all_ranks(name, name, other)} for a tensor that all ranks have; .to_local() "
                "of the others for a call of this rank alone",
            )
    return tensors


def _is_spread(signature: CallSignature, name: str, x: Any) -> bool:
    """Whether an argument is a DTensor, or has to be one beside others.

    All ranks have the same floats, which are tensors of no dimension, and the same block layout, of
    which flashgen makes lists.
    """
    if not isinstance(x, Tensor) or is_dtensor(x):
        return isinstance(x, Tensor)
    learned = any(tensor.name == name for tensor in signature.learned)
    return learned or (x.dim() > 0 and name not in LAYOUT_NAMES)


def _counts_heads(division: _Division) -> str:
    """How a call uses the number of a head other than to read what belongs to it; "" if not."""
    signature = division.signature
    group = division.sizes[HEADS] // max(division.sizes[KEY_HEADS], 1)
    if HEADS not in signature.divisible:
        uses = 'computes with h other than as the index of a dimension that is named "heads"'
        return f"spec {signature.name} {uses}"
    if signature.group not in (0, group):
        return (
            f"spec {signature.name} has a key head for {signature.group} query heads, by its index "
            f"h // {signature.group} of {KEY_HEADS}, and the call one for {group}"
        )
    return "the call is one on some heads of a whole" if _has_whole(signature) else ""


def _has_whole(signature: CallSignature) -> bool:
    return any(scalar.name == WHOLE[0] for scalar in signature.scalars)


def _axis_of(division: _Division, arguments: dict[str, Any], number: int) -> str:
    """The axis that a dimension of the mesh divides, by the placements of q, k and v."""
    from torch.distributed.tensor import Shard

    names_of_axes: dict[str, str] = {}
    for name in ("q", "k", "v"):
        placement = arguments[name].placements[number]
        if not placement.is_replicate():
            dims = division.dims(name)
            axis = dims[placement.dim] if type(placement) is Shard else ""
            if axis not in AXES:
                _refuse_placement(name, arguments[name])
            names_of_axes[str(axis)] = name
    if len(names_of_axes) > 1:
        name = names_of_axes.popitem()[1]
        _refuse_placement(name, arguments[name])
    return next(iter(names_of_axes), "")


def _check_heads(division: _Division, arguments: dict[str, Any]) -> None:
    q, k = arguments["q"], arguments["k"]
    sizes = [division.mesh.size(i) for i, axis in enumerate(division.axes) if axis == HEADS]
    ranks = functools.reduce(int.__mul__, sizes, 1)
    if k.shape[1] % ranks:
        heads, heads_kv = shape_of(q)[1], shape_of(k)[1]
        copies = ranks // math.gcd(heads_kv, ranks)
        refuse(
            "the heads of k and v cannot be divided among the ranks",
            "argument k",
            f"{heads_kv} heads of k and v, {heads} of q, {ranks} ranks",
            "a mesh of ranks that divide the heads, or Shard(0), the batch"
            if heads % ranks
            else f"each head of k and v {copies} times before they are sharded, "
            f"k.repeat_interleave({copies}, 1); or the call on k.to_local(), with one key head for "
            "all query heads of a rank",
        )


def _check_batch(division: _Division, arguments: dict[str, Any]) -> None:
    signature = division.signature
    q = arguments["q"]
    way_out = (
        "q.redistribute(placements=...) with Shard(1), the heads; or the call on q.to_local() and "
        "the others, whose batch entries count from 0 on each rank"
    )
    if signature.packed:
        refuse(
            "packed sequences are one batch entry, which cannot be divided along the batch",
            "argument q",
            f"shape {shape_of(q)}, placements {q.placements}",
            way_out,
        )
    if BATCH not in signature.divisible:
        refuse(
            "the spec computes with b, the number of an entry, which a rank would count from 0",
            "argument q",
            f"spec {signature.name}; placements {q.placements}",
            way_out,
        )
    by_head = [x.name for x in signature.tensors if {HEADS, KEY_HEADS} & {*x.dims}]
    if division.drops and (by_head or _counts_heads(division)):
        refuse(
            "dropout would need the number of the first batch entry of a rank",
            "argument q",
            f"spec {signature.name} computes with the number of a head, in "
            f"{', '.join(by_head) or 'its mask or score'}; placements {q.placements}",
            way_out,
        )


def _part_of(
    operator: Operator,
    backward: bool,
    arguments: dict[str, Any],
    keywords: dict[str, Any],
    operator_of: OperatorOf,
) -> _Part:
    """The work of this rank in a call.

    Raises:
        InputError: the rank lacks elements that its part of the call reads.
    """
    signature = operator.signature
    division = _division_of(signature, arguments)
    wanted = tuple([_wanted(division, name, x) for name, x in arguments.items()])
    shapes = {name: x.shape for name, x in arguments.items() if isinstance(x, Tensor)}
    if not backward:
        rows = shapes["q"][:3]
        shapes |= {"out": torch.Size((*rows, signature.head_dim_v)), "lse": rows}
        results: list[Any] = [(shapes[n], division.placements(n, shapes[n])) for n in _FREE[:2]]
    else:
        named = ("q", "k", "v", *(tensor.name for tensor in signature.learned))
        results = [(shapes[n], division.gradient_placements(n, shapes[n])) for n in named]
        for index, needed in enumerate(keywords.get(NEEDED) or (), 3):
            if not needed:  # a tensor without elements
                results[index] = None, division.everywhere
    if division.in_whole:
        operator, keywords = _in_whole(operator, division, arguments, keywords, operator_of)
    return _Part(operator, keywords, division.mesh, wanted, tuple(results), [])


def _computed(
    operator: Operator, part: _Part, backward: bool, args: tuple[Any, ...], traced: bool
) -> tuple[DTensor, ...]:
    done, mesh = part.operator, part.mesh
    local = [
        x if wanted is None else _local(mesh, x, wanted)
        for x, wanted in zip(args, part.wanted, strict=True)
    ]
    called = (done.overload, done.overload_backward) if traced else done.kernels
    results = called[backward](*local, **part.keywords)
    if done is not operator:  # whose reports users ask for
        operator.done, operator.done_backward = done.last_forward(), done.last_backward()
        operator.latest.used = operator
    if part.specs:
        dtensor_type = type(next(filter(is_dtensor, args)))
        pairs = zip(results, part.specs, strict=True)
        return tuple([dtensor_type(x, spec, requires_grad=False) for x, spec in pairs])
    dtensors = tuple(
        _spread(mesh, x, x.shape if shape is None else shape, placements)
        for x, (shape, placements) in zip(results, part.results, strict=True)
    )
    part.specs[:] = [x._spec for x in dtensors]  # at once, for other threads
    return dtensors


def _in_whole(
    operator: Operator,
    division: _Division,
    arguments: dict[str, Any],
    keywords: dict[str, Any],
    operator_of: OperatorOf,
) -> tuple[Operator, dict[str, Any]]:
    """The operator of calls on some heads of a whole, and its keyword arguments on this rank."""
    q, k = arguments["q"], arguments["k"]
    first = division.first(HEADS, q.shape[1])
    if division.drops:  # it counts b * heads + h, and alone counts heads where a batch is divided
        first += division.first(BATCH, q.shape[0]) * q.shape[1]
    if _has_whole(operator.signature):
        return operator, {**keywords, WHOLE[0]: keywords[WHOLE[0]] + first}
    table = arguments.get(PAGE_NAMES[0])
    pages = 1 if table is None else table.shape[1]
    sizes = dict(zip(WHOLE, (first, q.shape[1], q.shape[2], k.shape[2] * pages), strict=True))
    variant = program_of(operator.spec).variant(Variant(part=WHOLE))
    return operator_of(variant), {**keywords, **sizes}


def _wanted(division: _Division, name: str, x: Any) -> tuple[Any, ...] | None:
    """The placements of what this rank reads of an argument.

    Raises:
        InputError: the rank would have to receive it.
    """
    if not isinstance(x, Tensor):
        return None
    wanted = division.placements(name, x.shape)
    if not is_dtensor(x):
        return None if wanted == division.everywhere else wanted
    spread: Any = x
    pairs = zip(spread.placements, wanted, strict=True)
    if name not in _FREE and not all(has == part or has.is_replicate() for has, part in pairs):
        _refuse_placement(name, spread, wanted, division.in_whole)
    return wanted


def _local(mesh: DeviceMesh, x: Tensor, wanted: tuple[Any, ...]) -> Tensor:
    """The part of a tensor that this rank reads; all ranks have an ordinary tensor."""
    if not is_dtensor(x):
        from torch.distributed.tensor import Replicate

        x = _spread(mesh, x, x.shape, (Replicate(),) * mesh.ndim)
    spread: Any = x
    if spread.placements != wanted:
        spread = spread.redistribute(placements=wanted)
    local: Tensor = spread.to_local()
    return local


def _spread(
    mesh: DeviceMesh, local: Tensor, shape: Sequence[int], placements: tuple[Any, ...]
) -> DTensor:
    """A DTensor of a shape, with the order of its axes in memory that the local tensor has."""
    from torch.distributed.tensor import DTensor

    strides, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda axis: (local.stride(axis), -axis)):
        strides[axis], step = step, step * max(shape[axis], 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def _refuse_placement(name: str, x: DTensor, wanted: object = None, why: str = "") -> NoReturn:
    if wanted is None:
        what = "a call of DTensors is divided along the batch or the heads of q, k and v"
        way_out = (
            "flashgen.distributed.attention(op, q.to_local(), k.to_local(), v.to_local(), "
            "group=...) for a sequence that is divided; else "
            f"{name}.redistribute(placements=...) with Shard(0), Shard(1) or Replicate()"
        )
    else:
        what = f"the ranks do not have the part of {name} that their batch entries and heads read"
        if why:
            what = f"each rank reads the whole of {name}: {why}"
        way_out = f"{name}.redistribute(placements={wanted}), which communicates"
    refuse(
        what,
        f"argument {name}",
        shown(x),
        way_out,
    )


def refuse_drawn() -> NoReturn:
    """Refuses random numbers of DTensors that each rank would draw for itself."""
    refuse(
        "the ranks of DTensors do not draw the same random numbers",
        "argument rng",
        "no rng is given, with a dropout_p above 0 or a mod that calls fg.rand",
        _on_all_ranks("rng", "torch.randint(2**63 - 1, (2,), device=q.device)"),
    )


def _on_all_ranks(name: str, value: str, beside: str = "q") -> str:
    mesh = f"{beside}.device_mesh"
    return f"{name}=distribute_tensor({value}, {mesh}, [Replicate()] * {mesh}.ndim)"
