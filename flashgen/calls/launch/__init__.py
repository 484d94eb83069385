"""Launches on a GPU: loads a cubin, packs its parameters, launches it on a stream.

All arguments are integers: device pointers, strides, a stream handle. Kernels run in the device's
primary context, which torch uses too, so that torch's pointers and streams are valid::

    reason = available()                      # None when there is a GPU
    kernel = load(binary, device=0)
    launch = Launch(kernel, (tiles, 1, 1), (128, 1, 1), smem)
    launch(pack(source.params, values), stream)

Functions that call the driver have an argument ``driver``; by default it is the real driver.
"""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import dataclass, field
from typing import Any

from flashgen.calls.launch.device import (
    WARM_UP,
    Device,
    available,
    check,
    cuda_version,
    current,
    device_arch,
    device_facts,
    device_memory,
    fitting_driver,
    fitting_versions,
    guard,
    loads,
    real_driver,
)
from flashgen.calls.launch.gpu import Gpu, gpu_facts, gpus
from flashgen.calls.launch.params import encode, pack
from flashgen.kernels.compile import Binary
from flashgen.shared.errors import LaunchError

__all__ = [
    "Gpu",
    "Kernel",
    "Launch",
    "available",
    "device_arch",
    "device_memory",
    "encode",
    "fitting_driver",
    "fitting_versions",
    "gpu_facts",
    "gpus",
    "load",
    "loads",
    "pack",
]

_GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
_BLOCK_LIMITS = (1024, 1024, 64)
_CAPTURES_OVERLAP = (12, 3)  # CUDA graphs have edges between overlapping launches from then on


@dataclass(eq=False)
class Kernel:
    """A kernel loaded on a device, ready to launch. Made by `load`."""

    binary: Binary
    device: Device
    driver: Any = field(repr=False)
    module: Any = field(repr=False)
    function: Any = field(repr=False)
    dynamic_smem_bytes: int = 0  # the function's current limit

    @property
    def name(self) -> str:
        return self.binary.kernel


_kernels: dict[tuple[Any, int, str], Kernel] = {}


def load(
    binary: Binary, device: int = 0, *, stream: int | None = None, driver: Any = None
) -> Kernel:
    """Loads a binary's kernel on a device; the same binary is loaded once per device.

    The cubin is loaded instead of the PTX, because a driver runs cubins of its CUDA major version,
    but rejects PTX of a newer compiler.

    Args:
        binary: the compiled kernel.
        device: the number of the CUDA device.
        stream: the handle of the stream that the kernel will be launched on; None if not known.
        driver: replaces ``cuda.bindings.driver``.

    Raises:
        LaunchError: there is no driver or device, the driver is older than the compiler, the binary
            is for another architecture, or the kernel is not loaded yet and ``stream`` is being
            captured into a CUDA graph, during which the driver does not load modules.
    """
    driver = driver or real_driver()
    facts = device_facts(device, driver)
    key = (driver, device, binary.key)
    with guard:
        kernel = _kernels.get(key)
        if kernel is not None:
            return kernel
        where = f"loading {binary.kernel} on CUDA device {device}"
        _check_arch(binary, facts)
        _check_version(binary, driver, where)
        with current(facts, driver):
            if stream is not None and int(check(driver, driver.cuStreamIsCapturing(stream), where)):
                raise LaunchError(
                    "a kernel cannot be loaded while a CUDA graph is being captured",
                    where=where,
                    numbers="its first launch would be in the capture",
                    way_out=WARM_UP,
                )
            module = check(driver, driver.cuModuleLoadData(binary.cubin), where)
            name = binary.kernel.encode()
            function = check(driver, driver.cuModuleGetFunction(module, name), where)
        _kernels[key] = Kernel(binary, facts, driver, module, function)
        return _kernels[key]


def _check_arch(binary: Binary, device: Device) -> None:
    """Checks that a device runs a cubin: same major version, no lower minor; "a": same version."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", binary.arch)
    assert match is not None, "compile() checks the form of the architecture"
    major, minor, exact = int(match[1]), int(match[2]), match[3] == "a"
    have = device.capability
    fits = have == (major, minor) if exact else have[0] == major and have[1] >= minor
    if not fits:
        raise LaunchError(
            f"the binary of {binary.kernel} is for another architecture",
            where=f"CUDA device {device.index}",
            numbers=f"binary for {binary.arch}; the device is sm_{have[0]}{have[1]}",
            way_out=f'build the spec with arch="sm_{have[0]}{have[1]}"',
        )


def _check_version(binary: Binary, driver: Any, where: str) -> None:
    """Checks that a driver is not older than the compiler of a cubin, by their major versions."""
    needed, have = binary.cuda, cuda_version(driver)
    if not loads(have, needed):
        raise LaunchError(
            "the driver is older than the compiler of the kernel",
            where=where,
            numbers=f"compiled for CUDA {needed}; the driver supports CUDA {have[0]}.{have[1]}",
            way_out=fitting_versions(needed, have),
        )


class Launch:
    """A launch of a kernel whose limits are checked: only its parameters and its stream vary.

    Args:
        kernel: the result of `load`.
        grid: blocks along x, y, z; each at least 1.
        block: threads along x, y, z.
        smem: dynamic shared memory per block, bytes.
        overlaps: whether the kernel may start while the one before it on the stream still runs, if
            that lets it, and waits for it itself (programmatic dependent launch).

    Raises:
        LaunchError: the launch exceeds a limit of the device or of the kernel.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        smem: int,
        *,
        overlaps: bool = False,
    ) -> None:
        _check_limits(kernel, grid, block, smem)
        self.kernel = kernel
        self.grid, self.block, self.smem = grid, block, smem
        self._sizes = (*grid, *block, smem)
        self._param_bytes = kernel.binary.resources.param_bytes
        self._context = int(kernel.device.context)
        self.overlaps = overlaps and cuda_version(kernel.driver) >= _CAPTURES_OVERLAP
        self._config: tuple[int, Any] = -1, None  # the last stream, and the configuration for it

    def __call__(self, packed: bytes, stream: int = 0) -> None:
        """Queues the launch on a stream and returns at once.

        Args:
            packed: the parameter structure, as bytes from `pack`.
            stream: the CUstream's handle as an integer, such as torch's
                ``torch.cuda.current_stream().cuda_stream``; 0 is the default stream.

        Raises:
            LaunchError: the structure has another size, or the driver refuses the launch. Errors of
                the running kernel appear in a later call, like all asynchronous CUDA errors.
        """
        kernel = self.kernel
        if len(packed) != self._param_bytes:
            raise _refused(
                kernel,
                "the packed parameters do not have the size of the kernel's structure",
                f"{len(packed)} B packed; struct Params has {self._param_bytes} B",
                "pack the values with Source.params of the source that was compiled",
            )
        status, context = kernel.driver.cuCtxGetCurrent()
        if not status and int(context) == self._context:
            self._queue(packed, stream)
        else:
            with current(kernel.device, kernel.driver):
                self._queue(packed, stream)

    def _queue(self, packed: bytes, stream: int) -> None:
        kernel, driver, smem = self.kernel, self.kernel.driver, self.smem
        if smem > kernel.dynamic_smem_bytes:
            kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver, driver.cuFuncSetAttribute(kernel.function, kind, smem), str(self))
            kernel.dynamic_smem_bytes = smem
        structure = ctypes.c_char_p(packed)  # the driver takes the address of a pointer to it
        pointers = ctypes.addressof(structure)
        if self.overlaps:
            config = self._config_on(stream)
            result = driver.cuLaunchKernelEx(config, kernel.function, pointers, 0)
        else:
            result = driver.cuLaunchKernel(kernel.function, *self._sizes, stream, pointers, 0)
        if result[0]:
            check(driver, result, str(self))

    def _config_on(self, stream: int) -> Any:
        """The configuration of an overlapping launch, which nothing changes: threads share it."""
        last_stream, config = self._config
        if last_stream != stream:
            driver = self.kernel.driver
            overlap = driver.CUlaunchAttribute()
            kinds = driver.CUlaunchAttributeID
            overlap.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = self.grid
            config.blockDimX, config.blockDimY, config.blockDimZ = self.block
            config.sharedMemBytes, config.hStream = self.smem, stream
            config.attrs, config.numAttrs = [overlap], 1
            self._config = stream, config
        return config

    def __str__(self) -> str:
        sizes = f"grid {self.grid}, block {self.block}, {self.smem:,} B of shared memory"
        return f"launch of {self.kernel.name}, {sizes}"


def _check_limits(
    kernel: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], smem: int
) -> None:
    device, needs = kernel.device, kernel.binary.resources
    for label, sizes, limits in (("grid", grid, _GRID_LIMITS), ("block", block, _BLOCK_LIMITS)):
        for axis, size, limit in zip("xyz", sizes, limits, strict=True):
            if not 1 <= size <= limit:
                raise _refused(
                    kernel,
                    f"the {label} is {'empty' if size < 1 else 'too large'} along {axis}",
                    f"{label} {tuple(sizes)}; {axis} can be 1 to {limit:,}",
                    "skip the launch when a size is 0"
                    if size < 1
                    else "split the batch or the heads over several calls",
                )
    threads = math.prod(block)
    most = min(device.max_threads, needs.max_threads)
    if threads > most:
        raise _refused(
            kernel,
            "the block has too many threads",
            f"{threads:,} threads; the kernel was compiled for {needs.max_threads:,} at most, the "
            f"device allows {device.max_threads:,}",
            "launch with the threads of the plan that the kernel was made for",
        )
    if threads * needs.registers > device.registers:
        raise _refused(
            kernel,
            "the block needs more registers than a multiprocessor has",
            f"{threads:,} threads * {needs.registers} registers = {threads * needs.registers:,}; "
            f"the device has {device.registers:,}",
            "plan for this device's architecture",
        )
    total = smem + needs.static_smem_bytes
    if smem < 0 or total > device.max_smem_bytes:
        raise _refused(
            kernel,
            "the block needs more shared memory than the device has",
            f"{smem:,} B dynamic + {needs.static_smem_bytes:,} B static; the device allows "
            f"{device.max_smem_bytes:,} B",
            "plan for this device's architecture",
        )


def _refused(kernel: Kernel, what: str, numbers: str, way_out: str) -> LaunchError:
    where = f"launch of {kernel.name} on CUDA device {kernel.device.index}"
    return LaunchError(what, where=where, numbers=numbers, way_out=way_out)
