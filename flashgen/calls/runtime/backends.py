"""The choice of a call's backend, architecture and device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashgen.calls.launch import device_memory
from flashgen.calls.runtime.arguments.refusals import refuse
from flashgen.calls.trust import Decision, decide
from flashgen.shared import arch as archs
from flashgen.shared import config
from flashgen.shared.arch import DEFAULT_ARCH, GpuMemory

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
        arch_reason: why this architecture.
        order_seed: from which the emulator draws its order, as the backend names it.
        is_final: whether later calls with the same arguments have the same target.
        open_path: whether each pass may take another code path of the GPU: the caller named none.
        recorder: the `flashgen.calls.native.record.CallRecorder` that takes the launches instead.
    """

    backend: str
    arch: str
    device: torch.device
    index: int
    arch_reason: str = ""
    is_final: bool = True
    order_seed: int | None = None
    recorder: Any = None
    open_path: bool = False

    @property
    def sms(self) -> int | None:
        """The number of multiprocessors of the GPU; None where the call runs without a GPU."""
        if self.backend != "gpu":
            return None
        return int(torch.cuda.get_device_properties(self.index).multi_processor_count)

    @property
    def memory(self) -> GpuMemory | None:
        """The memory of the GPU; None where the call runs without a GPU, or it is not reported."""
        return device_memory(self.index) if self.backend == "gpu" else None


def gpu_of(arch: str, *, open_path: bool) -> Target:
    """A target with which a `CallProgram` chooses kernels where there is no such GPU."""
    return Target("gpu", arch, torch.device("cpu"), 0, open_path=open_path)


def target_of(backend: str | None, arch: str | None, device: torch.device) -> Target:
    """The backend, architecture and device of a call with these arguments.

    Raises:
        InputError: there is no such backend or architecture, or the backend does not accept
            tensors of the device.
        PlanError: the generation of the GPU is not supported.
        LaunchError: no code path of the GPU passes its trial.
    """
    chosen = choose(backend, device)
    index = index_of(device) if chosen == "gpu" else 0
    decision = arch_of(arch, chosen, device)
    order = order_of(backend)
    open_path = chosen == "gpu" and arch is None and config.arch() is None
    others = decision.why, decision.is_final, order
    return Target(chosen, decision.arch, device, index, *others, open_path=open_path)


def choose(backend: str | None, device: torch.device) -> str:
    """The backend: the argument, else FLASHGEN_BACKEND, else the default of the device's type.

    Raises:
        InputError: there is no such backend, or it does not accept tensors of this device.
    """
    source, name = "argument backend", backend
    if name is None:
        source, name = "environment, FLASHGEN_BACKEND", config.backend()
    if name is None:
        return DEFAULTS[device.type]
    name_and_seed = config.split_backend(name)
    if name_and_seed is None:
        refuse(
            "there is no such backend",
            source,
            f"given {name!r}; available: {', '.join(config.BACKENDS)}, and emulator:7 with "
            "a number from which the emulator draws its order",
            "backend=None: CUDA tensors run on their GPU, CPU tensors by tiled algorithms",
        )
    name, _ = name_and_seed
    takes = TAKES[name]
    if device.type != takes:
        refuse(
            f"the backend {name!r} takes {takes} tensors",
            source,
            f"q, k and v are on {device}",
            f"q.{takes}(), k.{takes}() and v.{takes}(), or another backend",
        )
    return name


def order_of(backend: str | None) -> int | None:
    """The order_seed in the name of a backend that `choose` accepts, or in FLASHGEN_BACKEND."""
    named = config.split_backend(config.backend() if backend is None else backend)
    return named[1] if named else None


def arch_of(arch: str | None, backend: str, device: torch.device) -> Decision:
    """The architecture: the argument, else FLASHGEN_ARCH, else that of the code path that the GPU
    takes (`flashgen.calls.trust`), else `DEFAULT_ARCH`.

    Raises:
        InputError: the argument is not a string.
        PlanError: the generation of the GPU is not supported.
        LaunchError: no code path of the GPU passes its trial.
    """
    if arch is not None:
        if not isinstance(arch, str):
            refuse(
                "arch is not the name of an architecture",
                "argument arch",
                f"given {arch!r}",
                f"one of {', '.join(archs.known_archs())}, or None",
            )
        return Decision(arch, "argument arch")
    name = config.arch()
    if name is not None:
        return Decision(name, "FLASHGEN_ARCH")
    if backend != "gpu":
        return Decision(DEFAULT_ARCH, f"the default of the backend {backend!r}")
    return decide(index_of(device), capturing=torch.cuda.is_current_stream_capturing)


def index_of(device: torch.device) -> int:
    """The number of a CUDA device."""
    return device.index if device.index is not None else torch.cuda.current_device()
