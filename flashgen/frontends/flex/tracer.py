"""Tracing what torch mods compute: running their recorded operations on traced tensors.

A `TracedTensor` has a shape and a dtype but no memory. Every operation that torch applies to one
arrives as an ATen operation, whose rule builds flashgen's traced values from those of the operands.
A `Tracer` is active meanwhile, so that captured tensors become arrays of elements as soon as torch
uses them: slices and casts of captured tensors are part of the traced expression instead of being
computed once at trace time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import sympy
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from flashgen.frontends.flex.operation_results import element, is_differentiated, name_of
from flashgen.frontends.flex.traced_array import Entry, Index, TracedArray, fixed, literal, single
from flashgen.shared.dtypes import POSITION_LIMIT, TENSOR_DTYPES
from flashgen.shared.errors import SpecError
from flashgen.shared.signature import LAYOUT_NAMES
from flashgen.spec.language.capture_names import check_name
from flashgen.spec.language.integer_limits import Limits, limits
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.symbols import K, Q
from flashgen.spec.language.tensor import Tensor
from flashgen.spec.language.tensor_elements import Element
from flashgen.spec.language.traced import Traced, Value, as_expr, captures_of

DTYPES = {getattr(torch, name): name for name in TENSOR_DTYPES}
DTYPES[torch.float64] = "float32"  # cast at each call: kernels compute in float32

_SHAPE_READERS = ("shape", "size", "__len__", "numel", "nelement", "sym_size", "nbytes", "stride")


@dataclass(eq=False)
class CapturedTensor:
    """A captured tensor and its name in the spec.

    Attributes:
        tensor: the tensor of the traced call.
        tensor_index: its index among the tensors that a record reads; None for one that the mod
            creates.
        created_number: its number in a record, for one that the mod creates anew for each call.
        spec_tensors: the tensors of the spec that stand for it, by whether they have a gradient.
    """

    tensor: torch.Tensor
    name: str
    tensor_index: int | None = None
    created_number: int | None = None
    spec_tensors: dict[bool, Tensor] = field(default_factory=dict)


class TracedTensor(torch.Tensor):
    """The tensor that a mod gets in place of a real one.

    Attributes:
        has_views: whether it is a view of another tensor, or another of it.
    """

    has_views = False
    array: TracedArray
    tracer: Tracer

    @staticmethod
    def __new__(cls, array: TracedArray, tracer: Tracer) -> TracedTensor:
        tensor: TracedTensor = torch.Tensor._make_wrapper_subclass(
            cls, array.shape, dtype=array.dtype, device=tracer.device
        )
        tensor.array = array
        tensor.tracer = tracer
        return tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<traced tensor of shape {self.array.shape}, {self.array.dtype}>"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tracer = next(leaf.tracer for leaf in leaves if isinstance(leaf, TracedTensor))
        return tracer.run(tracer, func, args, dict(kwargs or {}))


class Tracer(TorchFunctionMode):
    """The state of tracing mods: captured tensors, sizes and assumptions.

    Args:
        device: the device of the queries.
        bounds: the least and the greatest value of each position symbol.
        read, names: the tensors that a record reads, and their names.
        run: computes an ATen operation on traced tensors.

    Attributes:
        sources: the captured tensors in order of first use.
        sizes: run-time scalars that hold lengths of captured tensors, by source and dimension.
        numbers: run-time scalars that hold numbers of a record, by their indices in it.
        where: the user's ``file:line`` of the operation that runs.
        learns: False inside of torch.no_grad().
        assumed: integer expressions whose sign the traced expressions rely on: they are not
            negative within `bounds`.
        rigid: whether the expressions depend on the lengths of captured tensors.
    """

    def __init__(
        self,
        device: torch.device,
        bounds: Mapping[sympy.Symbol, Limits],
        read: Sequence[torch.Tensor],
        names: Sequence[str],
        run: Callable[[Tracer, Any, Sequence[Any], dict[str, Any]], Any],
    ) -> None:
        super().__init__()
        self.device = device
        self.run = run
        self.sources: list[CapturedTensor] = []
        self.sizes: dict[tuple[CapturedTensor, int], Scalar] = {}
        self.numbers: dict[int, Scalar] = {}
        self.assumed: list[sympy.Expr] = []
        self.rigid = False
        self.where = "unknown"
        self.learns = True
        self._bounds = bounds
        self._tensor_indices = {id(tensor): index for index, tensor in enumerate(read)}
        self._names = names
        self._traced_tensors: dict[int, TracedTensor] = {}
        self._used_names: set[str] = set()

    # The interface of TorchFunctionMode.

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = name_of(func)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.traced, (tuple(args), kwargs))
        tensor = args[0] if args and isinstance(args[0], TracedTensor) else None
        if tensor is not None and name in _SHAPE_READERS and tensor.array.data is None:
            self.rigid = self.rigid or bool(tensor.array.shape)
        if func is torch.Tensor.__getitem__:
            return element(args[0], args[1])
        return pytree.tree_map_only(torch.Tensor, self.constant, func(*args, **kwargs))

    # From tensors to arrays and back.

    def wrap(self, array: TracedArray) -> TracedTensor:
        return TracedTensor(array, self)

    def symbol(self, symbol: sympy.Symbol, dtype: torch.dtype) -> TracedTensor:
        return self.wrap(single(Entry(Value(symbol)), dtype))

    def traced(self, tensor: torch.Tensor) -> TracedTensor:
        """``tensor`` as a captured tensor, unless it is traced already."""
        if isinstance(tensor, TracedTensor):
            return tensor
        traced_tensor = self._traced_tensors.get(id(tensor))
        if traced_tensor is None:
            source = self._source(tensor)
            traced_tensor = self._traced_tensors[id(tensor)] = self.wrap(
                self._captured(source, is_differentiated(tensor))
            )
        return traced_tensor

    def operand(self, tensor: torch.Tensor) -> TracedTensor:
        """An operand of an ATen operation; torch itself may have made a tensor of a number."""
        if isinstance(tensor, TracedTensor):
            return tensor
        if tensor.dim() == 0 and id(tensor) not in self._tensor_indices:
            return self.constant(tensor)
        return self.traced(tensor)

    def constant(self, tensor: torch.Tensor) -> TracedTensor:
        """A tensor that the mod creates from numbers."""
        if isinstance(tensor, TracedTensor):
            return tensor
        data = tensor.detach().contiguous()
        captured: list[TracedArray] = []

        def element_at(indices: tuple[Index, ...]) -> Entry:
            if all(isinstance(index, int) for index in indices):
                return literal(data[indices].item())
            if not captured:
                source = CapturedTensor(data, self._free_name("table"))
                self.sources.append(source)
                captured.append(self._captured(source, grad=False))
            return captured[0].at(indices)

        return self.wrap(
            TracedArray(tuple(data.shape), data.dtype, element_at, fixed(data.shape), data)
        )

    def created(self, tensor: torch.Tensor, number: int) -> TracedTensor:
        """A tensor that the mod creates anew for each call: it has a number in each record."""
        self.rigid = True
        self._check_dtype(tensor)
        source = CapturedTensor(tensor, self._free_name("table"), created_number=number)
        self.sources.append(source)
        return self.wrap(self._captured(source, grad=False))

    def number(self, value: int | float, index: int) -> TracedTensor:
        """A number among the operands of a record as a run-time scalar."""
        scalar = self.numbers.get(index)
        if scalar is None:
            kind = "int32" if isinstance(value, int) else "float32"
            scalar = self.numbers[index] = Scalar(self._free_name(f"number_{index}"), kind)
        dtype = torch.int64 if isinstance(value, int) else torch.float32
        return self.wrap(single(Entry(scalar), dtype))

    def _check_dtype(self, tensor: torch.Tensor) -> None:
        if tensor.dtype not in DTYPES:
            self.refuse(
                "a captured tensor has a dtype that kernels do not read",
                numbers=f"{tensor.dtype}, shape {tuple(tensor.shape)}",
                way_out=f"one of {', '.join(sorted(set(DTYPES.values())))}",
            )

    def _source(self, tensor: torch.Tensor) -> CapturedTensor:
        self._check_dtype(tensor)
        index = self._tensor_indices.get(id(tensor))
        name = "" if index is None else self._names[index]
        source = CapturedTensor(tensor, self._free_name(name or f"c{len(self.sources)}"), index)
        self.sources.append(source)
        return source

    def _captured(self, source: CapturedTensor, grad: bool) -> TracedArray:
        tensor = source.tensor

        def element_at(indices: tuple[Index, ...]) -> Entry:
            return Entry(_element(self._tensor(source, grad), indices))

        sizes = tuple(functools.partial(self._size, source, dim) for dim in range(tensor.dim()))
        return TracedArray(
            tuple(tensor.shape),
            tensor.dtype,
            element_at,
            sizes if source.tensor_index is not None else fixed(tensor.shape),
            detached=(lambda: self._captured(source, grad=False)) if grad else None,
        )

    def _tensor(self, source: CapturedTensor, grad: bool) -> Tensor:
        if grad not in source.spec_tensors:
            name = (
                source.name if not source.spec_tensors else self._free_name(f"{source.name}_fixed")
            )
            dims = tuple(f"{name}_{dim}" for dim in range(source.tensor.dim()))
            source.spec_tensors[grad] = Tensor(name, dims, DTYPES[source.tensor.dtype], grad)
        return source.spec_tensors[grad]

    def _size(self, source: CapturedTensor, dim: int) -> Scalar:
        if (source, dim) not in self.sizes:
            name = self._free_name(f"{source.name}_size_{dim}")
            self.sizes[source, dim] = Scalar(name, "int32", minimum=1)
        return self.sizes[source, dim]

    def _free_name(self, wanted: str) -> str:
        """A unique name that a captured tensor may have."""
        name = wanted.strip("_")
        while "__" in name:
            name = name.replace("__", "_")
        try:
            check_name("Tensor", name)
        except SpecError:
            name = f"{name}_value" if name.isidentifier() and name.isascii() else "c0"
        if name in LAYOUT_NAMES:  # the blocks of a BlockMask may come beside the mods
            name = f"{name}_value"
        free, count = name, 0
        while free in self._used_names:
            count += 1
            free = f"{name}_{count}"
        self._used_names.add(free)
        return free

    # For the rules.

    def never_negative(self, expr: sympy.Expr) -> bool:
        """True if an expression is at least 0 at all positions of this call."""
        whole, denominator = expr.as_numer_denom()
        if not (denominator.is_Integer and denominator > 0):
            return False
        try:
            if limits(whole, _EVERYWHERE)[0] >= 0:
                return True
            if limits(whole, self._bounds)[0] < 0:
                return False
        except TypeError:  # computed in floats
            return False
        self.assumed.append(whole)
        return True

    def refuse(self, what: str, *, numbers: str = "", way_out: str) -> NoReturn:
        """Raise a SpecError at the user's line."""
        numbers = numbers or "while a mod is traced"
        raise SpecError(what, where=self.where, numbers=numbers, way_out=way_out) from None


_EVERYWHERE = {Q: (0, POSITION_LIMIT), K: (0, POSITION_LIMIT)}
"""In flex_attention positions count from 0."""


def _element(tensor: Tensor, indices: Sequence[Index]) -> Traced:
    """``tensor[indices]``, without sympy's check for integers: torch has checked the dtypes."""
    element = Element(tensor.symbol, *map(as_expr, indices))
    expr = sympy.Ne(element, 0) if tensor.dtype == "bool" else element
    return Value(expr, captures_of(tensor, *indices))
