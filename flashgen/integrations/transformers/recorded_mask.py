"""What a mask function computes, as a key: the operations that it applies to positions and tensors.

A model makes its mask function anew for each forward pass, from closures over tensors of that pass.
The function is executed once on four tensors without dimensions that stand for the positions. The
recorded operations, with their numbers and dtypes, are the same for two functions that compute the
same expression, and the tensors that the function reads are found by their place in the record.
torch.compile can trace this, where it cannot inspect a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor
MaskFunction = Callable[[Any, Any, Any, Any], Any]

POSITIONS = 4
"""A mask function takes the batch entry, the head, the query and the key."""


class RecordedMask(NamedTuple):
    """
    Attributes:
        key: the operations; equal for functions that compute the same from tensors of the same
            kinds.
        tensors: the tensors that the function reads and has not computed from others.
    """

    key: Hashable
    tensors: tuple[Tensor, ...]


class _Recorder(TorchFunctionMode):
    """Notes each operation of torch, with its operands by their numbers."""

    def __init__(self, positions: list[Tensor]) -> None:
        super().__init__()
        self.known = list(positions)  # positions, read tensors and results by their numbers
        self.read: list[Tensor] = []
        self.operations: list[Hashable] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            given = self._noted(args)
            result = _element(args[0], args[1])
        else:
            given = (self._noted(args), self._noted(kwargs or {}))
            result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        made = [item for item in results if isinstance(item, Tensor)]
        if made:  # anything else, such as a device or a length, is an operand of what follows
            self.operations.append((func.__name__, given))
            self.known.extend(made)
        return result

    def _noted(self, value: Any) -> Hashable:
        """A value as a part of the key; numbers with their types, since 1 == 1.0 == True."""
        if isinstance(value, Tensor):
            return self._number_of(value)
        if isinstance(value, (tuple, list)):
            return tuple([self._noted(item) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self._noted(item)) for name, item in value.items()])
        if isinstance(value, slice):
            return ("slice", *[self._noted(x) for x in (value.start, value.stop, value.step)])
        if isinstance(value, (bool, int, float)):
            return type(value).__name__, value
        if type(value).__module__ == "numpy":  # its text omits elements
            return str(value.dtype), value.shape, value.tobytes()
        return str(value)

    def _number_of(self, tensor: Tensor) -> Hashable:
        for number, known in enumerate(self.known):
            if known is tensor:
                return "tensor", number
        self.known.append(tensor)
        self.read.append(tensor)
        number = len(self.known) - 1
        return "tensor", number, str(tensor.dtype), tensor.dim(), tensor.requires_grad


def record(function: MaskFunction, device: torch.device) -> RecordedMask:
    """Executes a mask function once and records its operations.

    Args:
        device: the device of the queries.
    """
    positions = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(POSITIONS)]
    recorder = _Recorder(positions)
    with recorder:
        result = function(*positions)
        noted = recorder._noted(result)
    return RecordedMask((tuple(recorder.operations), noted), tuple(recorder.read))


def _element(tensor: Tensor, index: Any) -> Tensor:
    """``tensor[index]`` without reading the values of an index that is a tensor."""
    given = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, Tensor) for item in given):
        return tensor[index]
    view = tensor[tuple([slice(None) if isinstance(item, Tensor) else item for item in given])]
    places: list[Tensor | None] = []
    dims = sum([item is not None and item is not Ellipsis for item in given])
    for item in given:
        if item is Ellipsis:
            places += [None] * (tensor.dim() - dims)
        elif isinstance(item, Tensor):
            places.append(item)
        elif item is None or isinstance(item, slice):
            places.append(None)
    result: Tensor = torch.ops.aten.index.Tensor(view, places)
    return result
