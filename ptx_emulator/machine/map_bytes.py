"""The 128 bytes of a tensor map in device memory, and the maps that kernels use.

A CUtensorMap is opaque on a GPU. Here it holds the fields below, so that a kernel may copy a map,
and change it by tensormap.replace. Dimensions and box sides are numbers of elements, strides are
bytes, and the numbers of types and modes are those of tensormap.replace.

    0 mark   4 rank - 1   8 element type   12 interleave   16 swizzle   20 fill mode
    24 address of the tensor   32 strides (4 of 8 bytes)   64 dimensions (5 of 4)   84 box (5 of 4)
    104 bytes from the map's first element to the tensor   112 bytes of the tensor's array

Source: PTX ISA, "Tensor" and "tensormap.replace".
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from flashgen.shared.errors import LaunchError
from flashgen.shared.tensormap import MAP_BYTES, TensorMapSpec
from ptx_emulator.errors import FenceError, LaunchArguments, Misaligned, OutOfBounds
from ptx_emulator.isa import memory
from ptx_emulator.isa.copies import FIELDS
from ptx_emulator.machine.tma import NAN_BITS, TensorMap
from ptx_emulator.state.cohort import LANES
from ptx_emulator.state.memory import PARAM_WINDOW, WINDOW_BYTES
from ptx_emulator.state.wave import Execution, Site, Wave

_MARK = 0x50414D54
_FORM = struct.Struct("<6I Q 4Q 5I 5I Q Q 8x")
_TYPES = (
    *("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", None),
    *("float64", "bfloat16"),
)
_SPANS = (0, 32, 64, 128)
_KEPT = 256
_LEAST_ALIGN = 64


class PlacedMap(NamedTuple):
    """A tensor map as a copy uses it: boxes, the array at ``base``, and the bytes before it.

    ``fill_nan``: elements outside the tensor are NaN.
    """

    spec: TensorMapSpec
    base: int
    bytes: int
    before: int
    fill_nan: bool


def in_parameters(address: int) -> bool:
    return PARAM_WINDOW <= address < PARAM_WINDOW + WINDOW_BYTES


def encoded(tensor: TensorMap, base: int) -> bytes:
    """The bytes of a map whose array lies at device address ``base``."""
    spec = tensor.spec
    rank = len(spec.dims)

    def filled(values: tuple[int, ...], count: int, mask: int) -> list[int]:
        return [value & mask for value in values] + [0] * (count - len(values))

    return _FORM.pack(
        *(_MARK, rank - 1, _TYPES.index(spec.dtype), 0, _SPANS.index(spec.swizzle)),
        *(tensor.fill_nan, base),
        *filled(spec.strides, 4, (1 << 64) - 1),
        *filled(spec.dims, 5, (1 << 32) - 1),  # 2^32 is 0
        *filled(spec.box, 5, (1 << 32) - 1),
        *(tensor.before, tensor.bytes),
    )


class TensorMaps:
    """The tensor maps of a wave, by their addresses."""

    def __init__(self, machine: Wave, addresses: list[int], started: dict[int, bytes]) -> None:
        self.machine = machine
        self._addresses = addresses  # addresses of the maps among the arguments
        self._started = started  # bytes of those in global memory at the start of the launch
        self._decoded: dict[bytes, PlacedMap] = {}
        self._acquired: dict[tuple[int, int], bytes] = {}  # (warp, address) -> bytes it has seen

    def map_at(self, site: Site, address: int) -> PlacedMap:
        """The map at a generic address.

        Raises:
            LaunchArguments: there is none.
            Misaligned, OutOfBounds: its address, or where its tensor lies.
            FenceError: the kernel has changed it, and this warp has not executed the fence.
        """
        machine = self.machine
        data = self._bytes(address)
        if data is None or not data.startswith(_MARK.to_bytes(4, "little")):
            what = "no tensor map lies at this address"
            numbers = f"address {address:#x}; maps among the arguments: "
            numbers += ", ".join(map(hex, self._addresses)) or "none"
            way_out = "pass an emulator.TensorMap as a __grid_constant__ parameter, or for a "
            way_out += "pointer, and use its address"
            machine.fail(LaunchArguments, what, site, numbers, way_out)
        if address % _LEAST_ALIGN:
            what = "a tensor map at an address that is not aligned"
            numbers = f"address {address:#x} is {address % _LEAST_ALIGN} mod {_LEAST_ALIGN}"
            way_out = f"align CUtensorMap to {_LEAST_ALIGN} bytes, or to 128 as CUDA 13 does"
            machine.fail(Misaligned, what, site, numbers, way_out)
        if machine.config.check and not in_parameters(address):
            row = int(site.cohort.rows[site.row])
            seen = self._acquired.get((row, address), self._started.get(address))
            if seen != data:
                what = "a tensor map that the kernel has written is used without a proxy fence"
                numbers = f"the map at {machine.memory.describe(address)}"
                way_out = "execute fence.proxy.tensormap::generic.acquire.gpu [map], 128 in the "
                way_out += "warp that uses it, after the release fence of the warp that wrote it"
                machine.fail(FenceError, what, site, numbers, way_out)
        placed = self._decoded.get(data)
        if placed is None:
            if len(self._decoded) >= _KEPT:
                self._decoded.clear()
            placed = self._decoded[data] = self._decode(site, data)
        return placed

    def _bytes(self, address: int) -> bytes | None:
        """The 128 bytes at an address of the parameters or of global memory."""
        machine = self.machine
        if in_parameters(address):
            offset = address - PARAM_WINDOW
            return machine.parameters[offset : offset + MAP_BYTES].tobytes()
        allocation_index = machine.memory.find(address)
        if allocation_index < 0 or address + MAP_BYTES > machine.memory.ends[allocation_index]:
            return None
        return machine.memory.span(address, MAP_BYTES).tobytes()

    def _decode(self, site: Site, data: bytes) -> PlacedMap:
        machine = self.machine
        _, rank, kind, interleave, swizzle, fill, base, *rest = _FORM.unpack(data)
        rank, before, size = rank + 1, rest[14], rest[15]
        strides, dims, box = rest[:4], rest[4:9], rest[9:14]
        name = _TYPES[kind] if kind < len(_TYPES) else None
        fills = (0, 1) if name in NAN_BITS else (0,)
        if name is None or swizzle >= len(_SPANS) or rank > 5 or interleave or fill not in fills:
            what = "the emulator does not support the type or a mode of this tensor map"
            numbers = f"rank {rank}, element type {kind}, interleave {interleave}, swizzle "
            numbers += f"{swizzle}, fill mode {fill}"
            way_out = "use a tiled map without interleave; only floats are filled with NaN"
            machine.fail(LaunchArguments, what, site, numbers, way_out)
        try:
            sizes = tuple(side or 1 << 32 for side in dims[:rank])
            parts = sizes, tuple(strides[: rank - 1]), tuple(box[:rank])
            spec = TensorMapSpec(name, *parts, _SPANS[swizzle])
            spec.check_address(base)
        except LaunchError as problem:
            what = "a tensor map in device memory that the driver would reject"
            way_out = "check the fields that tensormap.replace has written"
            machine.fail(LaunchArguments, what, site, f"{problem.what}: {problem.numbers}", way_out)
        allocation_index = machine.memory.find(base)
        end = base + spec.span_bytes
        inside = allocation_index >= 0 and end <= machine.memory.ends[allocation_index]
        if not before and not spec.wraps_around and not inside:
            what = "the tensor of a tensor map does not lie in a buffer"
            numbers = f"{spec.span_bytes:,} bytes at {machine.memory.describe(base)}"
            way_out = "check the address, the dimensions and the strides that the kernel has "
            way_out += "written"
            machine.fail(OutOfBounds, what, site, numbers, way_out)
        return PlacedMap(spec, base, size, before, fill == 1)

    # ---- what kernels do with maps in memory

    def fence(self, execution: Execution, address: Any) -> None:
        """fence.proxy.tensormap with acquire: warps see what has been released of the maps."""
        for cohort_row, lane in np.argwhere(execution.active).tolist():
            map_address = int(execution.spread(address)[cohort_row, lane])
            data = self._bytes(map_address)
            if data is not None:
                self._acquired[int(execution.cohort.rows[cohort_row]), map_address] = data

    def replace(
        self, execution: Execution, location: tuple[str, Any], field: tuple[str, int], value: Any
    ) -> None:
        """tensormap.replace; a kernel may make a map by replacing all fields of a map of zeros.

        Args:
            location: the state space, and the address of the map.
            field: name and index of the field, see `FIELDS`.
        """
        space, address = location
        offset, size, count = FIELDS[field[0]]
        if not 0 <= field[1] < count:
            what = "tensormap.replace of an entry that the field does not have"
            numbers = f"entry {field[1]} of .{field[0]}, which has {count}"
            way_out = "count entries from 0, the innermost dimension"
            self.machine.fail(LaunchArguments, what, execution.site(), numbers, way_out)
        store = memory.store_shared if space == "shared" else memory.store_global
        store(execution, execution.spread(address), np.uint32(_MARK), 4)
        if field[0] == "element_stride":
            if execution.any(strided := execution.spread(value) != 1):
                what = "the emulator does not support element strides other than 1"
                numbers, way_out = f"of dimension {field[1]}", "copy the elements in between, too"
                self.machine.fail(LaunchArguments, what, execution.first(strided), numbers, way_out)
            return
        entry_address = execution.spread(address) + offset + size * field[1]
        kind = np.uint64 if size == 8 else np.uint32
        store(execution, entry_address, np.asarray(value).astype(kind), size)

    def copy(self, execution: Execution, to: Any, source: Any) -> None:
        """tensormap.cp_fenceproxy: the 128 bytes of a map from shared to global memory."""
        first = execution.cohort.full_mask().argmax(axis=1)[:, None] == LANES
        one_lane = execution._replace(lanes=first)
        for offset in range(0, MAP_BYTES, 16):
            data = memory.load_shared(one_lane, execution.spread(source) + offset, 16)
            memory.store_global(one_lane, execution.spread(to) + offset, data, 16)
