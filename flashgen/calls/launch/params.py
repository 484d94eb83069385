"""Packs a kernel's parameters: one structure passed by value, which may hold tensor maps."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat, SupportsIndex

from flashgen.calls.launch.device import check, current, device_facts, fitting_driver, real_driver
from flashgen.shared.errors import LaunchError
from flashgen.shared.tensormap import MAP_ALIGN, MAP_BYTES, TensorMapSpec

# Codes of Python's struct module by C type; little-endian, like every machine with CUDA.
_CODES = {"pointer": "Q", "int64": "q", "int32": "i", "float32": "f", "tensormap": f"{MAP_BYTES}s"}
_ALIGN = {"tensormap": MAP_ALIGN}  # other types are aligned to their size
_RANGES = {
    "pointer": (0, 2**64 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
}
_C64, _C32 = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
# cuTensorMapEncodeTiled: CUtensorMap*, data type, rank, address, sizes, strides, box, element
# strides; then interleave, swizzle, L2 promotion and the fill of elements outside (cuda.h).
_ENCODE = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
    *(_C64, _C64, _C32, _C32, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
)
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


def field_bytes(ctype: str) -> int:
    """The size of a field of this type."""
    return struct.calcsize("<" + _CODES[ctype])


class ParamField(Protocol):
    """One field of the kernel's parameter structure, as `codegen` lists them."""

    @property
    def name(self) -> str: ...
    @property
    def ctype(self) -> str: ...


Value = SupportsIndex | SupportsFloat | bytes | None


@functools.lru_cache(maxsize=256)
def _layout(ctypes_in_order: tuple[str, ...]) -> struct.Struct:
    """A parameter structure with C's alignment, including its padding."""
    text, offset, alignment = "<", 0, 1
    for name in ctypes_in_order:
        if name not in _CODES:
            raise LaunchError(
                f"a kernel parameter has the unknown type {name!r}",
                where="flashgen.calls.launch.pack",
                numbers=f"known types: {', '.join(_CODES)}",
                way_out="use a known type in Source.params",
            )
        width = field_bytes(name)
        align = _ALIGN.get(name, width)
        pad = -offset % align
        text += f"{pad}x" * bool(pad) + _CODES[name]
        offset += pad + width
        alignment = max(alignment, align)
    pad = -offset % alignment
    return struct.Struct(text + f"{pad}x" * bool(pad))


def pack(params: Sequence[ParamField], values: Mapping[str, Value] | Sequence[Value]) -> bytes:
    """Lays values out as the kernel's ``struct Params``, with the alignment of C.

    Args:
        params: the fields in order; ctype is "pointer", "int64", "int32", "float32" or
            "tensormap".
        values: the values by name, or in the order of params. None is a null pointer; a tensor map
            is the bytes that `encode` returns.

    Returns:
        The bytes of the structure, with its trailing padding.

    Raises:
        LaunchError: a value is missing, superfluous, out of range or not a number.
    """
    layout = _layout(tuple(param.ctype for param in params))
    ordered = _in_order(params, values)
    for param, value in zip(params, ordered, strict=True):
        # struct pads shorter values and truncates longer ones.
        if param.ctype == "tensormap" and not (
            isinstance(value, bytes) and len(value) == MAP_BYTES
        ):
            raise _bad_value(param, value, f"the {MAP_BYTES} bytes of an encoded tensor map")
    try:
        return layout.pack(*ordered)
    except (struct.error, OverflowError):
        # A null pointer or a wrong value: convert each field, or raise an error that names it.
        fields = [_field(param, value) for param, value in zip(params, ordered, strict=True)]
        return layout.pack(*fields)


def _in_order(
    params: Sequence[ParamField], values: Mapping[str, Value] | Sequence[Value]
) -> Sequence[Value]:
    names = [param.name for param in params]
    if not isinstance(values, Mapping):
        if len(values) != len(names):
            raise LaunchError(
                "the number of values is not the number of the kernel's parameters",
                where="flashgen.calls.launch.pack",
                numbers=f"{len(values)} values for {len(names)} parameters: {', '.join(names)}",
                way_out="give one value for each parameter, in this order",
            )
        return values
    missing = [name for name in names if name not in values]
    extra = [name for name in values if name not in names]
    if missing or extra:
        raise LaunchError(
            "the values given are not those that the kernel takes",
            where="flashgen.calls.launch.pack",
            numbers=f"missing: {', '.join(missing) or 'none'}; not known to the kernel: "
            f"{', '.join(extra) or 'none'}",
            way_out=f"the kernel takes {', '.join(names)}",
        )
    return [values[name] for name in names]


def _field(param: ParamField, value: Value) -> int | float | bytes:
    if isinstance(value, bytes) and param.ctype == "tensormap":
        return value
    if param.ctype == "float32":
        try:
            number = float(value)  # type: ignore[arg-type]
            struct.pack("<f", number)
        except (TypeError, ValueError, OverflowError):
            number = None
        # float() also accepts text, which is not a number here.
        if number is None or isinstance(value, str | bytes):
            raise _bad_value(param, value, "a number within float32's range")
        return number
    low, high = _RANGES[param.ctype]
    try:
        whole = 0 if value is None and param.ctype == "pointer" else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _bad_value(param, value, "a whole number") from None
    if not low <= whole <= high:
        raise _bad_value(param, value, f"a whole number from {low} to {high}")
    return whole


def _bad_value(param: ParamField, value: object, expected: str) -> LaunchError:
    return LaunchError(
        f"the kernel parameter {param.name} cannot take this value",
        where=f"flashgen.calls.launch.pack, {param.name} ({param.ctype})",
        numbers=f"given {value!r}; expected {expected}",
        way_out="check the argument that it comes from",
    )


def encode(spec: TensorMapSpec, address: int, device: int = 0, *, driver: Any = None) -> bytes:
    """The CUtensorMap of a tensor on the device, to be passed by value (`__grid_constant__`).

    Args:
        spec: the tensor map.
        address: the address of the tensor's first element on the device, in bytes.
        device: the number of the CUDA device, whose context is current while the map is encoded:
            a thread of autograd may have none.
        driver: replaces ``cuda.bindings.driver``.

    Returns:
        128 bytes, a value for a parameter of type "tensormap" of `flashgen.calls.launch.pack`.

    Raises:
        LaunchError: the address does not fit the map, there is no driver, or the driver rejects
            the map.
    """
    spec.check_address(address)
    driver = driver or real_driver()

    where = describe_map(spec)
    # cuda.bindings would write to memory of Python's allocator, which aligns to 16 bytes.
    memory = ctypes.create_string_buffer(2 * MAP_BYTES)
    start = -ctypes.addressof(memory) % MAP_BYTES
    function = check(driver, driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", 12_000, 0), where)
    if not function:
        raise LaunchError(
            "the driver has no function for tensor maps",
            where=where,
            numbers="cuTensorMapEncodeTiled of CUDA 12.0",
            way_out=f"{fitting_driver(12)}, or use arch='sm_80'",
        )
    kinds = map_kinds(spec, driver)
    with current(device_facts(device, driver), driver):
        status = _ENCODE(int(function))(
            ctypes.addressof(memory) + start,
            kinds[0],
            len(spec.dims),
            address,
            (ctypes.c_uint64 * len(spec.dims))(*spec.dims),
            (ctypes.c_uint64 * len(spec.strides))(*spec.strides),
            (ctypes.c_uint32 * len(spec.box))(*spec.box),
            (ctypes.c_uint32 * len(spec.box))(*(1 for _ in spec.box)),
            *kinds[1:],
        )
    check(driver, (driver.CUresult(status),), where)
    return memory.raw[start : start + MAP_BYTES]


def describe_map(spec: TensorMapSpec) -> str:
    """The place of an error about a tensor map."""
    return f"tensor map of {spec.dtype}, dims {spec.dims}, box {spec.box}"


def map_kinds(spec: TensorMapSpec, driver: Any) -> tuple[int, int, int, int, int]:
    """The driver's numbers for the dtype, interleave, swizzle, L2 promotion and fill of a map."""

    def named(kind: str, words: str, name: str) -> int:
        # Such as CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B.
        return int(getattr(getattr(driver, f"CUtensorMap{kind}"), f"CU_TENSOR_MAP_{words}_{name}"))

    return (
        named("DataType", "DATA_TYPE", spec.dtype.upper()),
        named("Interleave", "INTERLEAVE", "NONE"),
        named("Swizzle", "SWIZZLE", _SWIZZLES[spec.swizzle]),
        named("L2promotion", "L2_PROMOTION", "L2_128B"),
        named("FloatOOBfill", "FLOAT_OOB_FILL", "NONE"),
    )
