"""Places kernel arguments: arrays in device memory, values in the parameter bytes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flashgen.shared.tensormap import MAP_ALIGN
from ptx_emulator.errors import LaunchArguments, UnknownInstruction
from ptx_emulator.machine.map_bytes import encoded, in_parameters
from ptx_emulator.machine.tma import TensorMap
from ptx_emulator.ptx.program import GLOBAL_BASE, PtxProgram
from ptx_emulator.ptx.syntax import TYPE_BYTES, Variable
from ptx_emulator.state.memory import PARAM_WINDOW, Allocation, Array, GlobalMemory


def _items(value: Any) -> Iterator[tuple[int, Array]]:
    """The numpy arrays of device memory in an argument, with the number of their field."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.reshape(-1).tolist()
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            for _, array in _items(item):
                yield index, array
    elif isinstance(value, TensorMap):
        yield 0, value.array
    elif isinstance(value, np.ndarray):
        yield 0, value


def _alignment(item: Any, map_align: int) -> int:
    """The alignment in C of a field of a struct."""
    if isinstance(item, (tuple, list)):
        return max((_alignment(field, map_align) for field in item), default=1)
    if isinstance(item, TensorMap):
        return map_align
    if isinstance(item, np.void):
        return item.dtype.alignment
    return item.itemsize if isinstance(item, np.generic) else 8


class DeviceArguments:
    """The arguments of a launch, placed in device memory.

    Attributes:
        memory: every buffer and module variable.
        maps: addresses of the tensor maps: in the window of parameters, or in ``memory``.
        started: bytes of the tensor maps in ``memory``.
        parameters: the bytes of the kernel's parameters.

    Raises:
        LaunchArguments: they do not fit the kernel's parameters.
        UnknownInstruction: it uses a variable that has the address of another kernel.
    """

    def __init__(self, program: PtxProgram, args: Sequence[Any]) -> None:
        self.program = program
        self.memory = GlobalMemory(GLOBAL_BASE, program.constant_bytes)
        self.maps: list[int] = []
        self.started: dict[int, bytes] = {}
        self.addresses: dict[int, int] = {}  # id of an array -> device address
        params = self.program.params
        if len(args) != len(params):
            what = "the number of arguments differs from the number of kernel parameters"
            names = ", ".join(p.name for p in params)
            numbers = f"{len(args)} given; the kernel has {len(params)}: {names}"
            raise self.error(what, numbers, "pass one per parameter; None for a hidden pointer")
        constants, variables = program.constants, program.variables
        for name, address in constants.items():
            size, data = variables[name].size, variables[name].init
            self.memory.fixed(address, size, f"the module variable {name}", data or bytes(size))
        self._allocate_arrays(args)
        self.parameters = bytearray(self.program.param_bytes)
        for number, (value, param) in enumerate(zip(args, params, strict=True)):
            start = self.program.params_at[param.name]
            data = self._parameter_bytes(number, value, param)
            self.parameters[start : start + param.size] = data
        self.memory.commit()
        first = program.first_uses()
        for name, address in constants.items():
            for offset, target in variables[name].relocations:
                pointer = constants.get(target) or program.module.address_of_function(target)
                if pointer and TYPE_BYTES[variables[name].type] == 8:
                    stored_pointer = self.memory.span(address + offset, 8).view(np.uint64)
                    stored_pointer += np.uint64(pointer)
                elif name in first:
                    what = f"the emulator does not support the address of {target} in a variable"
                    numbers = f"initial value of {name}, byte {offset}"
                    way_out = "keep the addresses of device functions and of variables alone there"
                    where = f"kernel {program.name}, {program.describe(first[name])}"
                    raise UnknownInstruction(what, where=where, numbers=numbers, way_out=way_out)

    def error(self, what: str, numbers: str, way_out: str) -> LaunchArguments:
        where = f"kernel {self.program.name}"
        return LaunchArguments(what, where=where, numbers=numbers, way_out=way_out)

    def misfit(self, number: int, numbers: str) -> LaunchArguments:
        way_out = "pass arrays or None for pointers and numbers of the parameter's type"
        return self.error(f"argument {number} does not fit its parameter", numbers, way_out)

    def _allocate_arrays(self, args: Sequence[Any]) -> None:
        """Creates one allocation per array; arrays that overlap on the host share one."""
        ranges: list[tuple[int, int, int, str, Array]] = []
        for number, value in enumerate(args):
            for field, item in _items(value):
                label = f"argument {number}"
                if item is not value and not isinstance(value, TensorMap):
                    label += f", field {field}"
                low, high = np.lib.array_utils.byte_bounds(item)
                if item.size == 0:
                    low = high = item.ctypes.data
                ranges.append((low, high, id(item), label, item))
        ranges.sort(key=lambda r: (r[0], r[1]))
        begin = 0
        while begin < len(ranges):
            low, high, _, label, _ = ranges[begin]
            end = begin + 1
            while end < len(ranges) and ranges[end][0] < high:
                high = max(high, ranges[end][1])
                end += 1
            group = ranges[begin:end]
            labels = list(dict.fromkeys(r[3] for r in group))
            allocation = self._allocate(low, high, " and ".join(labels), [r[4] for r in group])
            for start, _, key, _, item in group:
                first = item.ctypes.data if item.size else start
                self.addresses[key] = allocation.start + first - low
            begin = end

    def _allocate(self, low: int, high: int, label: str, arrays: list[Array]) -> Allocation:
        size = high - low
        host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(low)) if size else None
        allocation = self.memory.allocate(size, low % 16, label, host)
        allocation.writable = any(a.flags.writeable for a in arrays)
        return allocation

    def _parameter_bytes(self, number: int, value: Any, param: Variable) -> bytes:
        """The bytes of one parameter."""
        address = PARAM_WINDOW + self.program.params_at[param.name]
        if isinstance(value, TensorMap) and param.size == 8:
            value = np.array([value], object)  # a pointer to a map in global memory
        data: bytes | None
        if isinstance(value, (tuple, list)):
            # CUtensorMap is aligned to 64 bytes in CUDA 12: the alignment of the struct shows it.
            data = self._struct(number, value, address, min(param.align, MAP_ALIGN))
        elif isinstance(value, np.void):
            data = value.tobytes()
        else:
            data = value if isinstance(value, bytes) else self._reference(number, value, address)
        if data is None:
            return self._number(number, value, param)
        if len(data) != param.size:
            raise self.misfit(number, f"{len(data)} bytes given; {param.name} has {param.size}")
        return data

    def _reference(self, number: int, value: Any, address: int) -> bytes | None:
        """The bytes of a pointer or of a tensor map at an address; None for other values."""
        if isinstance(value, TensorMap):
            self.maps.append(address)
            data = encoded(value, self.addresses[id(value.array)])
            if not in_parameters(address):
                self.started[address] = data
            return data
        if isinstance(value, np.ndarray) and value.dtype == object:
            return self._placed_struct(number, value).to_bytes(8, "little")
        if isinstance(value, np.ndarray):
            return self.addresses[id(value)].to_bytes(8, "little")
        return bytes(8) if value is None else None

    def _number(self, number: int, value: Any, param: Variable) -> bytes:
        size, kind = param.size, param.type[0]
        floating = isinstance(value, (float, np.floating))
        as_bits = kind == "b" or (floating and kind in "us")
        if isinstance(value, np.generic) and value.dtype.itemsize == size and as_bits:
            return value.tobytes()
        try:
            if floating and kind in "us":
                raise TypeError("a float for an integer parameter")
            if floating or kind == "f":
                return struct.pack("<" + {2: "e", 4: "f", 8: "d"}[size], float(value))
            whole = int(value)
            if not -(1 << (8 * size - 1)) <= whole < 1 << (8 * size):
                raise OverflowError(f"{whole} does not fit {size} bytes")
            return (whole & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        except (TypeError, KeyError, ValueError, OverflowError) as problem:
            numbers = f"{value!r} for {param.name} of type .{param.type}: {problem}"
            raise self.misfit(number, numbers) from None

    def _placed_struct(self, number: int, value: Array) -> int:
        """The address of a struct in global memory, an array of objects."""
        key = id(value)
        if key not in self.addresses:
            items = value.reshape(-1).tolist()
            marks = len(self.maps)
            size = len(self._struct(number, items, 0))  # at address 0, to find the size
            del self.maps[marks:]
            allocation = self.memory.allocate(size, 0, f"the struct of argument {number}", None)
            self.addresses[key] = allocation.start
            data = self._struct(number, items, allocation.start)
            self.memory.preset.append((allocation.start, data))
        return self.addresses[key]

    def _struct(
        self, number: int, items: Sequence[Any], address: int, map_align: int = MAP_ALIGN
    ) -> bytes:
        """The bytes of a struct at address ``address``, with the alignment of C."""
        data = bytearray()
        for index, item in enumerate(items):
            data += bytes(-len(data) % _alignment(item, map_align))
            if isinstance(item, (tuple, list)):
                data += self._struct(number, item, address + len(data), map_align)
            elif isinstance(item, np.generic):
                data += item.tobytes()
            else:
                part = self._reference(number, item, address + len(data))
                if part is None:
                    raise self.error(
                        f"field {index} of argument {number} has no size",
                        f"{item!r} is a {type(item).__name__}",
                        "pass arrays, None, TensorMaps, numpy scalars such as np.int32(1), or "
                        "tuples of these as fields",
                    )
                data += part
        data += bytes(-len(data) % _alignment(items, map_align))
        return bytes(data)
