"""Rules for ATen's views, copies and gathers, whose results consist of elements of other arrays.

A rule takes the tracer, the shapes and the dtype of torch's results, and the arguments with arrays
in place of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.flex.indexing import from_start
from flashgen.flex.traced_array import Entry, Index, TracedArray, literal, single, strides_of
from flashgen.language import Traced

Shapes = list[tuple[int, ...]]
Rule = Callable[..., Any]


def _array(shape: Sequence[int], dtype: torch.dtype, at: Any, sizes: Any = None) -> TracedArray:
    if not shape:
        return single(at(()), dtype)
    if sizes is None:
        sizes = tuple(functools.partial(int, length) for length in shape)
    return TracedArray(tuple(shape), dtype, at, tuple(sizes))


def _dim(array: TracedArray, dim: int) -> int:
    return dim % max(len(array.shape), 1)


def _select(
    tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, dim: int, index: int
) -> TracedArray:
    place = _dim(x, dim)
    chosen = from_start(tracer, int(index), x.sizes[place])
    sizes = x.sizes[:place] + x.sizes[place + 1 :]
    return _array(shapes[0], dtype, lambda i: x.at((*i[:place], chosen, *i[place:])), sizes)


def _slice(
    tracer: Any,
    shapes: Shapes,
    dtype: Any,
    /,
    x: TracedArray,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> TracedArray:
    place = _dim(x, dim)
    first, _, step = slice(start, end, step).indices(x.shape[place])
    if shapes[0] == x.shape and step == 1 and (end is None or end > 2**31):
        return x
    tracer.rigid = True
    sizes = list(x.sizes)
    sizes[place] = lambda: shapes[0][place]

    def at(i: tuple[Index, ...]) -> Entry:
        return x.at((*i[:place], i[place] * step + first, *i[place + 1 :]))

    return _array(shapes[0], dtype, at, sizes)


def _unsqueeze(tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, dim: int) -> TracedArray:
    place = dim % (len(x.shape) + 1)
    sizes = (*x.sizes[:place], lambda: 1, *x.sizes[place:])
    return _array(shapes[0], dtype, lambda i: x.at((*i[:place], *i[place + 1 :])), sizes)


def _squeeze(
    tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, dim: Any = None
) -> TracedArray:
    given = range(len(x.shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {_dim(x, d) for d in given if x.shape and x.shape[_dim(x, d)] == 1}
    tracer.rigid = tracer.rigid or bool(x.shape)
    sizes = [size for d, size in enumerate(x.sizes) if d not in gone]

    def at(i: tuple[Index, ...]) -> Entry:
        rest = iter(i)
        return x.at(tuple(0 if d in gone else next(rest) for d in range(len(x.shape))))

    return _array(shapes[0], dtype, at, sizes)


def _permute(
    tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, dims: Sequence[int]
) -> TracedArray:
    order = [_dim(x, d) for d in dims]
    sizes = [x.sizes[d] for d in order]
    return _array(
        shapes[0],
        dtype,
        lambda i: x.at(tuple(i[order.index(d)] for d in range(len(order)))),
        sizes,
    )


def _transpose(
    tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, a: int, b: int
) -> TracedArray:
    order = list(range(len(x.shape)))
    if order:
        a, b = _dim(x, a), _dim(x, b)
        order[a], order[b] = order[b], order[a]
    return _permute(tracer, shapes, dtype, x, order)


def _t(tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray) -> TracedArray:
    return _permute(tracer, shapes, dtype, x, range(len(x.shape))[::-1])


def _expand(
    tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, size: Any, **_: Any
) -> TracedArray:
    tracer.rigid = tracer.rigid or bool(x.shape)
    added = len(shapes[0]) - len(x.shape)

    def at(i: tuple[Index, ...]) -> Entry:
        own = zip(x.shape, i[added:], strict=True)
        return x.at(tuple(0 if length == 1 else index for length, index in own))

    return _array(shapes[0], dtype, at)


def _view(
    tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, *_: Any, **__: Any
) -> TracedArray:
    if shapes[0] == x.shape:
        return x
    if x.data is None:
        tracer.rigid = True
    strides, old = strides_of(shapes[0]), strides_of(x.shape)

    def at(i: tuple[Index, ...]) -> Entry:
        flat: Index = 0
        for index, stride in zip(i, strides, strict=True):
            flat = flat + index * stride
        return x.at(
            tuple(
                _remainder(_over(flat, stride), length, first=d == 0)
                for d, (stride, length) in enumerate(zip(old, x.shape, strict=True))
            )
        )

    return _array(shapes[0], dtype, at)


def _over(index: Index, stride: int) -> Index:
    return index if stride == 1 else index // stride


def _remainder(index: Index, length: int, first: bool) -> Index:
    if length == 1:
        return 0
    return index if first else index % length


def _same(
    tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, *_: Any, **__: Any
) -> TracedArray:
    return x


def _flip(
    tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, dims: Sequence[int]
) -> TracedArray:
    turned = {_dim(x, d) for d in dims}

    def at(i: tuple[Index, ...]) -> Entry:
        return x.at(
            tuple(x.sizes[d]() - 1 - index if d in turned else index for d, index in enumerate(i))
        )

    return _array(shapes[0], dtype, at, x.sizes)


def _filled(value: Any) -> Rule:
    def rule(tracer: Any, shapes: Shapes, dtype: Any, /, *args: Any, **_: Any) -> Any:
        number = value if value is not None else args[-1]
        if isinstance(number, TracedArray):
            return _array(shapes[0], dtype, lambda i: number.entry)
        number = bool(number) if dtype == torch.bool else number
        return tracer.constant(torch.full(shapes[0], number, dtype=dtype, device=tracer.device))

    return rule


def _index(
    tracer: Any,
    shapes: Shapes,
    dtype: Any,
    /,
    x: TracedArray,
    indices: Sequence[TracedArray | None],
) -> TracedArray:
    given = {d: index for d, index in enumerate(indices) if index is not None}
    if any(index.shape for index in given.values()):
        tracer.rigid = True
    places = sorted(given)
    rank = max(len(index.shape) for index in given.values())
    together = places == list(range(places[0], places[-1] + 1))
    at_place = places[0] if together else 0
    kept = [d for d in range(len(x.shape)) if d not in given]

    def at(i: tuple[Index, ...]) -> Entry:
        gathered, rest = i[at_place : at_place + rank], iter((*i[:at_place], *i[at_place + rank :]))
        others = {d: next(rest) for d in kept}
        chosen = {
            d: from_start(tracer, _element(index, gathered), x.sizes[d])
            for d, index in given.items()
        }
        return x.at(tuple(chosen[d] if d in chosen else others[d] for d in range(len(x.shape))))

    sizes = [x.sizes[d] for d in kept]
    lengths = [functools.partial(int, length) for length in shapes[0][at_place : at_place + rank]]
    return _array(shapes[0], dtype, at, [*sizes[:at_place], *lengths, *sizes[at_place:]])


def _element(index: TracedArray, at: Sequence[Index]) -> Index:
    own = at[len(at) - len(index.shape) :]
    places = tuple(0 if n == 1 else i for n, i in zip(index.shape, own, strict=True))
    if index.data is not None and all(isinstance(i, int) for i in places):
        return int(index.data[places])
    value: Traced = index.at(places).value
    return value


def _index_select(
    tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, dim: int, at: TracedArray
) -> TracedArray:
    if not at.shape:
        at = TracedArray((1,), at.dtype, lambda _, at=at: at.entry, ((lambda: 1),))  # type: ignore[misc]
    place = _dim(x, dim)
    return _index(tracer, shapes, dtype, x, [None] * place + [at])


def _stack(
    tracer: Any, shapes: Shapes, dtype: Any, /, arrays: Sequence[TracedArray], dim: int = 0
) -> TracedArray:
    from flashgen.flex.pointwise_rules import RULES as POINTWISE

    place = dim % len(shapes[0])

    def at(i: tuple[Index, ...]) -> Entry:
        chosen, rest = i[place], (*i[:place], *i[place + 1 :])
        if isinstance(chosen, int):
            return arrays[chosen].at(rest)
        result = arrays[-1].at(rest)
        for number, array in reversed(list(enumerate(arrays[:-1]))):
            test = Entry(chosen == number)
            result = POINTWISE["where"](tracer, dtype, test, array.at(rest), result)
        return result

    return _array(shapes[0], dtype, at)


def _unbind(
    tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray, dim: int = 0
) -> list[TracedArray]:
    tracer.rigid = True
    return [_select(tracer, [shape], dtype, x, dim, number) for number, shape in enumerate(shapes)]


def _scalar(tracer: Any, shapes: Shapes, dtype: Any, /, value: Any, **_: Any) -> TracedArray:
    return single(literal(value), dtype)


def _detached(tracer: Any, shapes: Shapes, dtype: Any, /, x: TracedArray) -> TracedArray:
    from flashgen.flex.pointwise_rules import RULES as POINTWISE

    if x.detached is not None:
        return x.detached()
    return _array(x.shape, dtype, lambda i: POINTWISE["detach"](tracer, dtype, x.at(i)), x.sizes)


RULES: dict[str, Rule] = {
    "select": _select,
    "slice": _slice,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "expand": _expand,
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "_reshape_alias": _view,
    "flip": _flip,
    "index": _index,
    "_unsafe_index": _index,
    "index_select": _index_select,
    "stack": _stack,
    "unbind": _unbind,
    "alias": _same,
    "clone": _same,
    "contiguous": _same,
    "lift_fresh": _same,
    "lift_fresh_copy": _same,
    "detach": _detached,
    "scalar_tensor": _scalar,
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "new_zeros": _filled(0),
    "new_ones": _filled(1),
    "full_like": _filled(None),
    "new_full": _filled(None),
    "fill": _filled(None),
}
"""The rule of each operation by its name; it covers all overloads."""
