"""The kernels that torch.compile makes of flex_attention for a GPU that is not there.

Inductor's own code generation runs on fake CUDA tensors, with its own choice of tile and options,
and Triton compiles the result as Inductor has it compiled; nothing is launched. What asks the CUDA
driver for a device gets the answers of an A100 or an H100, and two passes of Inductor that trace
real CUDA tensors, to find patterns that flex_attention does not have, are left out.

The patches are for the whole process: `benchmarks/flex_kernels.py` gives each code path its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from torch._inductor import config, utils  # noqa: E402
from torch._inductor.codecache import PyCodeCache  # noqa: E402
from torch._inductor.fx_passes import joint_graph  # noqa: E402
from torch._inductor.runtime import triton_helpers, triton_heuristics  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch.nn.attention.flex_attention import (  # noqa: E402
    _LARGE_SPARSE_BLOCK_SIZE,
    BlockMask,
    flex_attention,
)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402

from benchmarks.flex_mods import BATCH, HEAD_DIM, HEADS, LENGTH, MODS, Mask, Mods  # noqa: E402

BLOCK = 128  # of the block mask, PyTorch's default
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)
PROCESSORS = {80: 108, 90: 132}
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}


@contextlib.contextmanager
def pretended_gpu(arch: int) -> Iterator[None]:
    """Inside, torch and Triton see one GPU of compute capability ``arch``, which cannot launch."""
    capability = divmod(arch, 10)
    properties = SimpleNamespace(
        name=f"sm_{arch}",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=PROCESSORS[arch],
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block_optin=SHARED_BYTES[arch],
        warp_size=32,
        total_memory=80 << 30,
        gcnArchName="",  # which a build of torch without CUDA reads
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "_get_device_properties": properties,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    # The methods ~x and x.copy_() select the device of a tensor before they dispatch.
    flex_operator = sys.modules["torch._higher_order_ops.flex_attention"]
    permuted = flex_operator._permute_strides

    def without_copy(out: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        with mock.patch.object(torch.Tensor, "copy_", lambda self, other: self):
            return permuted(out, strides)

    def answer(owner: Any, name: str, value: Any) -> Any:
        return mock.patch.object(owner, name, create=True, return_value=value)

    with contextlib.ExitStack() as stack:
        for name, value in answers.items():
            stack.enter_context(answer(torch.cuda, name, value))
        fake_mode = fake_tensor.FakeTensorMode
        stack.enter_context(mock.patch.object(fake_mode, "avoid_device_init", True))
        stack.enter_context(answer(fake_tensor, "init_gpu_context", None))
        stack.enter_context(answer(joint_graph, "lazy_init", None))
        stack.enter_context(answer(triton_helpers, "set_driver_to_gpu", None))
        stack.enter_context(mock.patch.object(flex_operator, "_permute_strides", without_copy))
        stack.enter_context(mock.patch.object(torch.Tensor, "__invert__", torch.Tensor.bitwise_not))
        aten = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name in ("empty.memory_format", "empty_strided"):
            aten.impl(name, functools.partial(_on_cpu, name), "CUDA")
        triton.runtime.driver.set_active(driver)
        yield


def _on_cpu(name: str, *sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """Constants that Inductor folds are computed on the CPU."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    made: torch.Tensor = operator(*sizes, device="cpu", **{**options, "pin_memory": False})
    return made


def generated(name: str) -> str:
    """The Python module that Inductor writes for flex_attention with these mods."""

    with fake_tensor.FakeTensorMode():
        query, key, value = (_empty((BATCH, HEADS, LENGTH, HEAD_DIM), torch.float16) for _ in "qkv")
        mods: Mods = MODS[name](lambda name, shape, dtype: _empty(shape, dtype))
        mask_mod, score_mod = mods
        compiled = torch.compile(flex_attention, fullgraph=True)
        arguments = (query, key, value, score_mod, _block_mask(mask_mod))
        return "".join(utils.get_code(compiled, *arguments))


def _empty(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _block_mask(mask_mod: Mask | None) -> BlockMask:
    """As create_block_mask makes it, with partial and full blocks, whose contents are not used.

    Without a mask it is what flex_attention makes itself: one block, as large as can be.
    """
    if mask_mod is None:
        one = _empty((1, 1, 1)), _empty((1, 1, 1, 1))
        sides = (*one, None, None, *one, None, None)
        return BlockMask((LENGTH, LENGTH), *sides, 2 * (_LARGE_SPARSE_BLOCK_SIZE,))
    blocks = LENGTH // BLOCK
    shapes = 4 * ((BATCH, HEADS, blocks), (BATCH, HEADS, blocks, blocks))
    return BlockMask((LENGTH, LENGTH), *map(_empty, shapes), (BLOCK, BLOCK), mask_mod)


def compiled(module: str) -> tuple[Any, Any, Path]:
    """The kernel of a generated module: Triton's result, Inductor's options, and its source."""
    found = KERNEL.findall(module)
    if len(found) != 1:
        raise ValueError(f"one kernel was expected of Inductor, there are {[n for n, _ in found]}")
    ((name, text),) = found
    results: list[Any] = []
    compile = triton.compile

    def recorded(*args: Any, **options: Any) -> Any:
        results.append(compile(*args, **options))
        return results[-1]

    loaded = PyCodeCache.load(text)
    tuner: triton_heuristics.CachingAutotuner = getattr(loaded, name)
    with mock.patch.object(triton, "compile", recorded):
        tuner._precompile_config(tuner.configs[0])
    return results[0], tuner.inductor_meta["config_args"], Path(loaded.__file__)


def main(arch: str, folder: str, *names: str) -> None:
    """Writes NAME.cubin, NAME.py (the kernel's source) and NAME.json to ``folder``."""
    config.fx_graph_cache = False  # an entry would lack the compiled module
    with pretended_gpu(int(arch)):
        for name in names:
            kernel, options, source = compiled(generated(name))
            path = Path(folder) / name
            path.with_suffix(".cubin").write_bytes(kernel.asm["cubin"])
            path.with_suffix(".py").write_bytes(source.read_bytes())
            facts = {
                "tile": [options["BLOCK_M"], options["BLOCK_N"]],
                "warps": kernel.metadata.num_warps,
                "stages": kernel.metadata.num_stages,
                "smem_bytes": kernel.metadata.shared,
                "triton": triton.__version__,
                "ptxas": get_ptxas(int(arch)).version,
            }
            path.with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
