"""Where a kernel runs: a GPU through the driver, or the emulator. Tensors become pointers here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flashgen import arch as archs
from flashgen import config
from flashgen.errors import InputError
from flashgen.ops.arguments import Arguments
from flashgen.pipeline import Build
from flashgen.plan.jobs import Blocks

Tensor = torch.Tensor
Grid = tuple[int, int, int]
Tensors = Mapping[str, Tensor | None]

DEFAULT_ARCH = "sm_80"
"""What runs without a GPU when nobody says otherwise: the code path that works everywhere."""

TAKES = {"gpu": "cuda", "emulator": "cpu", "tiled": "cpu"}
"""The kind of device whose tensors a backend takes."""

DEFAULTS = {"cuda": "gpu", "cpu": "tiled"}
"""The backend for tensors of a kind of device when nobody asks for another."""


def choose(asked: str | None, device: torch.device) -> str:
    """The backend of a call: as asked, else FLASHGEN_BACKEND, else by where the tensors are.

    Raises:
        InputError: the backend does not exist or does not take tensors of this device.
    """
    source, name = "argument backend", asked
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


def target_of(asked: str | None, backend: str, device: torch.device) -> str:
    """The architecture of a call: as asked, else FLASHGEN_ARCH, else the GPU's or `DEFAULT_ARCH`.

    Raises:
        InputError: what was asked for is no text.
        PlanError: the GPU is of a generation that flashgen has no facts about.
    """
    if asked is not None and not isinstance(asked, str):
        raise InputError(
            "arch is not the name of an architecture",
            where="argument arch",
            numbers=f"given {asked!r}",
            way_out=f"one of {', '.join(archs.known())}, or None",
        )
    target = asked or config.arch()
    if target is not None:
        return target
    if backend != "gpu":
        return DEFAULT_ARCH
    from flashgen import launch

    return nearest_arch(launch.device_arch(index_of(device)))


def nearest_arch(device: str) -> str:
    """The newest architecture known to flashgen whose code runs on ``device``, itself if known.

    A cubin runs on devices of its own major version from its minor version up.

    Raises:
        PlanError: there is none.
    """
    major, minor = device[:-1], int(device[-1])
    fitting = [name for name in archs.known() if name[:-1] == major and int(name[-1]) <= minor]
    return archs.facts(fitting[-1] if fitting else device).name


def sms_of(backend: str, index: int) -> int | None:
    """Multiprocessors of the GPU that a call runs on; None where it runs without one."""
    if backend != "gpu":
        return None
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def index_of(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


def stride_obstacle(name: str, tensor: Tensor) -> str | None:
    """Why the strides of a tensor keep a kernel from moving 16 bytes at once; None if they do not.

    An axis of length 1 is never stepped along, so its stride does not count.
    """
    size = tensor.element_size()
    for axis, label in enumerate(("batch", "head", "row")):
        step = tensor.stride(axis) * size
        if tensor.shape[axis] > 1 and step % 16:
            return f"the {label} stride of {name} is {step} B, no multiple of 16 B"
    return None


def row_obstacle(name: str, tensor: Tensor) -> str | None:
    """Why kernels cannot read a tensor with its strides, None if they can.

    q, k and v have contiguous rows less than 2^31 bytes apart: that was checked.
    """
    if tensor.numel() and tensor.stride(3) != 1:
        return f"the last dimension of {name} is not contiguous"
    row_bytes = tensor.stride(2) * tensor.element_size()
    if tensor.shape[2] > 1 and row_bytes > _INT32_MAX:
        return f"the rows of {name} are {row_bytes:,} B apart; at most {_INT32_MAX:,} B"
    return stride_obstacle(name, tensor)


def base_obstacle(name: str, tensor: Tensor) -> str | None:
    """The same for the address of the first element."""
    offset = tensor.data_ptr() % 16
    return f"{name} begins {offset} B past a multiple of 16 B" if offset else None


_INT32_MAX = 2**31 - 1
ALIGNED = "all base pointers and strides are multiples of 16 B"


def access_bytes(*tensors: Tensor) -> tuple[int, str]:
    """How many bytes a kernel may move at once for q, k, v and o, and why: 16, or one element."""
    for name, tensor in zip("qkvo", tensors, strict=False):
        obstacle = base_obstacle(name, tensor) or stride_obstacle(name, tensor)
        if obstacle is not None:
            return tensor.element_size(), obstacle
    return 16, ALIGNED


def span(tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The memory between a CPU tensor's first and last element, flat and shared, not copied.

    numpy has no bfloat16: its bits come as uint16; those of bool as uint8.
    """
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    flat = tensor.detach().as_strided((extent,), (1,))
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8).numpy()
    return flat.numpy()


class Bound:
    """A kernel with its arguments for one problem: all but the addresses of tensors is decided.

    Attributes:
        blocks: how many, and why, where they take jobs; else None.
    """

    __slots__ = (
        "_launch",
        "_loaded",
        "arguments",
        "block",
        "blocks",
        "build",
        "grid",
        "smem_bytes",
    )

    def __init__(
        self, build: Build, arguments: Arguments, grid: Grid, blocks: Blocks | None = None
    ) -> None:
        self.build = build
        self.arguments = arguments
        self.grid = grid
        self.blocks = blocks
        self.block = (build.plan.threads, 1, 1)
        self.smem_bytes = build.plan.smem_bytes
        self._loaded: Any = None
        self._launch: Any = None

    def run(
        self,
        backend: str,
        tensors: Tensors,
        index: int,
        *,
        checkers: bool = True,
        order_seed: int | None = None,
    ) -> Any:
        """Runs the kernel; the emulator's counters, None on a GPU.

        Args:
            tensors: by the names of the kernel's pointers; None is a null pointer.
            index: of the GPU that they are on, the same at every call.
            checkers, order_seed: of the emulator.
        """
        if backend != "gpu":
            return self.emulate(tensors, checkers=checkers, order_seed=order_seed)
        given = [tensors[name] for name in self.arguments.pointers]
        self.launch([0 if tensor is None else tensor.data_ptr() for tensor in given], index)
        return None

    def launch(self, addresses: Sequence[int], index: int) -> None:
        """Queues the kernel on torch's current stream of a GPU.

        Args:
            addresses: of the kernel's pointers, in their order.
        """
        if self._loaded is None:
            from flashgen import launch as gpu

            self._loaded = gpu.load(self.build.binary, index)
            self._launch = gpu.launch
        self._launch(
            self._loaded,
            self.grid,
            self.block,
            self.smem_bytes,
            self.arguments.packed(addresses),
            current_stream(index),
        )

    def emulate(self, tensors: Tensors, *, checkers: bool, order_seed: int | None) -> Any:
        """Runs the kernel's PTX; tensors are passed as the memory they span."""
        from flashgen import emulator

        arguments = self.arguments
        maps = iter(arguments.maps)

        def argument(ctype: str, value: Any) -> Any:
            if ctype == "tensormap":
                said = next(maps)
                how: dict[str, Any] = {"dims": said.dims, "strides": said.strides}
                how |= {"dtype": said.dtype, "before": said.before}
                return emulator.TensorMap(span(value), said.box, said.swizzle, **how)
            if ctype == "pointer":
                return None if value is None else span(value)
            return {"int64": np.int64, "int32": np.int32, "float32": np.float32}[ctype](value)

        values = arguments.values(tensors)
        structure = tuple(map(argument, (param.ctype for param in arguments.params), values))
        return emulator.launch(
            self.build.binary.ptx,
            self.build.source.name,
            self.grid,
            self.block,
            [structure],
            shared_bytes=self.smem_bytes,
            check=checkers,
            order_seed=order_seed,
        )


def current_stream(index: int) -> int:
    """The handle of torch's current stream of a CUDA device, without making a Stream object."""
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle
