"""Where a kernel runs: a GPU through the driver, or the emulator. Tensors become pointers here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flashgen import config
from flashgen.errors import InputError
from flashgen.pipeline import Build

Tensor = torch.Tensor
Grid = tuple[int, int, int]


def choose(asked: str | None, device: torch.device) -> str:
    """The backend of a call: as asked, else FLASHGEN_BACKEND, else by where the tensors are.

    Raises:
        InputError: the backend does not exist or does not take tensors of this device.
    """
    source, name = "argument backend", asked
    if name is None:
        source, name = "environment, FLASHGEN_BACKEND", config.backend()
    if name is None:
        return "gpu" if device.type == "cuda" else "emulator"
    if name not in config.BACKENDS:
        raise InputError(
            "there is no such backend",
            where=source,
            numbers=f"given {name!r}; available: {', '.join(config.BACKENDS)}",
            way_out="backend=None: CUDA tensors run on their GPU, CPU tensors in the emulator",
        )
    takes = "cuda" if name == "gpu" else "cpu"
    if device.type != takes:
        raise InputError(
            f"the backend {name!r} takes {takes} tensors",
            where=source,
            numbers=f"q, k and v are on {device}",
            way_out=f"q.{takes}(), k.{takes}() and v.{takes}(), or another backend",
        )
    return name


def access_bytes(*tensors: Tensor) -> tuple[int, str]:
    """How many bytes a kernel may move at once, and why: 16, or one element.

    16 bytes need base pointers and all strides but the last to be multiples of 16 bytes. An axis
    of length 1 is never stepped along, so its stride does not count.
    """
    for name, tensor in zip("qkvo", tensors, strict=False):
        size = tensor.element_size()
        if tensor.data_ptr() % 16:
            offset = tensor.data_ptr() % 16
            return size, f"{name} begins {offset} B past a multiple of 16 B"
        for axis, label in enumerate(("batch", "head", "row")):
            step = tensor.stride(axis) * size
            if tensor.shape[axis] > 1 and step % 16:
                return size, f"the {label} stride of {name} is {step} B, no multiple of 16 B"
    return 16, "all base pointers and strides are multiples of 16 B"


def span(tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The memory between a CPU tensor's first and last element, flat and shared, not copied.

    numpy has no bfloat16: its bits come as uint16.
    """
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    flat = tensor.detach().as_strided((extent,), (1,))
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.numpy()


def emulate(kernel: Build, grid: Grid, values: Sequence[Any], *, checkers: bool) -> Any:
    """Runs the kernel's PTX; tensors among ``values`` are passed as the memory they span.

    Returns:
        The emulator's counters.
    """
    from flashgen import emulator

    numbers = {"int64": np.int64, "int32": np.int32, "float32": np.float32}
    structure = tuple(
        span(value)
        if isinstance(value, Tensor)
        else value
        if param.ctype == "pointer"
        else numbers[param.ctype](value)
        for param, value in zip(kernel.source.params, values, strict=True)
    )
    return emulator.launch(
        kernel.binary.ptx,
        kernel.source.name,
        grid,
        (kernel.plan.threads, 1, 1),
        [structure],
        shared_bytes=kernel.plan.smem_bytes,
        check=checkers,
    )


def launch(kernel: Build, grid: Grid, values: Sequence[Any], device: torch.device) -> None:
    """Queues the kernel on torch's current stream of the device."""
    from flashgen import launch as gpu

    index = device.index if device.index is not None else torch.cuda.current_device()
    addresses = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
    gpu.launch(
        gpu.load(kernel.binary, index),
        grid,
        (kernel.plan.threads, 1, 1),
        kernel.plan.smem_bytes,
        gpu.pack(kernel.source.params, addresses),
        torch.cuda.current_stream(index).cuda_stream,
    )
