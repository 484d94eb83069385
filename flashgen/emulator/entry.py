"""The public entry: numpy arrays become device memory, a kernel runs, the arrays are updated."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.counters import Counters
from flashgen.emulator.errors import LaunchArguments
from flashgen.emulator.machine import Machine
from flashgen.emulator.memory import Allocation, GlobalMemory
from flashgen.emulator.parser import parse
from flashgen.emulator.program import GLOBAL_BASE, Program
from flashgen.emulator.ptx import Module, Variable
from flashgen.emulator.tma import TensorMap
from flashgen.tensormap import MAP_ALIGN, MAP_BYTES

Array = npt.NDArray[Any]
STEP_LIMIT = 5_000_000
_KEPT_MODULES = 32
_MODULES: OrderedDict[str, tuple[Module, dict[str, Program]]] = OrderedDict()
_LOCK = threading.RLock()
_LAUNCHES: ContextVar[list[Counters] | None] = ContextVar("launches", default=None)


def launch(
    ptx: str,
    name: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    shared_bytes: int = 0,
    check: bool = True,
    order_seed: int | None = None,
    *,
    step_limit: int = STEP_LIMIT,
    profile: bool = False,
) -> Counters:
    """Executes a kernel of a PTX text.

    Args:
        ptx: text of one module, as NVRTC or another compiler wrote it.
        name: the kernel, as the PTX spells it.
        grid: blocks in x, y, z (trailing ones may be left out).
        block: threads in x, y, z.
        args: in the order of the kernel's parameters: a numpy array (a device buffer, updated in
            place; any dtype and strides, bfloat16 as uint16 or ml_dtypes.bfloat16), a number, None
            (a null pointer), a TensorMap (a CUtensorMap by value), or a tuple or list for one
            struct passed by value, laid out as C does, whose items are arrays, None, numpy scalars
            or TensorMaps. A buffer keeps its host address mod 16.
        shared_bytes: dynamic shared memory per block.
        check: also look for races and for reads of memory or registers never written. Bounds,
            alignment, deadlocks and barriers are always checked.
        order_seed: runs blocks and warps in an order drawn from this seed, instead of together.
        step_limit: compiled segments that may run before the launch counts as endless.
        profile: fill in `Counters.recorded` too, which takes time; so does every launch inside
            `profiling`.

    Returns:
        Counters of instructions and memory traffic.

    Raises:
        EmulatorError: the kernel did something that PTX forbids or that is not emulated.
    """
    program = load(ptx, name)
    grid3 = _three(grid, "grid")
    block3 = _three(block, "block")
    _check_shape(program, grid3, block3, shared_bytes)
    memory = GlobalMemory(GLOBAL_BASE, program.constant_bytes)
    packer = _Packer(program, memory)
    parameters = packer.pack(args)
    memory.commit()
    packer.relocate()
    machine = Machine(
        program,
        grid3,
        block3,
        memory,
        parameters,
        shared_bytes,
        check,
        order_seed,
        step_limit,
        profile or _LAUNCHES.get() is not None,
        packer.maps,
    )
    begin = time.perf_counter()
    try:
        counters = machine.run()
    finally:
        memory.copy_back()
    counters.seconds = time.perf_counter() - begin
    launches = _LAUNCHES.get()
    if launches is not None:
        launches.append(counters)
    return counters


@contextmanager
def profiling() -> Iterator[list[Counters]]:
    """Every launch inside, whoever makes it, is one with profile=True.

    Yields:
        A list to which the counters of each launch are added, in their order.
    """
    token = _LAUNCHES.set([])
    launches = _LAUNCHES.get()
    assert launches is not None
    try:
        yield launches
    finally:
        _LAUNCHES.reset(token)


def load(ptx: str, name: str) -> Program:
    """The decoded kernel; decoding is done once per PTX text."""
    with _LOCK:
        found = _MODULES.get(ptx)
        if found is None:
            found = _MODULES[ptx] = (parse(ptx), {})
            while len(_MODULES) > _KEPT_MODULES:
                _MODULES.popitem(last=False)
        _MODULES.move_to_end(ptx)
        module, programs = found
        if name not in programs:
            programs[name] = Program(module, name)
        return programs[name]


def _three(size: int | Sequence[int], what: str) -> tuple[int, int, int]:
    sizes = [size] if isinstance(size, (int, np.integer)) else list(size)
    sizes = [int(s) for s in sizes] + [1] * (3 - len(sizes))
    if len(sizes) != 3 or min(sizes) < 1:
        raise LaunchArguments(
            f"the {what} needs one to three positive sizes",
            where="flashgen.emulator.launch",
            numbers=f"{what} = {size!r}",
            way_out="pass for example (blocks, heads, batch)",
        )
    return sizes[0], sizes[1], sizes[2]


def _check_shape(
    program: Program, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int
) -> None:
    threads = block[0] * block[1] * block[2]
    limit = int(np.prod(program.max_threads)) if program.max_threads else 1024
    if threads > min(limit, 1024):
        raise LaunchArguments(
            "too many threads per block",
            where=f"kernel {program.name}",
            numbers=f"{threads} threads; the kernel allows {min(limit, 1024)}",
            way_out="launch with the block size that the kernel was compiled for",
        )
    required = tuple((*program.required_threads, 1, 1)[:3])
    if program.required_threads and required != tuple(block):
        raise LaunchArguments(
            "another block size than the kernel requires",
            where=f"kernel {program.name}",
            numbers=f"block {tuple(block)}; .reqntid {required}",
            way_out="launch with the block size that the kernel was compiled for",
        )
    cluster = program.directives.get(".reqnctapercluster", (1,))
    if int(np.prod(cluster)) != 1:
        raise LaunchArguments(
            "a cluster of several blocks, which the emulator does not know",
            where=f"kernel {program.name}",
            numbers=f".reqnctapercluster {cluster}",
            way_out="compile the kernel for clusters of one block",
        )
    if max(grid[1:]) > 65535 or grid[0] >= 1 << 31 or block[2] > 64:
        raise LaunchArguments(
            "a grid or block beyond the limits of CUDA",
            where=f"kernel {program.name}",
            numbers=f"grid {tuple(grid)}, block {tuple(block)}",
            way_out="a grid has at most 2^31 - 1, 65535 and 65535 blocks; a block 64 in z",
        )
    if shared_bytes < 0:
        raise LaunchArguments(
            "a negative amount of shared memory",
            where=f"kernel {program.name}",
            numbers=f"shared_bytes = {shared_bytes}",
            way_out="pass the bytes that the kernel was planned with",
        )


class _Packer:
    """Places arrays in device memory and lays the parameters out."""

    def __init__(self, program: Program, memory: GlobalMemory) -> None:
        self.program = program
        self.memory = memory
        self.addresses: dict[int, int] = {}  # id of an array -> device address
        self.maps: dict[int, tuple[TensorMap, int]] = {}  # by the offset of their 128 bytes

    def pack(self, args: Sequence[Any]) -> bytes:
        params = self.program.params
        if len(args) != len(params):
            raise self.error(
                "another number of arguments than the kernel has parameters",
                f"{len(args)} given; the kernel has {len(params)}: "
                + ", ".join(p.name for p in params),
                "pass one per parameter; None for a hidden pointer",
            )
        self._variables()
        self._place(args)
        data = bytearray(self.program.param_bytes)
        for number, (value, param) in enumerate(zip(args, params, strict=True)):
            at = self.program.params_at[param.name]
            data[at : at + param.size] = self._one(number, value, param)
        return bytes(data)

    def error(self, what: str, numbers: str, way_out: str) -> LaunchArguments:
        where = f"kernel {self.program.name}"
        return LaunchArguments(what, where=where, numbers=numbers, way_out=way_out)

    def _variables(self) -> None:
        for name, address in self.program.constants.items():
            variable = self.program.variables[name]
            data = variable.init or bytes(variable.size)
            self.memory.fixed(address, variable.size, f"the module variable {name}", data)

    def relocate(self) -> None:
        """Fills in addresses of variables inside initialisers."""
        for name, address in self.program.constants.items():
            for offset, target in self.program.variables[name].relocations:
                place = self.memory.span(address + offset, 8).view(np.uint64)
                place += np.uint64(self.program.constants[target])

    def _place(self, args: Sequence[Any]) -> None:
        """One allocation per array; arrays that overlap on the host share one."""
        found: list[tuple[int, int, int, str, Array]] = []
        for number, value in enumerate(args):
            items = value if isinstance(value, (tuple, list)) else [value]
            for place, item in enumerate(items):
                item = item.array if isinstance(item, TensorMap) else item
                if not isinstance(item, np.ndarray):
                    continue
                label = f"argument {number}"
                if items is value:
                    label += f", field {place}"
                low, high = np.lib.array_utils.byte_bounds(item)
                if item.size == 0:
                    low = high = item.ctypes.data
                found.append((low, high, id(item), label, item))
        found.sort(key=lambda f: (f[0], f[1]))
        place = 0
        while place < len(found):
            low, high, _, label, _ = found[place]
            end = place + 1
            while end < len(found) and found[end][0] < high:
                high = max(high, found[end][1])
                end += 1
            group = found[place:end]
            labels = list(dict.fromkeys(f[3] for f in group))
            allocation = self._allocate(low, high, " and ".join(labels), [f[4] for f in group])
            for start, _, key, _, item in group:
                first = item.ctypes.data if item.size else start
                self.addresses[key] = allocation.start + first - low
            place = end

    def _allocate(self, low: int, high: int, label: str, arrays: list[Array]) -> Allocation:
        size = high - low
        host = None
        if size:
            raw = (ctypes.c_uint8 * size).from_address(low)
            host = np.ctypeslib.as_array(raw)
        allocation = self.memory.allocate(size, low % 16, label, host)
        allocation.writable = any(a.flags.writeable for a in arrays)
        return allocation

    def _one(self, number: int, value: Any, param: Variable) -> bytes:
        if isinstance(value, (tuple, list)):
            return self._struct(number, value, param)
        if isinstance(value, np.ndarray):
            return self._sized(number, self.addresses[id(value)].to_bytes(8, "little"), param)
        if isinstance(value, TensorMap):
            return self._sized(number, self._map(value, param, 0), param)
        if value is None:
            return self._sized(number, bytes(8), param)
        if isinstance(value, np.void):
            return self._sized(number, value.tobytes(), param)
        if isinstance(value, bytes):
            return self._sized(number, value, param)
        return self._number(number, value, param)

    def _sized(self, number: int, data: bytes, param: Variable) -> bytes:
        if len(data) != param.size:
            raise self.error(
                f"argument {number} does not fit its parameter",
                f"{len(data)} bytes given; {param.name} has {param.size}",
                "pass arrays or None for pointers and numbers of the parameter's type",
            )
        return data

    def _number(self, number: int, value: Any, param: Variable) -> bytes:
        size = param.size
        is_float = isinstance(value, (float, np.floating)) or param.type[0] == "f"
        if isinstance(value, np.generic) and value.dtype.itemsize == size and param.type[0] == "b":
            return value.tobytes()
        try:
            if is_float:
                if param.type[0] in "us":
                    if isinstance(value, np.generic) and value.dtype.itemsize == size:
                        return value.tobytes()
                    raise TypeError("a float for an integer parameter")
                return struct.pack("<" + {2: "e", 4: "f", 8: "d"}[size], float(value))
            whole = int(value)
            if not -(1 << (8 * size - 1)) <= whole < 1 << (8 * size):
                raise OverflowError(f"{whole} does not fit {size} bytes")
            return (whole & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        except (TypeError, KeyError, ValueError, OverflowError) as problem:
            raise self.error(
                f"argument {number} does not fit its parameter",
                f"{value!r} for {param.name} of type .{param.type}: {problem}",
                "pass arrays or None for pointers and numbers of the parameter's type",
            ) from None

    def _map(self, value: TensorMap, param: Variable, offset: int) -> bytes:
        """The place of a tensor map; what lies there is opaque, also on a GPU."""
        at = self.program.params_at[param.name] + offset
        self.maps[at] = (value, self.addresses[id(value.array)])
        return bytes(MAP_BYTES)

    def _struct(self, number: int, items: Sequence[Any], param: Variable) -> bytes:
        data = bytearray()
        widest = 1
        for place, item in enumerate(items):
            align = 0
            if isinstance(item, TensorMap):
                align = MAP_ALIGN
                part = self._map(item, param, len(data) + -len(data) % align)
            elif isinstance(item, np.ndarray):
                part = self.addresses[id(item)].to_bytes(8, "little")
            elif item is None:
                part = bytes(8)
            elif isinstance(item, np.generic):
                part = item.tobytes()
            else:
                raise self.error(
                    f"field {place} of argument {number} has no size",
                    f"{item!r} is a {type(item).__name__}",
                    "inside a struct use arrays, None, np.int32(...), np.float32(...) and the like",
                )
            align = align or len(part)
            widest = max(widest, align)
            data += bytes(-len(data) % align) + part
        data += bytes(-len(data) % widest)
        return self._sized(number, bytes(data), param)
