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


def _select(to: Result, /, x: TracedArray, dim: int, index: int) -> TracedArray:
    place = _dim(x, dim)
    chosen = from_start(to.tracer, int(index), x.sizes[place])
    sizes = x.sizes[:place] + x.sizes[place + 1 :]
    return to.array(lambda i: x.at((*i[:place], chosen, *i[place:])), sizes)


def _slice(
    to: Result,
    /,
    x: TracedArray,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> TracedArray:
    place = _dim(x, dim)
    first, _, step = slice(start, end, step).indices(x.shape[place])
    if to.shapes[0] == x.shape and step == 1 and (end is None or end > 2**31):
        return x
    to.tracer.rigid = True
    sizes = list(x.sizes)
    sizes[place] = lambda: to.shapes[0][place]

    def at(i: tuple[Index, ...]) -> Entry:
        return x.at((*i[:place], i[place] * step + first, *i[place + 1 :]))

    return to.array(at, sizes)


def _unsqueeze(to: Result, /, x: TracedArray, dim: int) -> TracedArray:
    place = dim % (len(x.shape) + 1)
    sizes = (*x.sizes[:place], lambda: 1, *x.sizes[place:])
    return to.array(lambda i: x.at((*i[:place], *i[place + 1 :])), sizes)


def _squeeze(to: Result, /, x: TracedArray, dim: Any = None) -> TracedArray:
    given = range(len(x.shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {_dim(x, d) for d in given if x.shape and x.shape[_dim(x, d)] == 1}
    to.tracer.rigid = to.tracer.rigid or bool(x.shape)
    sizes = [size for d, size in enumerate(x.sizes) if d not in gone]

    def at(i: tuple[Index, ...]) -> Entry:
        rest = iter(i)
        return x.at(tuple(0 if d in gone else next(rest) for d in range(len(x.shape))))

    return to.array(at, sizes)


def _permute(to: Result, /, x: TracedArray, dims: Sequence[int]) -> TracedArray:
    order = [_dim(x, d) for d in dims]
    sizes = [x.sizes[d] for d in order]
    return to.array(lambda i: x.at(tuple(i[order.index(d)] for d in range(len(order)))), sizes)


def _transpose(to: Result, /, x: TracedArray, a: int, b: int) -> TracedArray:
    order = list(range(len(x.shape)))
    if order:
        a, b = _dim(x, a), _dim(x, b)
        order[a], order[b] = order[b], order[a]
    return _permute(to, x, order)


def _expand(to: Result, /, x: TracedArray, size: Any, **_: Any) -> TracedArray:
    to.tracer.rigid = to.tracer.rigid or bool(x.shape)
    return to.array(lambda i: x.at(x.broadcast(i)))


def _broadcast(to: Result, /, x: TracedArray, _: Any, dims: Sequence[int]) -> TracedArray:
    return to.array(lambda i: x.at(x.broadcast(tuple(i[d] for d in dims))))


def _view(to: Result, /, x: TracedArray, *_: Any, **__: Any) -> TracedArray:
    if to.dtype != x.dtype:
        to.tracer.refuse(
            "a kernel does not read the bits of an element as those of another dtype",
            numbers=f"elements of {x.dtype} as {to.dtype}",
            way_out="tensor.view(dtype) outside of the mod, and its result as a captured tensor",
        )
    if to.shapes[0] == x.shape:
        return x
    if x.data is None:
        to.tracer.rigid = True
    strides, old = _strides(to.shapes[0]), _strides(x.shape)

    def at(i: tuple[Index, ...]) -> Entry:
        flat: Index = 0
        for index, stride in zip(i, strides, strict=True):
            flat = flat + index * stride
        places: list[Index] = []
        for d, (stride, length) in enumerate(zip(old, x.shape, strict=True)):
            place = flat if stride == 1 else flat // stride
            places.append(0 if length == 1 else place if d == 0 else place % length)
        return x.at(tuple(places))

    return to.array(at)


def _strides(shape: Sequence[int]) -> list[int]:
    """The strides, in elements, of a contiguous array."""
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]


def _flip(to: Result, /, x: TracedArray, dims: Sequence[int]) -> TracedArray:
    turned = {_dim(x, d) for d in dims}

    def at(i: tuple[Index, ...]) -> Entry:
        return x.at(
            tuple(x.sizes[d]() - 1 - index if d in turned else index for d, index in enumerate(i))
        )

    return to.array(at, x.sizes)


def _filled(value: Any) -> Rule:
    def rule(to: Result, /, *args: Any, **_: Any) -> Any:
        number = value if value is not None else args[-1]
        if isinstance(number, TracedArray):
            return to.array(lambda i: number.entry)
        number = bool(number) if to.dtype == torch.bool else number
        filled = torch.full(to.shapes[0], number, dtype=to.dtype, device=to.tracer.device)
        return to.tracer.constant(filled)

    return rule


def _index(to: Result, /, x: TracedArray, indices: Sequence[TracedArray | None]) -> TracedArray:
    given = {d: index for d, index in enumerate(indices) if index is not None}
    if any(index.shape for index in given.values()):
        to.tracer.rigid = True
    places = sorted(given)
    rank = max(len(index.shape) for index in given.values())
    together = places == list(range(places[0], places[-1] + 1))
    at_place = places[0] if together else 0
    kept = [d for d in range(len(x.shape)) if d not in given]

    def at(i: tuple[Index, ...]) -> Entry:
        gathered, rest = i[at_place : at_place + rank], iter((*i[:at_place], *i[at_place + rank :]))
        chosen = {
            d: from_start(to.tracer, _element(index, gathered), x.sizes[d])
            for d, index in given.items()
        }
        return x.at(tuple(chosen[d] if d in chosen else next(rest) for d in range(len(x.shape))))

    sizes = [x.sizes[d] for d in kept]
    lengths = fixed(to.shapes[0][at_place : at_place + rank])
    return to.array(at, [*sizes[:at_place], *lengths, *sizes[at_place:]])


def _element(index: TracedArray, at: tuple[Index, ...]) -> Index:
    places = index.broadcast(at)
    if index.data is not None and all(isinstance(i, int) for i in places):
        return int(index.data[places])
    value: Traced = index.at(places).value
    return value


def _index_select(to: Result, /, x: TracedArray, dim: int, at: TracedArray) -> TracedArray:
    if not at.shape:
        at = TracedArray((1,), at.dtype, lambda _, at=at: at.entry, ((lambda: 1),))  # type: ignore[misc]
    place = _dim(x, dim)
    return _index(to, x, [None] * place + [at])


def _stack(to: Result, /, arrays: Sequence[TracedArray], dim: int = 0) -> TracedArray:
    place = dim % len(to.shapes[0])

    def at(i: tuple[Index, ...]) -> Entry:
        chosen, rest = i[place], (*i[:place], *i[place + 1 :])
        if isinstance(chosen, int):
            return arrays[chosen].at(rest)
        result = arrays[-1].at(rest)
        for number, array in reversed(list(enumerate(arrays[:-1]))):
            result = POINTWISE["where"](to, Entry(chosen == number), array.at(rest), result)
        return result

    return to.array(at)


def _cat(to: Result, /, arrays: Sequence[TracedArray], dim: int = 0) -> TracedArray:
    place = dim % len(to.shapes[0])
    to.tracer.rigid = True
    arrays = [x for x in arrays if 0 not in x.shape]  # torch takes [0] beside any rank
    ends = list(itertools.accumulate(array.shape[place] for array in arrays))

    def at(i: tuple[Index, ...]) -> Entry:
        chosen = i[place]

        def part(number: int) -> Entry:
            own = chosen - (ends[number - 1] if number else 0)
            return arrays[number].at((*i[:place], own, *i[place + 1 :]))

        if isinstance(chosen, int):
            return part(bisect.bisect(ends, chosen))
        result = part(len(ends) - 1)
        for number in reversed(range(len(ends) - 1)):
            result = POINTWISE["where"](to, Entry(chosen < ends[number]), part(number), result)
        return result

    return to.array(at)


def _unbind(to: Result, /, x: TracedArray, dim: int = 0) -> list[TracedArray]:
    to.tracer.rigid = True
    results = [replace(to, shapes=[shape]) for shape in to.shapes]
    return [_select(result, x, dim, number) for number, result in enumerate(results)]


def _split(to: Result, /, x: TracedArray, lengths: Sequence[int], dim: int = 0) -> Any:
    ends = itertools.accumulate(lengths)
    pairs = zip(to.shapes, ends, lengths, strict=True)
    return [
        _slice(replace(to, shapes=[shape]), x, dim, end - length, end)
        for shape, end, length in pairs
    ]


def _diagonal(
    to: Result, /, x: TracedArray, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TracedArray:
    starts = {_dim(x, dim1): max(-offset, 0), _dim(x, dim2): max(offset, 0)}
    to.tracer.rigid = True

    def at(i: tuple[Index, ...]) -> Entry:
        rest = iter(i[:-1])
        return x.at(
            tuple(i[-1] + starts[d] if d in starts else next(rest) for d in range(len(x.shape)))
        )

    return to.array(at)


def _unfold(to: Result, /, x: TracedArray, dim: int, size: int, step: int) -> TracedArray:
    place = _dim(x, dim)
    to.tracer.rigid = True

    def at(i: tuple[Index, ...]) -> Entry:
        if not x.shape:
            return x.entry
        return x.at((*i[:place], i[place] * step + i[-1], *i[place + 1 : -1]))

    return to.array(at)


def _gather(to: Result, /, x: TracedArray, dim: int, index: TracedArray, **_: Any) -> TracedArray:
    """An element of ``x`` for each of ``index``, of which other dimensions may be shorter."""
    place = _dim(x, dim)

    def at(i: tuple[Index, ...]) -> Entry:
        chosen = from_start(to.tracer, _element(index, i), x.sizes[place] if x.shape else lambda: 1)
        return x.at((*i[:place], chosen, *i[place + 1 :])) if x.shape else x.entry

    return to.array(at, index.sizes)


def _detached(to: Result, /, x: TracedArray) -> TracedArray:
    if x.detached is not None:
        return x.detached()
    return to.array(lambda i: POINTWISE["detach"](to, x.at(i)), x.sizes)


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
    "t": lambda to, x: _permute(to, x, range(len(x.shape))[::-1]),
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
    "scalar_tensor": lambda to, value, **_: single(literal(value), to.dtype),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _view),
    **dict.fromkeys(
        ("alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy"), lambda to, x, *_, **__: x
    ),
    **dict.fromkeys(("zeros_like", "new_zeros"), _filled(0)),
    **dict.fromkeys(("ones_like", "new_ones"), _filled(1)),
    **dict.fromkeys(("full_like", "new_full", "fill"), _filled(None)),
}
"""The rule of each operation by its name; it covers all overloads."""
