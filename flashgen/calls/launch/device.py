"""The CUDA driver and its devices: availability, primary contexts, limits and errors.

All driver calls go through ``cuda.bindings.driver``. The first call is made after `available` has
found the driver's library: without a driver, some of the CUDA packages for Python fail in ways that
make later calls hang.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flashgen.shared.arch import GpuMemory
from flashgen.shared.errors import LaunchError

_EMULATE = 'run the same call with backend="emulator", which names the instruction and the line'
_RESTART = "; the process cannot use this GPU any more and has to be restarted"

FIRST_DRIVERS = {12: "525", 13: "580"}
"""The first driver for Linux of each major version of CUDA."""

_NEWER = f"install a driver for CUDA 13 ({FIRST_DRIVERS[13]} or newer)"
WARM_UP = "call the operator once with the same shapes before the capture: that loads its kernels"
_BROKEN_CAPTURE = "capture again; " + WARM_UP

# For each number of a CUresult, its meaning and the way out.
_MEANINGS: dict[int, tuple[str, str]] = {
    1: ("the driver calls an argument invalid", "report this as a bug of flashgen"),
    2: ("the device is out of memory", "free tensors, or use a smaller batch"),
    3: ("the driver has not been started", "call flashgen.calls.launch.available() first"),
    4: ("the driver is shutting down", "do not launch while the process ends"),
    34: ("the driver's library is a stub", "install the NVIDIA driver"),
    100: ("the NVIDIA driver sees no device", 'use backend="emulator"'),
    101: ("there is no device of this number", "choose a device that exists"),
    200: ("the cubin is damaged", "run `flashgen cache clear` and build again"),
    201: ("there is no valid context", "do not reset the device while flashgen uses it"),
    209: ("the cubin is not for this device", "build for the architecture of device_arch()"),
    218: ("the driver does not accept the code", _NEWER),
    222: ("the code is newer than the driver", _NEWER),
    400: ("the stream belongs to another device or is gone", "use a stream of the kernel's device"),
    500: ("the binary has no kernel of this name", "build it again"),
    700: ("a kernel used memory outside its buffers" + _RESTART, _EMULATE),
    701: ("the launch exceeds the registers or threads of the device", "plan for this device"),
    702: ("a kernel ran longer than the display's time limit", "use a smaller problem"),
    715: ("a kernel used an instruction that the device lacks" + _RESTART, _EMULATE),
    716: ("a kernel used a misaligned address" + _RESTART, _EMULATE),
    717: ("a kernel used an address of the wrong kind of memory" + _RESTART, _EMULATE),
    718: ("a kernel's program counter is invalid" + _RESTART, _EMULATE),
    719: ("a kernel failed while running" + _RESTART, _EMULATE),
    803: ("the driver's library and kernel module differ in version", "restart the machine"),
    804: (
        "this driver does not support this version of CUDA",
        f"install a driver of {FIRST_DRIVERS[13]} or newer",
    ),
    900: ("the driver refuses this call while a CUDA graph is being captured", WARM_UP),
    901: ("an earlier error has invalidated the capture of a CUDA graph", _BROKEN_CAPTURE),
    905: ("the capture of a CUDA graph depends on work outside of it", _BROKEN_CAPTURE),
    906: ("the default stream waits for a stream that is being captured", "use another stream"),
    908: ("another thread began this capture of a CUDA graph", "launch from the capturing thread"),
}


def loads(have: tuple[int, int], needed: int) -> bool:
    """Whether a driver of CUDA ``have`` loads cubins of CUDA ``needed``, a major version.

    Within a major version, a driver loads the cubins of every minor version (CUDA Compatibility,
    minor version compatibility).
    """
    return have[0] >= needed


def fitting_driver(needed: int) -> str:
    """The way out where a driver does not load cubins of CUDA ``needed``."""
    first = FIRST_DRIVERS.get(needed)
    return f"install a driver {f'of {first} or newer' if first else f'for CUDA {needed}'}"


def fitting_versions(needed: int, have: tuple[int, int]) -> str:
    """The way out: a driver new enough for the compiler, or a compiler old enough for the driver.

    Args:
        needed: the major CUDA version of the compiler.
        have: the CUDA version of the driver.
    """
    older = ', or NVRTC of CUDA 12: pip install "flashgen[cuda12]"' if have[0] == 12 else ""
    return fitting_driver(needed) + older


def plain(driver: Any, status: Any) -> tuple[str, str]:
    """The description of a CUresult, and its name and number in the driver."""
    name = f"{getattr(status, 'name', 'CUresult')}, code {int(status)}"
    meaning = _MEANINGS.get(int(status))
    if meaning is not None:
        return meaning[0], name
    described, text = driver.cuGetErrorString(status)
    return text.decode() if int(described) == 0 and text else "an error of the driver", name


def check(driver: Any, result: tuple[Any, ...], where: str) -> Any:
    """The first value of a driver call, which returns a status before its values; None if none.

    Raises:
        LaunchError: the status is not success.
    """
    status, *values = result
    if int(status) != 0:
        message, name = plain(driver, status)
        _, way_out = _MEANINGS.get(int(status), ("", _EMULATE))
        raise LaunchError(message, where=where, numbers=name, way_out=way_out)
    return values[0] if values else None


@functools.lru_cache(maxsize=1)
def available() -> str | None:
    """The reason why kernels cannot run on a GPU, in words; None when they can.

    The driver's library is looked up before the first call into it, so that a machine without a
    driver returns at once. The result is cached for the life of the process.
    """
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(library)
    except OSError:
        return f"no NVIDIA driver is installed ({library} cannot be loaded)"
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"the package cuda-bindings is missing ({error})"
    return first_device(driver)


def first_device(driver: Any) -> str | None:
    """Initialises the driver. Returns the reason why there is no device; None if there is one."""
    (status,), count = driver.cuInit(0), 0
    if int(status) == 0:
        status, count = driver.cuDeviceGetCount()
    if int(status) != 0:
        words, name = plain(driver, status)
        return f"{words} ({name})"
    return None if count else "the NVIDIA driver sees no device"


def real_driver() -> Any:
    reason = available()
    if reason is not None:
        raise LaunchError(
            "no kernel can be launched on this machine",
            where="CUDA driver",
            numbers=reason,
            way_out='use backend="emulator" (or FLASHGEN_BACKEND=emulator), which needs no GPU',
        )
    from cuda.bindings import driver

    return driver


def device_arch(device: int = 0, *, driver: Any = None) -> str:
    """The architecture of a device, such as "sm_90", without the "a" of Hopper's instructions.

    Raises:
        LaunchError: there is no driver or no such device.
    """
    driver = driver or real_driver()
    where = f"CUDA device {device}"
    major, minor = _capability(driver, check(driver, driver.cuDeviceGet(device), where), where)
    return f"sm_{major}{minor}"


def cuda_version(driver: Any) -> tuple[int, int]:
    """The newest CUDA version that the driver supports, such as (12, 8).

    Raises:
        LaunchError: the driver does not report it.
    """
    number = int(check(driver, driver.cuDriverGetVersion(), "cuDriverGetVersion"))
    return number // 1000, number % 1000 // 10


def attribute(driver: Any, handle: Any, name: str, where: str) -> int:
    """The value of CU_DEVICE_ATTRIBUTE_<name> of a device."""
    kind = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(driver, driver.cuDeviceGetAttribute(kind, handle), where))


def _capability(driver: Any, handle: Any, where: str) -> tuple[int, int]:
    return (
        attribute(driver, handle, "COMPUTE_CAPABILITY_MAJOR", where),
        attribute(driver, handle, "COMPUTE_CAPABILITY_MINOR", where),
    )


def device_memory(device: int = 0, *, driver: Any = None) -> GpuMemory | None:
    """The memory of a device, which moves two bits in a clock on each line; None where the driver
    does not report its clock or its width.

    Raises:
        LaunchError: there is no driver or no such device.
    """
    driver = driver or real_driver()
    where = f"CUDA device {device}"
    handle = check(driver, driver.cuDeviceGet(device), where)
    khz, bits, l2_bytes = (
        attribute(driver, handle, name, where)
        for name in ("MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH", "L2_CACHE_SIZE")
    )
    return GpuMemory(l2_bytes, 2 * khz * 1000 * bits / 8) if khz * bits * l2_bytes else None


@dataclass(frozen=True)
class Device:
    """A device's primary context and the limits that launches are checked against."""

    index: int
    context: Any
    capability: tuple[int, int]
    max_threads: int  # threads per block
    max_smem_bytes: int  # bytes per block, static and dynamic together
    registers: int  # registers per block


_devices: dict[tuple[Any, int], Device] = {}
guard = threading.RLock()


def device_facts(index: int, driver: Any) -> Device:
    """A device's limits and its primary context, which is created if it does not exist.

    Raises:
        LaunchError: there is no such device, or the driver refuses a context.
    """
    with guard:
        device = _devices.get((driver, index))
        if device is not None:
            return device
        where = f"CUDA device {index}"
        handle = check(driver, driver.cuDeviceGet(index), where)
        device = Device(
            index=index,
            # Retained for the life of the process: kernels loaded in it stay valid.
            context=check(driver, driver.cuDevicePrimaryCtxRetain(handle), where),
            capability=_capability(driver, handle, where),
            max_threads=attribute(driver, handle, "MAX_THREADS_PER_BLOCK", where),
            max_smem_bytes=attribute(driver, handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", where),
            registers=attribute(driver, handle, "MAX_REGISTERS_PER_BLOCK", where),
        )
        _devices[driver, index] = device
        return device


def is_current(device: Device, driver: Any) -> bool:
    """Whether the device's primary context is current in this thread."""
    return int(check(driver, driver.cuCtxGetCurrent(), "cuCtxGetCurrent")) == int(device.context)


@contextmanager
def current(device: Device, driver: Any) -> Iterator[None]:
    """Makes the device's primary context current in this thread, then restores the previous one."""
    if is_current(device, driver):
        yield
        return
    check(driver, driver.cuCtxPushCurrent(device.context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        check(driver, driver.cuCtxPopCurrent(), "cuCtxPopCurrent")
