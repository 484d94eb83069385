"""A stand-in for cuda.bindings.driver that records calls, for tests without a GPU."""

from __future__ import annotations

import ctypes
import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_UNKNOWN = 999


_ATTRIBUTES = (
    "COMPUTE_CAPABILITY_MAJOR",
    "COMPUTE_CAPABILITY_MINOR",
    "MAX_THREADS_PER_BLOCK",
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "MAX_REGISTERS_PER_BLOCK",
    "MULTIPROCESSOR_COUNT",
    "COMPUTE_MODE",
    "MEMORY_CLOCK_RATE",
    "GLOBAL_MEMORY_BUS_WIDTH",
    "L2_CACHE_SIZE",
)
_TENSOR_MAP = {
    "DataType": ("DATA_TYPE", "UINT8 UINT16 UINT32 INT32 UINT64 INT64 FLOAT16 FLOAT32 BFLOAT16"),
    "Interleave": ("INTERLEAVE", "NONE"),
    "Swizzle": ("SWIZZLE", "NONE 32B 64B 128B"),
    "L2promotion": ("L2_PROMOTION", "NONE L2_64B L2_128B L2_256B"),
    "FloatOOBfill": ("FLOAT_OOB_FILL", "NONE"),
}
_POINTER, _INT, _WORD = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
_LONGS, _WORDS = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
# int cuTensorMapEncodeTiled(map, type, rank, address, sizes, strides, box, steps, kinds ...)
_ENCODE = ctypes.CFUNCTYPE(
    *(_INT, _POINTER, _INT, _WORD, _POINTER, _LONGS, _LONGS, _WORDS, _WORDS, *(_INT,) * 4)
)
_SMEM = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
OVERLAP = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
PRIMARY = 0xC0  # the handle of device 0's primary context; device 1 has the next


@dataclass(frozen=True)
class Field:
    """A parameter of a kernel."""

    name: str
    ctype: str


def sizes_of(config: Any) -> tuple[int, ...]:
    """Grid, block and shared memory of a CUlaunchConfig, whose only attribute lets it overlap."""
    (attribute,) = config.attrs
    assert (attribute.id, config.numAttrs) == (OVERLAP, 1)
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    sizes = (getattr(config, f"{of}Dim{axis}") for of in ("grid", "block") for axis in "XYZ")
    return (*sizes, config.sharedMemBytes)


def unpacked(params: Sequence[Any], packed: bytes) -> dict[str, Any]:
    """The fields of a packed structure by name."""
    codes = {"pointer": "Q", "int64": "q", "int32": "i", "float32": "f"}
    text = "@" + "".join(codes[param.ctype] for param in params)
    assert struct.calcsize(text) <= len(packed)
    names = [param.name for param in params]
    return dict(zip(names, struct.unpack_from(text, packed), strict=True))


class FakeDriver:
    """One process with some devices of one kind. `fail` maps a function's name to its status."""

    def __init__(
        self,
        capability: tuple[int, int] = (8, 0),
        devices: int = 1,
        smem: int = 166_912,
        fail: dict[str, int] | None = None,
        cuda: int = 13_000,
        name: str = "NVIDIA A100-SXM4-80GB",
        compute_mode: int = 0,
        memory: tuple[int, int, int] = (1_593_000, 5120, 40 << 20),
    ) -> None:
        self.values = (*capability, 1024, smem, 65_536, 108, compute_mode, *memory)
        self.name = name
        self.devices = devices
        self.cuda = cuda  # the version of CUDA that it supports: 13_000 is 13.0
        self.capturing: set[int] = set()  # the handles of streams that are captured into a graph
        self.fail = fail or {}
        self.contexts = [0]  # the stack of current contexts of the thread; 0 is none
        self.calls: list[str] = []
        self.launches: list[SimpleNamespace] = []
        self.images: list[bytes] = []
        self.allowed_smem: list[int] = []
        self.CUdevice_attribute = SimpleNamespace(
            **{f"CU_DEVICE_ATTRIBUTE_{name}": i for i, name in enumerate(_ATTRIBUTES)}
        )
        for kind, (prefix, names) in _TENSOR_MAP.items():
            values = {f"CU_TENSOR_MAP_{prefix}_{n}": i for i, n in enumerate(names.split())}
            setattr(self, f"CUtensorMap{kind}", SimpleNamespace(**values))
        self.CUresult = Result
        self.encode = _ENCODE(self._encode_tiled)
        self.tensor_maps: list[tuple[Any, ...]] = []
        self.encoded_in = 0  # the context that was current when a map was encoded
        self.CUfunction_attribute = SimpleNamespace(**{_SMEM: _SMEM})
        self.CUlaunchAttributeID = SimpleNamespace(**{OVERLAP: OVERLAP})

    def _done(self, name: str, *values: Any) -> tuple[Any, ...]:
        self.calls.append(name)
        status = Result(self.fail.get(name, 0))
        return (status, *values) if status == 0 else (status, *(None for _ in values))

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        return self._done("cuInit")

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._done("cuDriverGetVersion", self.cuda)

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        return self._done("cuStreamIsCapturing", int(stream in self.capturing))

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._done("cuDeviceGetCount", self.devices)

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        if index >= self.devices:
            return Result.CUDA_ERROR_INVALID_DEVICE, None
        return self._done("cuDeviceGet", index)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        assert device < self.devices
        return self._done("cuDeviceGetName", self.name.encode()[: length - 1].ljust(length, b"\0"))

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        assert device < self.devices
        return self._done("cuDeviceTotalMem", 80 << 30)

    def cuDeviceGetAttribute(self, kind: int, device: int) -> tuple[Any, ...]:
        assert device < self.devices
        return self._done("cuDeviceGetAttribute", self.values[kind])

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return self._done("cuDevicePrimaryCtxRetain", PRIMARY + device)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return self._done("cuCtxGetCurrent", self.contexts[-1])

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.contexts.append(context)
        return self._done("cuCtxPushCurrent")

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return self._done("cuCtxPopCurrent", self.contexts.pop())

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        assert self.contexts[-1], "a module is loaded into the current context"
        self.images.append(image)
        return self._done("cuModuleLoadData", len(self.images))

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:
        return self._done("cuModuleGetFunction", (module, name, self.contexts[-1]))

    def cuFuncSetAttribute(self, function: Any, kind: str, value: int) -> tuple[Any, ...]:
        assert kind == _SMEM
        self.allowed_smem.append(value)
        return self._done("cuFuncSetAttribute")

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> tuple[Any, ...]:
        assert (symbol, flags) == (b"cuTensorMapEncodeTiled", 0)
        address = ctypes.cast(self.encode, ctypes.c_void_p).value if version <= self.cuda else 0
        return self._done("cuGetProcAddress", address, 0)

    def _encode_tiled(self, to: int, *given: Any) -> int:
        """Fills the map with the number of maps so far."""
        kind, rank, address, sizes, strides, box, steps, *rest = given
        names = [names.split() for _, names in _TENSOR_MAP.values()]
        numbers = [sizes[:rank], strides[: rank - 1], box[:rank], steps[:rank]]
        kinds = [known[value] for known, value in zip(names[1:], rest, strict=True)]
        self.tensor_maps.append((names[0][kind], rank, address, *numbers, *kinds))
        self.encoded_in = self.contexts[-1]
        if to % 128:
            return Result.CUDA_ERROR_ILLEGAL_ADDRESS  # an exception would not leave a C function
        ctypes.memset(to, len(self.tensor_maps), 128)
        return int(self._done("cuTensorMapEncodeTiled")[0])

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace())

    CUlaunchConfig = SimpleNamespace

    def cuLaunchKernelEx(
        self, config: Any, function: Any, pointers: int, extra: int
    ) -> tuple[Any, ...]:
        done = self.cuLaunchKernel(function, *sizes_of(config), config.hStream, pointers, extra)
        self.launches[-1].overlaps = True
        return done

    def cuLaunchKernel(self, function: Any, *rest: int) -> tuple[Any, ...]:
        *sizes, smem, stream, pointers, extra = rest
        assert extra == 0
        assert self.contexts[-1] == function[2], "launched in the context it was loaded in"
        first = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))[0]
        self.launches.append(
            SimpleNamespace(
                function=function,
                grid=tuple(sizes[:3]),
                block=tuple(sizes[3:]),
                smem=smem,
                stream=stream,
                params=ctypes.string_at(first, 24),
                overlaps=False,
            )
        )
        return self._done("cuLaunchKernel")

    def cuGetErrorString(self, status: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, b"unknown error"
