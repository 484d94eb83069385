"""Rules for ATen's views, copies and gathers, whose results consist of elements of other arrays.

A rule takes torch's results, and the arguments with arrays in place of tensors. An index may be a
traced value and may count from the end.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from flashgen.frontends.flex.pointwise_rules import RULES as POINTWISE
from flashgen.frontends.flex.traced_array import (
    Entry,
    Index,
    Result,
    TracedArray,
    fixed,
    literal,
    single,
)
from flashgen.spec.language.mod_functions import where
from flashgen.spec.language.traced import Traced

Rule = Callable[..., Any]


def _dim(array: TracedArray, dim: int) -> int:
    return dim % max(len(array.shape), 1)


def _select(result: Result, /, x: TracedArray, dim: int, index: int) -> TracedArray:
    axis = _dim(x, dim)
    chosen = from_start(result.tracer, int(index), x.sizes[axis])
    sizes = x.sizes[:axis] + x.sizes[axis + 1 :]
    return result.array(lambda i: x.at((*i[:axis], chosen, *i[axis:])), sizes)


def _slice(
    result: Result,
    /,
    x: TracedArray,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> TracedArray:
    axis = _dim(x, dim)
    first, _, step = slice(start, end, step).indices(x.shape[axis])
    if result.shapes[0] == x.shape and step == 1 and (end is None or end > 2**31):
        return x
    result.tracer.rigid = True
    sizes = list(x.sizes)
    sizes[axis] = lambda: result.shapes[0][axis]

    def element_at(i: tuple[Index, ...]) -> Entry:
        return x.at((*i[:axis], i[axis] * step + first, *i[axis + 1 :]))

    return result.array(element_at, sizes)


def _unsqueeze(result: Result, /, x: TracedArray, dim: int) -> TracedArray:
    axis = dim % (len(x.shape) + 1)
    sizes = (*x.sizes[:axis], lambda: 1, *x.sizes[axis:])
    return result.array(lambda i: x.at((*i[:axis], *i[axis + 1 :])), sizes)


def _squeeze(result: Result, /, x: TracedArray, dim: Any = None) -> TracedArray:
    dims = range(len(x.shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {_dim(x, d) for d in dims if x.shape and x.shape[_dim(x, d)] == 1}
    result.tracer.rigid = result.tracer.rigid or bool(x.shape)
    sizes = [size for d, size in enumerate(x.sizes) if d not in gone]

    def element_at(i: tuple[Index, ...]) -> Entry:
        rest = iter(i)
        return x.at(tuple(0 if d in gone else next(rest) for d in range(len(x.shape))))

    return result.array(element_at, sizes)


def _permute(result: Result, /, x: TracedArray, dims: Sequence[int]) -> TracedArray:
    order = [_dim(x, d) for d in dims]
    sizes = [x.sizes[d] for d in order]
    return result.array(lambda i: x.at(tuple(i[order.index(d)] for d in range(len(order)))), sizes)


def _transpose(result: Result, /, x: TracedArray, a: int, b: int) -> TracedArray:
    order = list(range(len(x.shape)))
    if order:
        a, b = _dim(x, a), _dim(x, b)
        order[a], order[b] = order[b], order[a]
    return _permute(result, x, order)


def _expand(result: Result, /, x: TracedArray, size: Any, **_: Any) -> TracedArray:
    result.tracer.rigid = result.tracer.rigid or bool(x.shape)
    return result.array(lambda i: x.at(x.broadcast(i)))


def _broadcast(result: Result, /, x: TracedArray, _: Any, dims: Sequence[int]) -> TracedArray:
    return result.array(lambda i: x.at(x.broadcast(tuple(i[d] for d in dims))))


def _view(result: Result, /, x: TracedArray, *_: Any, **__: Any) -> TracedArray:
    if result.dtype != x.dtype:
        result.tracer.refuse(
            "a kernel does not read the bits of an element as those of another dtype",
            numbers=f"elements of {x.dtype} as {result.dtype}",
            way_out="tensor.view(dtype) outside of the mod, and its result as a captured tensor",
        )
    if result.shapes[0] == x.shape:
        return x
    if x.data is None:
        result.tracer.rigid = True
    strides, old = _strides(result.shapes[0]), _strides(x.shape)

    def element_at(i: tuple[Index, ...]) -> Entry:
        flat: Index = 0
        for index, stride in zip(i, strides, strict=True):
            flat = flat + index * stride
        old_indices: list[Index] = []
        for d, (stride, length) in enumerate(zip(old, x.shape, strict=True)):
            old_index = flat if stride == 1 else flat // stride
            old_indices.append(0 if length == 1 else old_index if d == 0 else old_index % length)
        return x.at(tuple(old_indices))

    return result.array(element_at)


def _strides(shape: Sequence[int]) -> list[int]:
    """The strides, in elements, of a contiguous array."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _flip(result: Result, /, x: TracedArray, dims: Sequence[int]) -> TracedArray:
    flipped = {_dim(x, d) for d in dims}

    def element_at(i: tuple[Index, ...]) -> Entry:
        return x.at(
            tuple(x.sizes[d]() - 1 - index if d in flipped else index for d, index in enumerate(i))
        )

    return result.array(element_at, x.sizes)


def _filled(value: Any) -> Rule:
    def rule(result: Result, /, *args: Any, **_: Any) -> Any:
        number = value if value is not None else args[-1]
        if isinstance(number, TracedArray):
            return result.array(lambda i: number.entry)
        number = bool(number) if result.dtype == torch.bool else number
        filled = torch.full(
            result.shapes[0], number, dtype=result.dtype, device=result.tracer.device
        )
        return result.tracer.constant(filled)

    return rule


def _index(result: Result, /, x: TracedArray, indices: Sequence[TracedArray | None]) -> TracedArray:
    indices_by_axis = {d: index for d, index in enumerate(indices) if index is not None}
    if any(index.shape for index in indices_by_axis.values()):
        result.tracer.rigid = True
    axes = sorted(indices_by_axis)
    rank = max(len(index.shape) for index in indices_by_axis.values())
    together = axes == list(range(axes[0], axes[-1] + 1))
    first_axis = axes[0] if together else 0
    other_axes = [d for d in range(len(x.shape)) if d not in indices_by_axis]

    def element_at(i: tuple[Index, ...]) -> Entry:
        gathered = i[first_axis : first_axis + rank]
        rest = iter((*i[:first_axis], *i[first_axis + rank :]))
        chosen = {
            d: from_start(result.tracer, _element(index, gathered), x.sizes[d])
            for d, index in indices_by_axis.items()
        }
        return x.at(tuple(chosen[d] if d in chosen else next(rest) for d in range(len(x.shape))))

    sizes = [x.sizes[d] for d in other_axes]
    lengths = fixed(result.shapes[0][first_axis : first_axis + rank])
    return result.array(element_at, [*sizes[:first_axis], *lengths, *sizes[first_axis:]])


def _element(index: TracedArray, indices: tuple[Index, ...]) -> Index:
    element_indices = index.broadcast(indices)
    if index.data is not None and all(isinstance(i, int) for i in element_indices):
        return int(index.data[element_indices])
    value: Traced = index.at(element_indices).value
    return value


def _index_select(result: Result, /, x: TracedArray, dim: int, index: TracedArray) -> TracedArray:
    if not index.shape:
        index = TracedArray((1,), index.dtype, lambda _, index=index: index.entry, ((lambda: 1),))  # type: ignore[misc]
    axis = _dim(x, dim)
    return _index(result, x, [None] * axis + [index])


def _stack(result: Result, /, arrays: Sequence[TracedArray], dim: int = 0) -> TracedArray:
    axis = dim % len(result.shapes[0])

    def element_at(i: tuple[Index, ...]) -> Entry:
        chosen, rest = i[axis], (*i[:axis], *i[axis + 1 :])
        if isinstance(chosen, int):
            return arrays[chosen].at(rest)
        entry = arrays[-1].at(rest)
        for number, array in reversed(list(enumerate(arrays[:-1]))):
            entry = POINTWISE["where"](result, Entry(chosen == number), array.at(rest), entry)
        return entry

    return result.array(element_at)


def _cat(result: Result, /, arrays: Sequence[TracedArray], dim: int = 0) -> TracedArray:
    axis = dim % len(result.shapes[0])
    result.tracer.rigid = True
    arrays = [x for x in arrays if 0 not in x.shape]  # torch takes [0] beside any rank
    ends = list(itertools.accumulate(array.shape[axis] for array in arrays))

    def element_at(i: tuple[Index, ...]) -> Entry:
        chosen = i[axis]

        def part(number: int) -> Entry:
            offset = chosen - (ends[number - 1] if number else 0)
            return arrays[number].at((*i[:axis], offset, *i[axis + 1 :]))

        if isinstance(chosen, int):
            return part(bisect.bisect(ends, chosen))
        entry = part(len(ends) - 1)
        for number in reversed(range(len(ends) - 1)):
            entry = POINTWISE["where"](result, Entry(chosen < ends[number]), part(number), entry)
        return entry

    return result.array(element_at)


def _unbind(result: Result, /, x: TracedArray, dim: int = 0) -> list[TracedArray]:
    result.tracer.rigid = True
    parts = [replace(result, shapes=[shape]) for shape in result.shapes]
    return [_select(part, x, dim, number) for number, part in enumerate(parts)]


def _split(result: Result, /, x: TracedArray, lengths: Sequence[int], dim: int = 0) -> Any:
    ends = itertools.accumulate(lengths)
    pairs = zip(result.shapes, ends, lengths, strict=True)
    return [
        _slice(replace(result, shapes=[shape]), x, dim, end - length, end)
        for shape, end, length in pairs
    ]


def _diagonal(
    result: Result, /, x: TracedArray, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TracedArray:
    starts = {_dim(x, dim1): max(-offset, 0), _dim(x, dim2): max(offset, 0)}
    result.tracer.rigid = True

    def element_at(i: tuple[Index, ...]) -> Entry:
        rest = iter(i[:-1])
        return x.at(
            tuple(i[-1] + starts[d] if d in starts else next(rest) for d in range(len(x.shape)))
        )

    return result.array(element_at)


def _unfold(result: Result, /, x: TracedArray, dim: int, size: int, step: int) -> TracedArray:
    axis = _dim(x, dim)
    result.tracer.rigid = True

    def element_at(i: tuple[Index, ...]) -> Entry:
        if not x.shape:
            return x.entry
        return x.at((*i[:axis], i[axis] * step + i[-1], *i[axis + 1 : -1]))

    return result.array(element_at)


def _gather(
    result: Result, /, x: TracedArray, dim: int, index: TracedArray, **_: Any
) -> TracedArray:
    """An element of ``x`` for each index; the other dimensions of ``index`` may be shorter."""
    axis = _dim(x, dim)

    def element_at(i: tuple[Index, ...]) -> Entry:
        chosen = from_start(
            result.tracer, _element(index, i), x.sizes[axis] if x.shape else lambda: 1
        )
        return x.at((*i[:axis], chosen, *i[axis + 1 :])) if x.shape else x.entry

    return result.array(element_at, index.sizes)


def _detached(result: Result, /, x: TracedArray) -> TracedArray:
    if x.detached is not None:
        return x.detached()
    return result.array(lambda i: POINTWISE["detach"](result, x.at(i)), x.sizes)


def from_start(tracer: Any, index: Index, size: Callable[[], Index]) -> Index:
    """A non-negative index; a negative one counts from the end, as in torch."""
    if isinstance(index, int):
        return index if index >= 0 else size() + index
    if index.expr.is_Integer:
        return from_start(tracer, int(index.expr), size)
    if tracer.never_negative(index.expr):
        return index
    if index.expr.has(sympy.Piecewise):  # a choice would contain each branch twice
        return index % size()
    return where(index < 0, index + size(), index)


RULES: dict[str, Rule] = {
    "select": _select,
    "slice": _slice,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "permute": _permute,
    "transpose": _transpose,
    "t": lambda result, x: _permute(result, x, range(len(x.shape))[::-1]),
    "expand": _expand,
    "broadcast_in_dim": _broadcast,
    "flip": _flip,
    "index": _index,
    "_unsafe_index": _index,
    "index_select": _index_select,
    "stack": _stack,
    "cat": _cat,
    "unbind": _unbind,
    "split_with_sizes": _split,
    "diagonal": _diagonal,
    "unfold": _unfold,
    "gather": _gather,
    "detach": _detached,
    "scalar_tensor": lambda result, value, **_: single(literal(value), result.dtype),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _view),
    **dict.fromkeys(
        ("alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy"),
        lambda result, x, *_, **__: x,
    ),
    **dict.fromkeys(("zeros_like", "new_zeros"), _filled(0)),
    **dict.fromkeys(("ones_like", "new_ones"), _filled(1)),
    **dict.fromkeys(("full_like", "new_full", "fill"), _filled(None)),
}
"""The rule of each operation by its name; it covers all overloads."""
