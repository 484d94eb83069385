"""ATen operations on traced tensors: by a rule, or else by torch's own decomposition."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from flashgen.errors import FlashgenError, SpecError
from flashgen.flex.pointwise_rules import RULES as POINTWISE
from flashgen.flex.traced_array import Entry, TracedArray, literal, number, single
from flashgen.flex.tracer import DTYPES, TracedTensor, Tracer
from flashgen.flex.view_rules import RULES as STRUCTURE
from flashgen.language.user_source import LIBRARIES, user_location

_LARGEST_UNROLLED = 256
"""The largest number of elements that a reduction may have; it is unrolled."""


def run(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of the ATen operation ``func``: one or several traced tensors.

    Raises:
        SpecError: kernels cannot express the operation; the message names it and the user's line.
    """
    args, kwargs = pytree.tree_map_only(torch.Tensor, tracer.operand, (tuple(args), kwargs))
    name = func._schema.name.partition("::")[2]
    try:
        return _ruled(tracer, func, name, args, kwargs)
    except SpecError as error:  # from functions of flashgen that do not know the line of the mod
        raise SpecError(
            error.what, where=user_location(LIBRARIES), numbers=error.numbers, way_out=error.way_out
        ) from None


def _ruled(
    tracer: Tracer, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    if name in ("_local_scalar_dense", "item"):
        return _item(tracer, args[0])
    if _is_folded(func, args, kwargs):
        return _computed(tracer, func, args, kwargs)
    if func._schema.is_mutable:
        return _in_place(tracer, func, name, args, kwargs)
    if name in STRUCTURE:
        return _restructured(tracer, STRUCTURE[name], func, args, kwargs)
    if name in POINTWISE:
        return _elementwise(tracer, POINTWISE[name], func, args, kwargs)
    if name in _REDUCTIONS:
        return _reduced(tracer, name, func, args, kwargs)
    return _decomposed(tracer, func, name, args, kwargs)


def _tensors(*trees: Any) -> list[TracedTensor]:
    return [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, TracedTensor)]


def _is_folded(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    tensors = _tensors(args, kwargs)
    return not func._schema.is_mutable and all(t.array.data is not None for t in tensors)


def _computed(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operation on constants only, computed now."""
    real = pytree.tree_map_only(TracedTensor, lambda t: t.array.data, (args, kwargs))
    return pytree.tree_map_only(torch.Tensor, tracer.constant, func(*real[0], **real[1]))


def _item(tracer: Tracer, tensor: TracedTensor) -> Any:
    if tensor.array.data is not None:
        return tensor.array.data.item()
    tracer.refuse(
        "a mod needs the value of a tensor, which has none while the mod is traced: if, and, or, "
        "not, int(), float(), .item(), range() and the functions of math cannot be used on it",
        way_out="torch.where to choose, & | ~ or torch.logical_and to combine conditions, "
        "functions of torch for those of math",
    )


def _in_place(
    tracer: Tracer, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """``x += y`` as ``x = x + y``, for a value that the mod itself computed."""
    target = args[0]
    plain = getattr(torch.ops.aten, name.removesuffix("_"), None)
    overload = getattr(plain, func._overloadname, None)
    captured = any(tracer.traced(source.tensor) is target for source in tracer.sources)
    if not name.endswith("_") or overload is None or captured or target.dim():
        tracer.refuse(
            f"a mod writes into a tensor: torch.{name}",
            numbers=f"aten.{func.__name__}",
            way_out="a new value, as in score = score + x",
        )
    result = overload(*args, **kwargs)
    target.array = torch.ops.aten._to_copy(result, dtype=target.dtype).array
    return target


def _shapes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The results on meta tensors: their shapes and dtypes, and torch's own errors."""
    meta = pytree.tree_map_only(
        torch.Tensor,
        lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"),
        (args, kwargs),
    )
    if "device" in kwargs:
        meta[1]["device"] = "meta"
    return pytree.tree_leaves(func(*meta[0], **meta[1]))


def _elementwise(
    tracer: Tracer,
    rule: Callable[..., Entry],
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> TracedTensor:
    (out,) = _shapes(func, args, kwargs)
    shape = tuple(out.shape)
    if out.dtype not in DTYPES:
        tracer.refuse(
            f"kernels do not compute in {out.dtype}",
            numbers=f"aten.{func.__name__}",
            way_out="real numbers",
        )
    leaves, tree = pytree.tree_flatten((args, kwargs))
    arrays = [leaf.array for leaf in leaves if isinstance(leaf, TracedTensor)]
    full = [array for array in arrays if array.shape]
    if any(array.shape != shape for array in full):
        tracer.rigid = True

    def at(indices: tuple[Any, ...]) -> Entry:
        given = [
            leaf.array.at(_broadcast(leaf.array, indices))
            if isinstance(leaf, TracedTensor)
            else literal(leaf)
            if isinstance(leaf, bool | int | float)
            else leaf
            for leaf in leaves
        ]
        positional, by_name = pytree.tree_unflatten(given, tree)
        by_name.pop("out", None)
        return rule(tracer, out.dtype, *positional, **by_name)

    if not shape:
        return tracer.wrap(single(at(()), out.dtype))
    sizes = next((a.sizes for a in full if a.shape == shape), _lengths(shape))
    return tracer.wrap(TracedArray(shape, out.dtype, at, sizes))


def _lengths(shape: Sequence[int]) -> tuple[Callable[[], int], ...]:
    return tuple(functools.partial(int, length) for length in shape)


def _broadcast(array: TracedArray, indices: tuple[Any, ...]) -> tuple[Any, ...]:
    own = indices[len(indices) - len(array.shape) :]
    return tuple(0 if length == 1 else i for length, i in zip(array.shape, own, strict=True))


def _restructured(
    tracer: Tracer,
    rule: Callable[..., Any],
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    arrays = pytree.tree_map_only(TracedTensor, lambda t: t.array, (args, kwargs))
    outs = _shapes(func, args, kwargs)
    made = rule(tracer, [tuple(out.shape) for out in outs], outs[0].dtype, *arrays[0], **arrays[1])
    return pytree.tree_map_only(TracedArray, tracer.wrap, made)


_REDUCTIONS: dict[str, str] = {
    "sum": "add",
    "any": "logical_or",
    "all": "logical_and",
    "amax": "maximum",
    "amin": "minimum",
    "dot": "add",
}


def _reduced(
    tracer: Tracer, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> TracedTensor:
    """A reduction over a few elements, written out."""
    (out,) = _shapes(func, args, kwargs)
    if name == "dot":
        return _reduced(tracer, "sum", torch.ops.aten.sum.default, [args[0] * args[1]], {})
    array: TracedArray = args[0].array
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    given = range(len(array.shape)) if given is None or given == [] else given
    dims = {d % max(len(array.shape), 1) for d in ([given] if isinstance(given, int) else given)}
    dims &= set(range(len(array.shape)))
    ranges = [range(array.shape[d]) for d in sorted(dims)]
    keepdim = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    places = list(itertools.product(*ranges))
    if not 0 < len(places) <= _LARGEST_UNROLLED:
        tracer.refuse(
            f"torch.{name} over {len(places)} elements cannot be written out in a kernel",
            numbers=f"aten.{func.__name__} of shape {array.shape}; at most {_LARGEST_UNROLLED}",
            way_out="the reduction outside of the mod, and its result as a captured tensor",
        )
    tracer.rigid = tracer.rigid or bool(dims)
    rule = POINTWISE[_REDUCTIONS[name]]

    def at(indices: tuple[Any, ...]) -> Entry:
        kept = [i for d, i in enumerate(indices) if not (keepdim and d in dims)]
        total: Entry | None = None
        for place in places:
            rest, chosen = iter(kept), iter(place)
            index = tuple(next(chosen if d in dims else rest) for d in range(len(array.shape)))
            entry = array.at(index)
            if out.dtype != torch.bool:
                entry = Entry(number(entry.value), entry.lost)
            total = entry if total is None else rule(tracer, out.dtype, total, entry)
        assert total is not None
        return total

    shape = tuple(out.shape)
    if not shape:
        return tracer.wrap(single(at(()), out.dtype))
    return tracer.wrap(TracedArray(shape, out.dtype, at, _lengths(shape)))


def _decomposed(
    tracer: Tracer, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """The operation by torch's decomposition into simpler operations, where one exists."""
    from torch._decomp import decomposition_table

    shown = f"aten.{func.__name__}"
    try:
        if func in decomposition_table:
            return decomposition_table[func](*args, **kwargs)
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    except FlashgenError:
        raise
    except Exception as error:
        shown += f"; its decomposition raised {type(error).__name__}: {error}"
    tracer.refuse(
        f"torch.{name} cannot be expressed in a kernel",
        numbers=shown,
        way_out="arithmetic, comparisons, torch.where, minimum, maximum, clamp, abs, exp, log, "
        "sqrt, sin, cos, tanh, sigmoid, floor and what is made of them; or a captured tensor",
    )
