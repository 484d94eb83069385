"""A kernel with the arguments of a call, which runs on a GPU through the driver or in the emulator.

This module converts tensors to pointers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from flashgen.calls.launch.params import ParamField
from flashgen.calls.runtime.backends import Target
from flashgen.calls.runtime.kernel_arguments import KernelArguments
from flashgen.shared import config
from flashgen.shared.call import DEFAULT_LAUNCH, LaunchOptions

if TYPE_CHECKING:
    from flashgen.calls.runtime.programs import LaunchableKernel
    from flashgen.shared.launch_facts import LaunchBlocks

Tensor = torch.Tensor
Grid = tuple[int, int, int]
Tensors = Mapping[str, Tensor | None]


class KernelRun(NamedTuple):
    """A kernel that ran.

    Attributes:
        build: the kernel; None for the CPU path.
        counters: the counters of the emulator; None elsewhere.
        seconds: duration of the emulation, or of queueing the launch.
        table: the min/max table that it made; None for other kernels.
    """

    build: LaunchableKernel | None
    counters: Any
    seconds: float
    table: Tensor | None = None


class BoundKernel:
    """A kernel bound to one call: all its arguments except the addresses of tensors are fixed.

    Attributes:
        blocks: the number of blocks of a persistent kernel, with the reason; None for others.
        next_kernel: the blocks beyond the limits of a grid, which are launched after these.
    """

    def __init__(
        self,
        build: LaunchableKernel,
        arguments: KernelArguments,
        grid: Grid,
        blocks: LaunchBlocks | None = None,
        next_kernel: BoundKernel | None = None,
    ) -> None:
        self.build = build
        self.arguments = arguments
        self.grid = grid
        self.blocks = blocks
        self.next_kernel = next_kernel
        self.block = (build.facts.threads, 1, 1)
        self.smem_bytes = build.facts.smem_bytes
        self._launch: Any = None

    def run(self, target: Target, tensors: Tensors, launch: LaunchOptions = DEFAULT_LAUNCH) -> Any:
        """Runs the kernel. Returns the emulator's counters, or None on a GPU.

        Args:
            target: where the kernel runs, with the same GPU in every call.
            tensors: the tensors by the names of the kernel's pointers; None is a null pointer.
            launch: the options of the emulator.
        """
        if target.recorder is not None:
            return target.recorder.launch(self, tensors)
        if target.backend != "gpu":
            if launch.order_seed is None and target.order_seed is not None:
                launch = replace(launch, order_seed=target.order_seed)
            return self.emulate(tensors, launch)
        pointer_tensors = [tensors[name] for name in self.arguments.pointers]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in pointer_tensors]
        self.launch(addresses, target.index)
        return None

    def timed(
        self, target: Target, tensors: Tensors, launch: LaunchOptions = DEFAULT_LAUNCH
    ) -> KernelRun:
        """Runs the kernel, as `run`."""
        start = perf_counter()
        counters = self.run(target, tensors, launch)
        return KernelRun(self.build, counters, perf_counter() - start)

    def launch(self, addresses: Sequence[int], index: int) -> None:
        """Queues the kernel on torch's current stream of a GPU.

        Args:
            addresses: the values of the kernel's pointers, in order.
        """
        stream = current_stream(index)
        if self._launch is None:
            from flashgen.calls import launch as gpu

            kernel = gpu.load(self.build.binary, index, stream=stream)
            self._launch = gpu.Launch(
                kernel, self.grid, self.block, self.smem_bytes, overlaps=self.build.facts.overlaps
            )
        self._launch(self.arguments.packed(addresses, index), stream)
        if self.next_kernel is not None:
            self.next_kernel.launch(addresses, index)

    def emulate(self, tensors: Tensors, launch: LaunchOptions) -> Any:
        """Runs the kernel's PTX in the emulator; tensors are passed as the memory they span."""
        import ptx_emulator as emulator

        arguments = self.arguments
        maps = iter(arguments.maps)

        def argument(param: ParamField) -> Any:
            if param.ctype == "pointer":
                tensor = tensors[param.name]
                return None if tensor is None else span(tensor)
            if param.ctype == "tensormap":
                spec, tensor = next(maps), tensors[param.name]
                assert tensor is not None, "operands of a kernel are never null"
                return emulator.TensorMap(
                    span(tensor),
                    spec.box,
                    spec.swizzle,
                    dims=spec.dims,
                    strides=spec.strides,
                    dtype=spec.dtype,
                )
            numbers = {"int64": np.int64, "int32": np.int32, "float32": np.float32}
            return numbers[param.ctype](arguments.numbers[param.name])  # type: ignore[arg-type]

        structure = tuple(map(argument, arguments.params))
        counters = emulator.launch(
            self.build.binary.ptx,
            self.build.facts.name,
            self.grid,
            self.block,
            [structure],
            shared_bytes=self.smem_bytes,
            check=launch.check_memory,
            order_seed=config.emulator_order() if launch.order_seed is None else launch.order_seed,
            sums=config.emulator_sums(),
            overlaps=self.build.facts.overlaps,
        )
        if self.next_kernel is not None:
            counters.add(self.next_kernel.emulate(tensors, launch))
        return counters


def span(tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The memory from a CPU tensor's first to its last element as a flat array that shares it.

    NumPy has no bfloat16: such elements appear as uint16; bools and 8-bit floats appear as uint8.
    """
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    flat = tensor.detach().as_strided((extent,), (1,))
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    if flat.dtype == torch.bool or (flat.is_floating_point() and flat.itemsize == 1):
        return flat.view(torch.uint8).numpy()
    return flat.numpy()


def current_stream(index: int) -> int:
    """The handle of torch's current stream of a CUDA device, without making a Stream object."""
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle
