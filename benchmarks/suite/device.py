"""The device of the suite: a GPU, or in a dry run the emulator and torch on the CPU.

Both have the same methods, so that a dry run executes the code of a run on a GPU.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

import torch

from flashgen.shared.arch import paths_of

KINDS = ("gpu", "emulator")
GIB = 1 << 30


class Span(Protocol):
    def ms(self) -> float:
        """Milliseconds from begin to end; waits for the end."""


class _Clocked:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def ms(self) -> float:
        return self._seconds * 1e3


class _Between:
    def __init__(self, begin: Any, end: Any) -> None:
        self._begin, self._end = begin, end

    def ms(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))


class Device:
    """The emulator and the CPU: a host clock, no cache to defeat, no count of memory.

    Attributes:
        kind: "gpu" or "emulator", for records.
        name, driver: name and driver of the hardware, for records.
        archs: the architectures that name flashgen's code paths here, the fastest first.
        arch: the architecture that flashgen compiles for by default.
        l2_bytes, memory_bytes: sizes of L2 and of memory, for timing and the choice of cases.
    """

    kind = "emulator"
    backend = "emulator"
    """Of flashgen's operator."""

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.name = "none (dry run)"
        self.driver = "none"
        self.archs: tuple[str, ...] = ("sm_80",)
        self.l2_bytes = 0
        self.memory_bytes = 4 * GIB

    @property
    def arch(self) -> str:
        return self.archs[-1]

    def synchronize(self) -> None:
        """Waits until all queued work is done; raises its errors."""

    def record(self, run: Callable[[], object]) -> Span:
        """Queues ``run`` between two marks."""
        start = time.perf_counter()
        run()
        return _Clocked(time.perf_counter() - start)

    def captured(self, run: Callable[[], object]) -> Callable[[], object] | None:
        """``run`` as one graph that the device replays without the host; None where there is none.

        Raises:
            RuntimeError: something in ``run`` cannot be captured.
        """
        return None

    def reset_peak(self) -> None:
        """Resets the peak of memory."""

    def peak_bytes(self) -> int:
        """The largest amount of memory that tensors took since `reset_peak`."""
        return 0

    def free(self) -> None:
        """Gives back memory that no tensor uses."""

    def failure(self) -> str | None:
        """The reason why nothing can run here any more, or None."""
        return None


class Gpu(Device):
    """The current CUDA device."""

    kind = "gpu"
    backend = "gpu"

    def __init__(self) -> None:
        super().__init__()
        from flashgen.calls import launch
        from flashgen.calls.launch.gpu import driver_version

        self.torch = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.torch)
        self.name = properties.name
        self.driver = driver_version()
        self.archs = paths_of(launch.device_arch(self.torch.index))
        self.l2_bytes = int(getattr(properties, "L2_cache_size", 64 << 20))
        self.memory_bytes = int(properties.total_memory)

    @property
    def arch(self) -> str:
        """That of flashgen's default code path, which is tried where it has no verdict yet."""
        from flashgen.calls.trust import decide

        return decide(self.torch.index).arch

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def record(self, run: Callable[[], object]) -> Span:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        return _Between(begin, end)

    def captured(self, run: Callable[[], object]) -> Callable[[], object] | None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch))

    def free(self) -> None:
        torch.cuda.empty_cache()

    def failure(self) -> str | None:
        try:
            self.synchronize()
            torch.zeros(1, device=self.torch).add_(1).item()
        except Exception as error:  # a driver that is gone can raise anything
            return first_line(error)
        return None


def missing_gpu() -> str | None:
    """Why there is no GPU to measure on, None when there is one."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    from flashgen.calls import launch

    return launch.available()


def open_device(kind: str) -> Device:
    """The device of a kind.

    Raises:
        RuntimeError: there is no GPU, or the kind is unknown.
    """
    if kind == "emulator":
        return Device()
    if kind != "gpu":
        raise RuntimeError(f"a device is one of {', '.join(KINDS)}; given {kind!r}")
    reason = missing_gpu()
    if reason is not None:
        raise RuntimeError(reason)
    return Gpu()


def first_line(error: BaseException) -> str:
    """An exception in one line for a table."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def versions() -> str:
    """What the numbers were made with, for records."""
    from flashgen.version import __version__

    texts = [f"flashgen {__version__}", f"torch {torch.__version__}"]
    if torch.backends.cudnn.is_available():
        texts.append(f"cudnn {torch.backends.cudnn.version()}")
    for package in ("triton", "cuda-bindings", "nvidia-cuda-nvrtc"):
        try:
            texts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return "; ".join([*texts, f"python {platform.python_version()}"])
