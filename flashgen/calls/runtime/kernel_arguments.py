"""Values for a kernel's ``struct Params``, by the names of its fields.

All fields but the addresses of tensors depend on the sizes, the numbers and the strides of a call
alone. They are packed once; a launch then fills in the addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from flashgen.calls.launch.params import ParamField, encode, field_bytes, pack
from flashgen.shared.call import CheckedCall
from flashgen.shared.dropout import keep_scale, kept_levels
from flashgen.shared.errors import LaunchError
from flashgen.shared.fast_division import inverse_of, multiplier_of
from flashgen.shared.signature import CallSignature, field_stem
from flashgen.shared.tensormap import MAP_ALIGN, MAP_BYTES, TensorMapSpec

Tensor = torch.Tensor

_TENSORS = ("pointer", "tensormap")
_MOST_MAPS = 1024  # of one tensor of a kernel, at as many addresses
_OF_CALL = (
    *("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "q_offset", "k_offset", "scale"),
    "splits",
    "run",
)


def numbers_of(
    call: CheckedCall,
    tensors: Mapping[str, Tensor | None],
    captured: Mapping[str, Tensor] | None = None,
) -> dict[str, int | float]:
    """All numbers that a kernel can have as fields, by the name of the field.

    Args:
        tensors: the tensors by their names in kernels: q, k, v, o, do, dq, dk, dv and others.
            Tensors with four dimensions have fields for the strides of batch, heads and rows in
            elements, 0 for an axis of length 1.
        captured: the captured tensors by name.
    """
    numbers: dict[str, int | float] = {name: getattr(call, name) for name in _OF_CALL}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() == 4:
            for axis, size, stride in zip("bhn", tensor.shape, tensor.stride(), strict=False):
                numbers[f"{name}_stride_{axis}"] = stride if size > 1 else 0
    # The kernel compares unsigned 32-bit integers; the field is an int.
    limit = (kept_levels(call.dropout_p) << 16) - 1
    numbers["dropout_limit"] = limit - (1 << 32) if limit >= 1 << 31 else limit
    numbers["dropout_scale"] = keep_scale(call.dropout_p)
    for name, value in call.scalars.items():
        numbers[f"s_{name}"] = value
        if isinstance(value, int):
            numbers[f"d_{name}"] = multiplier_of(value)
            numbers[f"i_{name}"] = inverse_of(value)
    return numbers | numbers_of_captured(captured or {})


def numbers_of_captured(captured: Mapping[str, Tensor]) -> dict[str, int]:
    """Strides and sizes of captured tensors, and strides of their gradients, by field name.

    A gradient is accumulated in a contiguous buffer of the tensor's shape.
    """
    numbers = {}
    for name, tensor in captured.items():
        step, stem = 1, field_stem(name)
        for axis in reversed(range(tensor.dim())):
            size = tensor.shape[axis]
            numbers[f"c_{stem}_size_{axis}"] = size
            numbers[f"c_{stem}_stride_{axis}"] = tensor.stride(axis) if size > 1 else 0
            numbers[f"dc_{stem}_stride_{axis}"] = step if size > 1 else 0
            step *= size
    return numbers


def named(signature: CallSignature, captured: Sequence[Tensor]) -> dict[str, Tensor]:
    """The captured tensors by name, with negative bits resolved."""
    return {
        tensor.name: value.resolve_neg() if value.is_neg() else value
        for tensor, value in zip(signature.tensors, captured, strict=True)
    }


def pointers_of(captured: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Captured tensors by the names of the kernels' pointers."""
    return {f"c_{field_stem(name)}": tensor for name, tensor in captured.items()}


class KernelArguments:
    """The arguments of one kernel for one call: numbers are fixed, addresses are filled in.

    Attributes:
        params: the fields of the kernel's parameter, in order.
        pointers: the names of tensors passed by address or by tensor map, in order.
        maps: the tensor maps, which are the first fields.
    """

    def __init__(
        self,
        params: Sequence[ParamField],
        numbers: Mapping[str, int | float],
        maps: Mapping[str, TensorMapSpec] | None = None,
    ) -> None:
        """
        Args:
            maps: the tensor maps by the names of their fields.

        Raises:
            LaunchError: the kernel has a field without a value.
        """
        self.params = tuple(params)
        self.maps = tuple((maps or {})[p.name] for p in params if p.ctype == "tensormap")
        self.pointers = tuple(p.name for p in params if p.ctype in _TENSORS)
        missing = [p.name for p in params if p.ctype not in _TENSORS and p.name not in numbers]
        if missing:
            raise LaunchError(
                "a kernel has a parameter without a value",
                where="struct Params, " + ", ".join(missing),
                numbers=f"known: {', '.join(sorted(numbers))}",
                way_out="add the field to flashgen.calls.runtime.kernel_arguments.numbers_of",
            )
        self.numbers = {p.name: numbers[p.name] for p in params if p.ctype not in _TENSORS}
        # The structure is packed with null pointers; the bytes between pointers never change.
        unmapped = self.params[len(self.maps) :]
        template = pack(unmapped, [self.numbers.get(p.name) for p in unmapped])
        self._pieces = tuple(_pieces(unmapped, template))
        codes = [f"{last - first}Q{len(piece)}s" for first, last, piece in self._pieces]
        bytes_of_maps = len(self.maps) * MAP_BYTES
        pad = -(bytes_of_maps + len(template)) % MAP_ALIGN if self.maps else 0
        self._format = struct.Struct(
            "<" + f"{MAP_BYTES}s" * len(self.maps) + "".join(codes) + f"{pad}x"
        )
        self._encoded: tuple[dict[int, bytes], ...] = tuple({} for _ in self.maps)

    def packed(self, addresses: Sequence[int], device: int = 0) -> bytes:
        """The bytes of the structure with the addresses of `pointers`; 0 is a null pointer.

        Args:
            device: the number of the GPU on which the addresses are, the same in every call.
        """
        count = len(self.maps)
        values: list[Any] = []
        if count:
            for encoded, address in zip(self._encoded, addresses, strict=False):
                values.append(encoded.get(address) or self._encode(len(values), address, device))
            addresses = addresses[count:]
        for first, last, piece in self._pieces:
            values += addresses[first:last]
            values.append(piece)
        return self._format.pack(*values)

    def _encode(self, index: int, address: int, device: int) -> bytes:
        """The bytes of a tensor map, which are kept, because training steps repeat addresses."""
        encoded_maps = self._encoded[index]
        if len(encoded_maps) >= _MOST_MAPS:
            encoded_maps.clear()
        encoded_maps[address] = encoded = encode(self.maps[index], address, device)
        return encoded


def _pieces(params: Sequence[ParamField], template: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Ranges of adjacent pointers, each with the bytes up to the next pointer.

    Each field begins at the next multiple of its own size, as in C.
    """
    offset, offsets = 0, []
    for param in params:
        width = field_bytes(param.ctype)
        offset += -offset % width
        if param.ctype == "pointer":
            offsets.append(offset)
        offset += width
    if not offsets or offsets[0] > 0:
        yield 0, 0, template[: offsets[0] if offsets else None]
    first = 0
    for last in range(1, len(offsets) + 1):
        end = offsets[last - 1] + 8
        following = offsets[last] if last < len(offsets) else len(template)
        if end < following or last == len(offsets):
            yield first, last, template[end:following]
            first = last
