"""Values for a kernel's ``struct Params``, found by the names of its fields.

Everything but the addresses of tensors depends on the problem and the strides alone, so it is laid
out once for each problem; a launch then fills in addresses.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from flashgen.dropout import keep_scale, kept_levels
from flashgen.errors import LaunchError
from flashgen.launch import Param, pack
from flashgen.ops.captures import numbers_of_captured
from flashgen.ops.checks import Problem
from flashgen.tensormap import MAP_ALIGN, TensorMapSpec

Tensor = torch.Tensor

_OF_TENSORS = ("pointer", "tensormap")
_WIDTHS = {"pointer": 8, "int64": 8, "int32": 4, "float32": 4}


def steps(tensor: Tensor) -> tuple[int, ...]:
    """Strides of batch, heads and rows; 0 for an axis of length 1, whose stride means nothing."""
    return tuple(
        stride if size > 1 else 0
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )


def numbers_of(
    problem: Problem,
    tensors: Mapping[str, Tensor | None],
    captured: Mapping[str, Tensor] | None = None,
) -> dict[str, int | float]:
    """Every number that a kernel may ask for, by the name of its field.

    Args:
        tensors: by the names that kernels have for them: q, k, v, o, do, dq, dk, dv and others.
            The strides of those with four dimensions can be asked for.
        captured: by the names that the spec has for them.
    """
    numbers: dict[str, int | float] = {
        name: getattr(problem, name)
        for name in (
            *("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "q_offset", "k_offset", "scale"),
        )
    }
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() == 4:
            for axis, step in zip("bhn", steps(tensor), strict=True):
                numbers[f"{name}_stride_{axis}"] = step
    # The kernel compares 32 bits without a sign; the field is an int.
    limit = (kept_levels(problem.dropout_p) << 16) - 1
    numbers["dropout_limit"] = limit - (1 << 32) if limit >= 1 << 31 else limit
    numbers["dropout_scale"] = keep_scale(problem.dropout_p)
    for name, value in problem.scalars.items():
        numbers[f"s_{name}"] = value
    return numbers | numbers_of_captured(captured or {})


class Arguments:
    """The arguments of one kernel for one problem: numbers fixed, addresses to be filled in.

    Attributes:
        params: fields of the kernel's parameter, in order.
        pointers: names of the tensors that it takes, in order, by address or by tensor map.
        maps: of the first of them.
    """

    __slots__ = ("_format", "_pieces", "maps", "numbers", "params", "pointers")

    def __init__(
        self,
        params: Sequence[Param],
        numbers: Mapping[str, int | float],
        maps: Mapping[str, TensorMapSpec] | None = None,
    ) -> None:
        """
        Args:
            maps: what the tensor maps among the fields, which come first, say of tensors.

        Raises:
            LaunchError: the kernel has a field that no number is known for.
        """
        self.params = tuple(params)
        self.maps = tuple((maps or {})[p.name] for p in params if p.ctype == "tensormap")
        self.pointers = tuple(p.name for p in params if p.ctype in _OF_TENSORS)
        missing = [p.name for p in params if p.ctype not in _OF_TENSORS and p.name not in numbers]
        if missing:
            raise LaunchError(
                "a kernel asks for a value that the operator does not know",
                where="struct Params, " + ", ".join(missing),
                numbers=f"known: {', '.join(sorted(numbers))}",
                way_out="a field that flashgen.ops.arguments.numbers_of gives",
            )
        self.numbers = {p.name: numbers[p.name] for p in params if p.ctype not in _OF_TENSORS}
        # With null pointers; what lies between the pointers stays as it is.
        others = self.params[len(self.maps) :]
        template = pack(others, [self.numbers.get(p.name) for p in others])
        self._pieces = tuple(_pieces(others, template))
        self._format = struct.Struct(
            "<" + "".join(f"{last - first}Q{len(rest)}s" for first, last, rest in self._pieces)
        )

    def packed(self, addresses: Sequence[int]) -> bytes:
        """The structure with the addresses of `pointers`; 0 is a null pointer."""
        if self.maps:
            count = len(self.maps)
            made = map(encoded, self.maps, addresses[:count])
            packed = b"".join(made) + self._without_maps(addresses[count:])
            return packed + bytes(-len(packed) % MAP_ALIGN)
        return self._without_maps(addresses)

    def _without_maps(self, addresses: Sequence[int]) -> bytes:
        if len(self._pieces) == 1:
            return self._format.pack(*addresses, self._pieces[0][2])
        values: list[Any] = []
        for first, last, rest in self._pieces:
            values += [*addresses[first:last], rest]
        return self._format.pack(*values)

    def values(self, tensors: Mapping[str, Tensor | None]) -> list[Any]:
        """The fields in order, with tensors in the places of pointers."""
        return [
            tensors[p.name] if p.ctype in _OF_TENSORS else self.numbers[p.name] for p in self.params
        ]


@functools.lru_cache(maxsize=1024)
def encoded(spec: TensorMapSpec, address: int) -> bytes:
    """The 128 bytes for TMA; training meets the same addresses over and over."""
    from flashgen.launch.tensormap import encode

    return encode(spec, address)


def _pieces(params: Sequence[Param], template: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Pointers that lie side by side, as a range of all pointers, and the bytes up to the next.

    Each field begins at the next multiple of its own size, as C has it.
    """
    at, offsets = 0, []
    for param in params:
        width = _WIDTHS[param.ctype]
        at += -at % width
        if param.ctype == "pointer":
            offsets.append(at)
        at += width
    if not offsets or offsets[0] > 0:
        yield 0, 0, template[: offsets[0] if offsets else None]
    first = 0
    for last in range(1, len(offsets) + 1):
        end = offsets[last - 1] + 8
        following = offsets[last] if last < len(offsets) else len(template)
        if end < following or last == len(offsets):
            yield first, last, template[end:following]
            first = last
