"""ATen operations on traced tensors: by a rule, or else by torch's own decomposition."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from flashgen.frontends.flex.composed_rules import RULES as COMPOSED
from flashgen.frontends.flex.operation_results import refuse_random, refuse_value, refuse_write
from flashgen.frontends.flex.pointwise_rules import RULES as POINTWISE
from flashgen.frontends.flex.search_rules import RULES as SEARCHES
from flashgen.frontends.flex.traced_array import Entry, Result, TracedArray, literal
from flashgen.frontends.flex.tracer import DTYPES, TracedTensor, Tracer
from flashgen.frontends.flex.view_rules import RULES as STRUCTURE
from flashgen.shared.errors import FlashgenError, SpecError
from flashgen.spec.language.integer_limits import NARROW, promoted, wrapped
from flashgen.spec.language.traced import Value

_LARGEST_UNROLLED = 256
"""The largest number of elements that a reduction may have; it is unrolled."""


def run(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of the ATen operation ``func``: one or several traced tensors.

    Raises:
        SpecError: kernels cannot express the operation; the message names it and the user's line.
    """
    args, kwargs = pytree.tree_map_only(torch.Tensor, tracer.operand, (tuple(args), kwargs))
    try:
        operation = _Operation(tracer, func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            refuse_random(operation.name)
        # A decomposition may make tensors, which others then fill, also with random numbers.
        return pytree.tree_map_only(torch.Tensor, tracer.constant, operation.result())
    except SpecError as error:  # functions of flashgen name no line of the mod
        raise SpecError(
            error.what, where=tracer.where, numbers=error.numbers, way_out=error.way_out
        ) from None


@dataclass(frozen=True)
class _Operation:
    """An ATen operation ``func`` on traced tensors and numbers."""

    tracer: Tracer
    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.func._schema.name.partition("::")[2])

    def result(self) -> Any:
        if self.name in ("_local_scalar_dense", "item"):
            data = self.args[0].array.data
            return refuse_value(self.name) if data is None else data.item()
        if self.func._schema.is_mutable:
            return self._in_place()
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, TracedTensor)]
        if all(x.array.data is not None or 0 in x.shape for x in tensors):
            self.tracer.rigid |= any(x.array.data is None for x in tensors)
            args, kwargs = self._mapped(_data)
            computed = self.func(*args, **kwargs)
            return self._views(pytree.tree_map_only(torch.Tensor, self.tracer.constant, computed))
        on_arrays = STRUCTURE.get(self.name) or SEARCHES.get(self.name)
        if on_arrays is not None:
            args, kwargs = self._mapped(lambda t: t.array)
            arrays = on_arrays(self._announced(), *args, **kwargs)
            return self._views(pytree.tree_map_only(TracedArray, self.tracer.wrap, arrays))
        if self.name in POINTWISE:
            return self._elementwise(POINTWISE[self.name])
        if self.name in _REDUCTIONS:
            return self._reduced(POINTWISE[_REDUCTIONS[self.name]])
        composed = COMPOSED.get(self.func._schema.name)
        if composed is not None:
            result = self._announced()  # raises torch's errors
            value = composed(*self.args, **self.kwargs)
            return value if isinstance(value, tuple) else value.to(result.dtype)
        return self._decomposed()

    def _views(self, results: Any) -> Any:
        """The results, which may be views of the first operand."""
        if any(declared.alias_info is not None for declared in self.func._schema.returns):
            for tensor in (self.args[0], *pytree.tree_leaves(results)):
                tensor.has_views = True
        return results

    def _mapped(self, function: Callable[[TracedTensor], Any]) -> Any:
        """The arguments with something else in place of each traced tensor."""
        return pytree.tree_map_only(TracedTensor, function, (self.args, self.kwargs))

    def _in_place(self) -> Any:
        """``x += y`` as ``x = x + y``, for a value that the mod itself computed."""
        target = self.args[0]
        if torch.Tag.inplace_view in self.func.tags:  # x.squeeze_() in products of matrices
            target.array = getattr(torch.ops.aten, self.name.removesuffix("_"))(*self.args).array
            with no_dispatch():
                return self.func(*self.args, **self.kwargs)
        plain = getattr(torch.ops.aten, self.name.removesuffix("_"), None)
        overload = getattr(plain, self.func._overloadname, None)
        captured = any(self.tracer.traced(x.tensor) is target for x in self.tracer.sources)
        if overload is None or captured or target.has_views or not self.name.endswith("_"):
            refuse_write(self.name)
        result = overload(*self.args, **self.kwargs)
        target.array = torch.ops.aten._to_copy(result, dtype=target.dtype).array
        return target

    def _announced(self) -> Result:
        """The results on meta tensors: their shapes and dtypes, and torch's own errors."""
        args, kwargs = self._mapped(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
        if "device" in kwargs:
            kwargs["device"] = "meta"
        outs = pytree.tree_leaves(self.func(*args, **kwargs))
        return Result(self.tracer, outs[0].dtype, [tuple(out.shape) for out in outs])

    def _elementwise(self, rule: Callable[..., Entry]) -> TracedTensor:
        result = self._announced()
        if result.dtype not in DTYPES:
            self.tracer.refuse(
                f"kernels do not compute in {result.dtype}",
                numbers=f"aten.{self.func.__name__}",
                way_out="real numbers",
            )
        leaves, tree = pytree.tree_flatten(self._mapped(lambda t: t.array))
        arrays = [leaf for leaf in leaves if isinstance(leaf, TracedArray)]
        full = [array for array in arrays if array.shape]
        if any(array.shape != result.shapes[0] for array in full):
            self.tracer.rigid = True

        # A number beside narrow integers has their dtype, unless the operation computes in floats.
        narrow = (
            ""
            if result.dtype.is_floating_point
            else promoted({DTYPES.get(array.dtype, "") for array in arrays} - {"bool"})
        )

        def element_at(indices: tuple[Any, ...]) -> Entry:
            operands = [
                leaf.at(leaf.broadcast(indices))
                if isinstance(leaf, TracedArray)
                else _within(narrow, literal(leaf))
                if isinstance(leaf, bool | int | float)
                else leaf
                for leaf in leaves
            ]
            positional, by_name = pytree.tree_unflatten(operands, tree)
            by_name.pop("out", None)
            return _within(DTYPES[result.dtype], rule(result, *positional, **by_name))

        sizes = next((array.sizes for array in full if array.shape == result.shapes[0]), None)
        return self.tracer.wrap(result.array(element_at, sizes))

    def _reduced(self, rule: Callable[..., Entry]) -> TracedTensor:
        """A reduction over a few elements, written out."""
        result, array = self._announced(), self.args[0].array
        dim = self.args[1] if len(self.args) > 1 else self.kwargs.get("dim")
        keepdim = bool(self.args[2] if len(self.args) > 2 else self.kwargs.get("keepdim", False))
        rank = len(array.shape)
        if dim is None or (dim == [] and result.shapes[0] != array.shape):
            dim = range(rank)
        dims = {d % max(rank, 1) for d in ([dim] if isinstance(dim, int) else dim)}
        dims &= set(range(rank))
        index_tuples = list(itertools.product(*(range(array.shape[d]) for d in sorted(dims))))
        if not 0 < len(index_tuples) <= _LARGEST_UNROLLED:
            self.tracer.refuse(
                f"torch.{self.name} over {len(index_tuples)} elements cannot be written out in a "
                "kernel",
                numbers=f"aten.{self.func.__name__} of shape {array.shape}; "
                f"at most {_LARGEST_UNROLLED}",
                way_out="the reduction outside of the mod, and its result as a captured tensor",
            )
        self.tracer.rigid = self.tracer.rigid or bool(dims)
        # torch casts the elements, which dtype= may demand; any and all of uint8 are of uint8.
        element_result = (
            replace(result, dtype=torch.bool) if self.name in ("any", "all") else result
        )

        def element(kept_indices: list[Any], reduced_indices: tuple[int, ...]) -> Entry:
            rest, chosen = iter(kept_indices), iter(reduced_indices)
            entry = array.at(tuple(next(chosen if d in dims else rest) for d in range(rank)))
            return POINTWISE["_to_copy"](element_result, entry)

        def element_at(indices: tuple[Any, ...]) -> Entry:
            kept_indices = [i for d, i in enumerate(indices) if not (keepdim and d in dims)]
            elements = (element(kept_indices, reduced_indices) for reduced_indices in index_tuples)
            reduced = functools.reduce(functools.partial(rule, element_result), elements)
            return _within(
                DTYPES[result.dtype],
                reduced if element_result is result else POINTWISE["_to_copy"](result, reduced),
            )

        return self.tracer.wrap(result.array(element_at))

    def _decomposed(self) -> Any:
        """The operation by torch's decomposition into simpler operations, where one exists."""
        from torch._decomp import decomposition_table

        numbers = f"aten.{self.func.__name__}"
        try:
            if self.func in decomposition_table:
                return decomposition_table[self.func](*self.args, **self.kwargs)
            decomposed = self.func.decompose(*self.args, **self.kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        except FlashgenError:
            raise
        except Exception as error:
            numbers += f"; its decomposition raised {type(error).__name__}: {error}"
        self.tracer.refuse(
            f"torch.{self.name} cannot be expressed in a kernel",
            numbers=numbers,
            way_out="arithmetic, comparisons, torch.where, minimum, maximum, clamp, abs, exp, log, "
            "sqrt, sin, cos, tanh, sigmoid, floor and what is made of them; or a captured tensor",
        )


def _data(tensor: TracedTensor) -> torch.Tensor:
    """The elements of a constant, or of a tensor that has none."""
    data = tensor.array.data
    return torch.empty(tensor.shape, dtype=tensor.dtype) if data is None else data


def _within(dtype: str, x: Entry) -> Entry:
    """An integer as a narrow dtype holds it; the entry itself for any other dtype."""
    expr = wrapped(x.value.expr, dtype if dtype in NARROW else "")
    return x if expr is x.value.expr else Entry(Value(expr, x.value.captures), x.lost)


_REDUCTIONS = {
    "sum": "add",
    "prod": "mul",
    "any": "logical_or",
    "all": "logical_and",
    "amax": "maximum",
    "amin": "minimum",
}
