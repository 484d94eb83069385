"""A CUDA driver in C for calls from C++ and from Python, and the launches that it records."""

from __future__ import annotations

import ctypes
import enum
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls import launch
from flashgen.calls.launch.params import field_bytes
from flashgen.calls.native import build, calls
from flashgen.calls.ops import registration
from flashgen.calls.runtime import backends, bound_kernel, prepared_call
from flashgen.calls.runtime.kernel_arguments import KernelArguments
from flashgen.calls.trust import Decision
from tests.support.fake_driver import FakeDriver, sizes_of
from tests.support.masks import causal

CONTEXT, STREAM = 0xC0, 77
KEPT = Path(__file__).resolve().parents[2] / ".pytest_cache" / "native"
_SOURCE = Path(__file__).with_suffix(".c")


CAUSAL = fg.AttentionSpec(mask_mod=causal, head_dim=64, name="native_causal")


class Record(ctypes.Structure):
    """`launch` of native_driver.c."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("function", "stream", "nanoseconds", "context")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("overlaps", ctypes.c_uint32),
        ("params", ctypes.c_ubyte * 1024),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701


def native_library() -> Any:
    """The native part, compiled once for all test runs with this source."""
    flags = hashlib.sha256(" ".join(build.flags()).encode()).hexdigest()[:8]
    file = KEPT / f"{build._NAME}.{build.key()}.{flags}.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "path", lambda: file)
        if not file.exists():
            if shutil.which("c++") is None and not os.environ.get("CXX"):
                pytest.skip("there is no C++ compiler")
            build.build()
        return build.load()


def driver_library() -> Any:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler: cc")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    file = KEPT / f"driver.{digest}.so"
    if not file.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        made = file.with_suffix(f".{os.getpid()}")
        command = (compiler, "-O1", "-shared", "-fPIC", str(_SOURCE), "-o", str(made), "-lpthread")
        subprocess.run(command, check=True)
        os.replace(made, file)
    return ctypes.CDLL(str(file))


@dataclass(frozen=True)
class Launched:
    """A launch, with the names of tensors in place of addresses."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem: int
    stream: int
    context: int
    overlaps: bool
    fields: tuple[tuple[str, Any], ...]


class NativeDriver:
    """The driver as `cuda.bindings.driver`, and what it has recorded."""

    def __init__(self) -> None:
        self.c = driver_library()
        self.arguments: dict[str, KernelArguments] = {}  # of the last call with this binary
        self.binaries: dict[int, Any] = {}
        self._handles: dict[str, int] = {}
        self._of_passes: list[Launched] = []
        known = FakeDriver()
        for kind in ("DataType", "Interleave", "Swizzle", "L2promotion", "FloatOOBfill"):
            setattr(self, f"CUtensorMap{kind}", getattr(known, f"CUtensorMap{kind}"))
        for name in ("function_attribute", "launchAttributeID", "launchAttribute", "launchConfig"):
            setattr(self, f"CU{name}", getattr(known, f"CU{name}"))
        self.CUresult = Result
        self.encode = ctypes.cast(self.c.cuTensorMapEncodeTiled, ctypes.c_void_p).value

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        found = ctypes.c_void_p()
        return Result(self.c.cuCtxGetCurrent(ctypes.byref(found))), found.value or 0

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:
        return (Result(self.c.cuCtxPushCurrent(ctypes.c_void_p(context))),)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        found = ctypes.c_void_p()
        return Result(self.c.cuCtxPopCurrent(ctypes.byref(found))), found.value or 0

    def cuFuncSetAttribute(self, *_: Any) -> tuple[int]:
        return (Result(0),)

    def cuGetProcAddress(self, *_: Any) -> tuple[int, int, int]:
        return Result(0), self.encode, 0

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return Result(0), 13000

    def cuLaunchKernel(self, function: int, *rest: int, overlap: int | None = None) -> tuple[int]:
        *sizes, stream, params, extra = rest
        config = _Config((ctypes.c_uint * 7)(*sizes), stream, overlap, overlap is not None)
        pointers = (ctypes.c_void_p(x) for x in (function, params, extra))
        return (Result(self.c.cuLaunchKernelEx(ctypes.byref(config), *pointers)),)

    def cuLaunchKernelEx(self, config: Any, function: int, *pointers: int) -> tuple[int]:
        attribute = (ctypes.c_int * 18)(6, 0, 1)
        sizes = *sizes_of(config), config.hStream
        return self.cuLaunchKernel(function, *sizes, *pointers, overlap=ctypes.addressof(attribute))

    def functions(self) -> tuple[int, ...]:
        names = ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent")
        every = (*names, "cuTensorMapEncodeTiled", "fake_stream")
        return tuple(ctypes.cast(self.c[name], ctypes.c_void_p).value or 0 for name in every)

    def load(self, binary: Any, index: int = 0, *, stream: int | None = None) -> launch.Kernel:
        handle = self._handles.get(binary.key)
        if handle is None:
            handle = self.c.fake_function(binary.resources.param_bytes)
            self._handles[binary.key] = handle
            self.binaries[handle] = binary
        return launch.Kernel(binary, self.device(index), self, None, handle)

    def device(self, index: int, driver: Any = None) -> launch.device.Device:
        return launch.device.Device(index, CONTEXT, (9, 0), 1024, 232_448, 65_536)

    def stream(self, index: int) -> int:
        """The handle of the current stream, of which each thread has its own."""
        self.c.fake_stream.restype = ctypes.c_void_p
        return int(self.c.fake_stream(index))

    def reset(self) -> None:
        self._of_passes = []
        self.c.fake_reset()

    def end_pass(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keeps the launches until now, whose addresses are those of tensors that still live: a
        later pass may get the memory of those that have been freed.

        Args:
            tensors: the tensors that have names.
        """
        kept = self.launched({tensor.data_ptr(): name for name, tensor in tensors.items()})
        self.reset()
        self._of_passes = kept

    @property
    def records(self) -> list[Record]:
        count = ctypes.c_int.in_dll(self.c, "fake_count").value
        return list((Record * 4096).in_dll(self.c, "fake_launches")[:count])

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.c, name).value = value

    def launched(self, names: Mapping[int, str]) -> list[Launched]:
        """The launches since `reset`.

        Args:
            names: the names of addresses; others are numbered in the order of their occurrence,
                those of each pass by themselves.
        """
        known = {0: "null", **names}

        def named(address: int) -> str:
            return known.setdefault(address, f"#{len(known) - len(names)}")

        found = [*self._of_passes]
        for record in self.records:
            binary = self.binaries[record.function]
            packed, fields, at = bytes(record.params[: record.bytes]), [], 0
            for param in self.arguments[binary.key].params:
                width = field_bytes(param.ctype)
                at += -at % width
                value: Any = packed[at : at + width]
                if param.ctype == "pointer":
                    value = named(int.from_bytes(value, "little"))
                elif param.ctype == "tensormap":
                    value = named(int.from_bytes(value[:8], "little")), value[8:]
                fields.append((param.name, value))
                at += width
            sizes = tuple(record.grid), tuple(record.block), record.smem
            where = record.stream, record.context, bool(record.overlaps)
            found.append(Launched(binary.kernel, *sizes, *where, tuple(fields)))
        return found


@contextmanager
def native_gpu(arch: str = "sm_80", *, library: Any = None) -> Iterator[NativeDriver]:
    """A GPU of this architecture that CPU tensors are on, and on which calls need no Python.

    Args:
        library: the native part; None for that of the tests.
    """
    driver = NativeDriver()
    library = library or native_library()
    made = bound_kernel.BoundKernel.__init__

    def noted(self: Any, kernel: Any, arguments: Any, *rest: Any, **more: Any) -> None:
        driver.arguments[kernel.binary.key] = arguments
        made(self, kernel, arguments, *rest, **more)

    properties = SimpleNamespace(multi_processor_count=132)
    _forget_calls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.TAKES, "gpu", "cpu")
        patch.setitem(backends.DEFAULTS, "cpu", "gpu")
        patch.setattr(backends, "device_memory", lambda index: None)
        patch.setattr(backends, "index_of", lambda device: 0)
        patch.setattr(backends, "decide", lambda index, capturing: Decision(arch, "a stub"))
        patch.setattr(bound_kernel, "current_stream", driver.stream)
        patch.setattr(bound_kernel.BoundKernel, "__init__", noted)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        patch.setattr(launch, "load", driver.load)
        patch.setattr(launch.params, "real_driver", lambda: driver)
        patch.setattr(launch.params, "device_facts", driver.device)
        patch.setattr(calls, "driver_functions", driver.functions)
        patch.setattr(build, "load", lambda: library)
        # On a GPU the host does not read the contents of tensors.
        patch.setattr(prepared_call, "check_contents", lambda *_: None)
        patch.setattr(prepared_call.PreparedCall, "_check_reads", lambda *_: None)
        yield driver
    _forget_calls()


def _forget_calls() -> None:
    """Prepared calls hold kernels that are loaded by one driver."""
    for operator in registration._operators.values():
        operator.native = None
        operator._forwards.clear()
        operator._backwards.clear()
        operator._last = None, None
