"""Facts about a GPU that need no context on it: its model, its memory, and the driver's versions.

The driver answers these questions for a device that another process holds alone, too.
"""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.calls.launch.device import attribute, check, cuda_version, real_driver

COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}
"""CUcomputemode (CUDA driver API, "Data types used by CUDA driver")."""

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_NVML_LENGTH = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE of nvml.h


@dataclass(frozen=True)
class Gpu:
    """A GPU and its driver.

    Attributes:
        index: the number of the CUDA device.
        name: the model, such as "NVIDIA H200".
        capability: the compute capability, such as (9, 0).
        sms: the number of multiprocessors.
        memory_bytes: the size of its memory.
        compute_mode: one of `COMPUTE_MODES`.
        cuda: the newest CUDA version that the driver supports, such as (12, 8).
        driver: the version of the driver, such as "580.65.06"; "unknown" where it is not reported.
    """

    index: int
    name: str
    capability: tuple[int, int]
    sms: int
    memory_bytes: int
    compute_mode: str
    cuda: tuple[int, int]
    driver: str

    @property
    def arch(self) -> str:
        """The name of the compute capability, such as "sm_90"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def is_exclusive(self) -> bool:
        """True where only one process at a time can use the device."""
        return self.compute_mode == COMPUTE_MODES[3]


def gpu_facts(index: int = 0, *, driver: Any = None) -> Gpu:
    """The facts of a CUDA device; no context is created.

    Raises:
        LaunchError: there is no driver or no such device.
    """
    driver = driver or real_driver()
    where = f"CUDA device {index}"
    handle = check(driver, driver.cuDeviceGet(index), where)

    def number(name: str) -> int:
        return attribute(driver, handle, name, where)

    name = check(driver, driver.cuDeviceGetName(96, handle), where)
    mode = number("COMPUTE_MODE")
    return Gpu(
        index=index,
        name=name.split(b"\0")[0].decode(errors="replace").strip(),
        capability=(number("COMPUTE_CAPABILITY_MAJOR"), number("COMPUTE_CAPABILITY_MINOR")),
        sms=number("MULTIPROCESSOR_COUNT"),
        memory_bytes=int(check(driver, driver.cuDeviceTotalMem(handle), where)),
        compute_mode=COMPUTE_MODES.get(mode, f"mode {mode}"),
        cuda=cuda_version(driver),
        driver=driver_version(),
    )


def gpus(*, driver: Any = None) -> tuple[Gpu, ...]:
    """The facts of all CUDA devices.

    Raises:
        LaunchError: there is no driver.
    """
    driver = driver or real_driver()
    count = int(check(driver, driver.cuDeviceGetCount(), "cuDeviceGetCount"))
    return tuple(gpu_facts(index, driver=driver) for index in range(count))


def driver_version() -> str:
    """The version of the NVIDIA driver, from its file on Linux or from NVML; or "unknown"."""
    try:
        line = _KERNEL_MODULE.read_text(encoding="ascii", errors="replace")
    except OSError:
        return _version_by_nvml()
    return version_in(line) or "unknown"


def version_in(line: str) -> str:
    """The version in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1.2  Tue ..."; or ""."""
    match = re.search(r"(?:^|\s)(\d+\.[\d.]*\d)(?:\s|$)", line.partition("\n")[0])
    return match[1] if match else ""


def _version_by_nvml() -> str:
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    try:
        nvml = ctypes.CDLL(name)
        buffer = ctypes.create_string_buffer(_NVML_LENGTH)
        if nvml.nvmlInit_v2() == 0:
            status = nvml.nvmlSystemGetDriverVersion(buffer, _NVML_LENGTH)
            nvml.nvmlShutdown()
            if status == 0:
                return buffer.value.decode(errors="replace")
    except (OSError, AttributeError):
        pass
    return "unknown"
