"""The choice of a call's backend, architecture and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen import arch as archs
from flashgen import config
from flashgen.errors import InputError

DEFAULT_ARCH = "sm_80"
"""The architecture of calls without a GPU: the code path that every architecture has."""

TAKES = {"gpu": "cuda", "emulator": "cpu", "tiled": "cpu"}
"""The type of the devices whose tensors a backend accepts."""

DEFAULTS = {"cuda": "gpu", "cpu": "tiled"}
"""The default backend for tensors on a type of device."""


@dataclass(frozen=True, slots=True)
class Target:
    """The backend, architecture and device of a call.

    Attributes:
        backend: "gpu", "emulator" or "tiled".
        arch: the architecture that kernels are compiled for, or whose tiles the CPU path uses.
        device: the device of the operands.
        index: the number of the GPU; 0 where there is none.
    """

    backend: str
    arch: str
    device: torch.device
    index: int

    @property
    def sms(self) -> int | None:
        """The number of multiprocessors of the GPU; None where the call runs without a GPU."""
        if self.backend != "gpu":
            return None
        return int(torch.cuda.get_device_properties(self.index).multi_processor_count)


def target_of(backend: str | None, arch: str | None, device: torch.device) -> Target:
    """The backend, architecture and device of a call with these arguments.

    Raises:
        InputError: there is no such backend or architecture, or the backend does not accept
            tensors of the device.
        PlanError: the generation of the GPU is not supported.
    """
    chosen = choose(backend, device)
    index = index_of(device) if chosen == "gpu" else 0
    return Target(chosen, arch_of(arch, chosen, device), device, index)


def choose(given: str | None, device: torch.device) -> str:
    """The backend: the argument, else FLASHGEN_BACKEND, else the default of the device's type.

    Raises:
        InputError: there is no such backend, or it does not accept tensors of this device.
    """
    source, name = "argument backend", given
    if name is None:
        source, name = "environment, FLASHGEN_BACKEND", config.backend()
    if name is None:
        return DEFAULTS[device.type]
    if name not in config.BACKENDS:
        raise InputError(
            "there is no such backend",
            where=source,
            numbers=f"given {name!r}; available: {', '.join(config.BACKENDS)}",
            way_out="backend=None: CUDA tensors run on their GPU, CPU tensors by tiled algorithms",
        )
    takes = TAKES[name]
    if device.type != takes:
        raise InputError(
            f"the backend {name!r} takes {takes} tensors",
            where=source,
            numbers=f"q, k and v are on {device}",
            way_out=f"q.{takes}(), k.{takes}() and v.{takes}(), or another backend",
        )
    return name


def arch_of(given: str | None, backend: str, device: torch.device) -> str:
    """The architecture: the argument, else FLASHGEN_ARCH, else the GPU's, else `DEFAULT_ARCH`.

    Raises:
        InputError: the argument is not a string.
        PlanError: the generation of the GPU is not supported.
    """
    if given is not None and not isinstance(given, str):
        raise InputError(
            "arch is not the name of an architecture",
            where="argument arch",
            numbers=f"given {given!r}",
            way_out=f"one of {', '.join(archs.known())}, or None",
        )
    name = given or config.arch()
    if name is not None:
        return name
    if backend != "gpu":
        return DEFAULT_ARCH
    from flashgen import launch

    return nearest_arch(launch.device_arch(index_of(device)))


def nearest_arch(device: str) -> str:
    """The newest supported architecture whose code runs on ``device``.

    A cubin runs on devices of its own major version from its minor version up.

    Raises:
        PlanError: there is no such architecture.
    """
    major, minor = device[:-1], int(device[-1])
    fitting = [name for name in archs.known() if name[:-1] == major and int(name[-1]) <= minor]
    return archs.facts(fitting[-1] if fitting else device).name


def index_of(device: torch.device) -> int:
    """The number of a CUDA device."""
    return device.index if device.index is not None else torch.cuda.current_device()
