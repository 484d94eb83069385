"""The plan of a call: the steps of the Python path, written down once for `native.cpp`.

The plan is not derived a second time from the rules of calls. The prepared call runs once more, on
tensors without memory: every operation of torch is seen by a `TorchDispatchMode`, and every launch
by the target. What a plan cannot hold, such as a value that is read on the host, has a reason.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from flashgen.calls.launch.params import field_bytes, map_kinds, pack
from flashgen.calls.runtime.bound_kernel import BoundKernel
from flashgen.shared.tensormap import MAP_ALIGN, MAP_BYTES

Tensor = torch.Tensor
Layout = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]
"""Sizes, strides, offset in elements and dtype of a tensor in its memory."""

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_ZEROS = {_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default}
_OF_CONTENTS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class NoPlan(Exception):
    """The call has no plan; the text is the reason, a sentence without its end."""


class RecordedTensor(Tensor):
    """A tensor without memory, which stands for one of a call.

    Attributes:
        meta: the tensor on the meta device: two have the same memory if their storages are one.
    """

    meta: Tensor
    _misaligned: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, misaligned: int = 0) -> RecordedTensor:
        """
        Args:
            misaligned: bytes by which the address exceeds a multiple of 16.
        """
        recorded: RecordedTensor = Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        recorded.meta = meta
        recorded._misaligned = misaligned
        return recorded

    def data_ptr(self) -> int:
        """A made-up address that has the alignment of the tensor."""
        return 16 + self._misaligned + int(self.storage_offset()) * self.element_size()

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NoPlan(f"{func} runs where it is not recorded")


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the operations and the launches of a call to a plan.

    Attributes:
        inputs: the tensors of the call, without memory.
    """

    def __init__(self, plan: Any, inputs: Sequence[Tensor | None]) -> None:
        """
        Args:
            plan: a Plan of `native.cpp`.
            inputs: the tensors of the call; None for one that it does not have.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        first = inputs[0]
        assert first is not None, "q is an operand"
        self._plan = plan
        self._device = first.device
        self._metas: list[Tensor] = []  # they live on, because storages are known by addresses
        self._values: dict[tuple[int, Layout], int] = {}
        self._bases: dict[int, list[tuple[Layout, int]]] = {}
        self._allocated: dict[int, tuple[Layout, bool]] = {}  # by storage, not yet a step
        self._constants: dict[int, tuple[Tensor, int]] = {}
        self.inputs = [self._input(index, tensor) for index, tensor in enumerate(inputs)]

    def _input(self, index: int, tensor: Tensor | None) -> RecordedTensor | None:
        if tensor is None:
            return None
        recorded = self._wrapped(_on_meta(tensor), tensor.data_ptr() % 16)
        self._define(*_storage_and_layout(recorded.meta), index)
        return recorded

    def _wrapped(self, meta: Tensor, misaligned: int = 0) -> RecordedTensor:
        self._metas.append(meta)
        return RecordedTensor(meta, self._device, misaligned)

    def _define(self, storage: int, layout: Layout, value: int) -> None:
        self._values[storage, layout] = value
        self._bases.setdefault(storage, []).append((layout, value))

    # Values are made when a later step needs them. Where only a view of an allocation is used, as
    # for results whose rows are stored before the heads, the allocation has the sizes of the view.

    def _value(self, tensor: Tensor) -> int:
        """The value of a tensor, with a step that makes it where there is none yet."""
        if not isinstance(tensor, RecordedTensor):
            return self._constant(tensor)
        storage, layout = _storage_and_layout(tensor.meta)
        if storage in self._allocated:
            whole, zeros = self._allocated.pop(storage)
            covers = layout[2] == 0 and tensor.numel() == math.prod(whole[0])
            storage_layout = layout if covers and layout[3] == whole[3] else whole
            sizes, strides, _, dtype = storage_layout
            self._define(storage, storage_layout, self._plan.allocate(sizes, strides, dtype, zeros))
        value = self._values.get((storage, layout))
        if value is not None:
            return value
        sizes, strides, offset, dtype = layout
        for (_, _, start, base_dtype), base in self._bases[storage]:
            if base_dtype == dtype:
                view: int = self._plan.view(base, sizes, strides, offset - start)
                self._define(storage, layout, view)
                return view
        raise NoPlan(f"a tensor of {dtype} has memory of another dtype")

    def _constant(self, tensor: Tensor) -> int:
        """The value of a tensor outside of the call, such as a block layout, with one address."""
        if tensor.device != self._device:
            raise NoPlan("a tensor of another device takes part in it")
        if id(tensor) not in self._constants:
            self._constants[id(tensor)] = tensor, self._plan.constant(tensor)
        return self._constants[id(tensor)][1]

    def _pointer(self, tensor: Tensor) -> tuple[int, int]:
        """The value in whose memory a tensor is, and the bytes from there to its first element."""
        if isinstance(tensor, RecordedTensor):
            storage, layout = _storage_and_layout(tensor.meta)
            if storage in self._bases and (storage, layout) not in self._values:
                (_, _, start, dtype), base = self._bases[storage][0]
                return base, layout[2] * layout[3].itemsize - start * dtype.itemsize
        return self._value(tensor), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not _OF_CONTENTS.isdisjoint(func.tags):
            raise NoPlan(f"the host reads the contents of tensors ({func})")
        if torch.device(kwargs.get("device") or self._device) != self._device:
            raise NoPlan(f"tensors go to another device ({func})")
        metas, meta_kwargs = tree_map_only(Tensor, _on_meta, (list(args), kwargs))
        if "device" in kwargs or func in _EMPTY | _ZEROS:
            meta_kwargs["device"] = "meta"
        result = func(*metas, **meta_kwargs)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        if func in _EMPTY | _ZEROS:
            storage, layout = _storage_and_layout(result)
            self._allocated[storage] = layout, func in _ZEROS
        else:
            aliases = [returned.alias_info for returned in func._schema.returns]
            if any(alias is not None and alias.is_write for alias in aliases):
                self._operation(func, args, kwargs, outputs, makes=False)
                return kwargs.get("out", args[0] if args else None)
            is_view = all(alias is not None for alias in aliases)
            if not is_view or outputs[0].dtype != metas[0].dtype:
                self._operation(func, args, kwargs, outputs, makes=True)
        recorded = [self._wrapped(output) for output in outputs]
        return recorded[0] if isinstance(result, Tensor) else recorded

    def _operation(
        self, func: Any, args: Any, kwargs: Any, outputs: Sequence[Tensor], *, makes: bool
    ) -> None:
        schema = func._schema
        unset = schema.arguments[len(args) :]
        values = [*args, *(kwargs.get(argument.name, argument.default_value) for argument in unset)]
        tensors = []
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                tensors.append((index, self._value(value)))
                values[index] = None
            elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                raise NoPlan(f"{func} takes a list of tensors")
        names = schema.name, schema.overload_name
        output_values = self._plan.operation(
            *names, *values, tensors=tensors, outputs=len(outputs), makes=makes
        )
        for output, value in zip(outputs, output_values, strict=True):
            if makes:
                self._define(*_storage_and_layout(output), value)

    def launch(self, kernel: BoundKernel, tensors: Mapping[str, Tensor | None]) -> None:
        """Adds a launch, and further launches for blocks beyond the limits of a grid."""
        launch, arguments = kernel._launch, kernel.arguments
        if launch is None:
            raise NoPlan(f"{kernel.build.facts.name} has not been launched from Python")
        pointers, maps, field_offset = [], [], 0
        values: list[Any] = []
        specs = iter(arguments.maps)
        for param in arguments.params:
            width = field_bytes(param.ctype)
            field_offset += -field_offset % min(width, MAP_ALIGN)
            tensor = tensors.get(param.name)
            if param.ctype == "tensormap":
                assert tensor is not None, "operands of a kernel are never null"
                maps.append((field_offset, *self._pointer(tensor), next(specs)))
                values.append(bytes(MAP_BYTES))
            elif param.ctype == "pointer":
                pointers += [] if tensor is None else [(field_offset, *self._pointer(tensor))]
                values.append(None)
            else:
                values.append(arguments.numbers[param.name])
            field_offset += width
        sizes = (*launch.grid, *launch.block, launch.smem)
        packed = pack(arguments.params, values)
        launch_and_maps = launch, arguments.maps
        function = int(launch.kernel.function)
        self._plan.kernel(function, sizes, launch.overlaps, packed, pointers, launch_and_maps)
        for offset, value, skip, spec in maps:
            kinds = map_kinds(spec, launch.kernel.driver)
            self._plan.map(offset, value, skip, kinds, spec.dims, spec.strides, spec.box)
        self._plan.context = int(launch.kernel.device.context)
        if kernel.next_kernel is not None:
            self.launch(kernel.next_kernel, tensors)

    def results(self, tensors: Sequence[Tensor | None]) -> None:
        """Sets the results of the plan."""
        self._plan.results = [-1 if tensor is None else self._value(tensor) for tensor in tensors]


def recording(prepared: Any, recorder: CallRecorder) -> Any:
    """A copy of a prepared call whose launches go to the recorder, and none to a GPU."""
    if prepared.signature.kv_dtype is not None:
        raise NoPlan("its cache has codes of 8 bits")
    copied = copy.copy(prepared)
    copied.target = replace(prepared.target, backend="recorded", recorder=recorder)
    for name in ("_kernels", "_bound"):  # a kernel that is bound to tensors without memory is lost
        if hasattr(copied, name):
            setattr(copied, name, dict(getattr(copied, name)))
    copied._reads_inside = True  # on a GPU only FLASHGEN_CHECK_READS asks for that check
    if getattr(copied, "_splits", None) is not None:
        copied._splits = copy.copy(copied._splits)
        copied._splits._target = copied.target
    return copied


def _on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same sizes and strides on the meta device."""
    if isinstance(tensor, RecordedTensor):
        return tensor.meta
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _storage_and_layout(meta: Tensor) -> tuple[int, Layout]:
    layout = tuple(meta.size()), meta.stride(), int(meta.storage_offset()), meta.dtype
    return meta.untyped_storage()._cdata, layout
