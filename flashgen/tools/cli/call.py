"""A call on random operands, and where it runs: what `run`, `profile`, `tune` and `plan` share."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashgen.calls import launch
from flashgen.kernels.planner import tangents_of
from flashgen.shared import config
from flashgen.shared.call import Inputs, Tangents
from flashgen.shared.errors import InputError, LaunchError
from flashgen.shared.random_numbers import RANDOM_STATE
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.cli.arguments import CallArguments
from flashgen.tools.cli.captured_tensors import tensor_values
from flashgen.tools.cli.inputs import Shape, scalar_values

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RandomCall(Inputs):
    """The tensors and numbers of one call.

    Attributes:
        examples: names of the scalars and tensors that have the spec file's example values.
    """

    examples: frozenset[str] = frozenset()


def random_call(
    spec: AttentionSpec,
    arguments: CallArguments,
    sizes: Shape,
    *,
    device: str = "cpu",
    q_offset: int = 0,
    k_offset: int = 0,
    capacity: int = 0,
) -> RandomCall:
    """Standard normal operands, the same on every machine for the same seed.

    Args:
        capacity: the positions of keys that captured tensors have at least.

    Raises:
        InputError: a scalar has no value, the file's examples are wrong, or the operands exceed
            the memory of this machine.
    """
    import torch

    _check_memory(spec, sizes)
    generator = torch.Generator().manual_seed(arguments.seed)
    dtype: torch.dtype = getattr(torch, spec.dtype)

    def normal(heads: int, seq: int, dim: int) -> Tensor:
        values = torch.randn(sizes.batch, heads, seq, dim, generator=generator)
        return values.to(dtype).to(device)

    scalars, scalar_examples = scalar_values(spec, arguments.path, arguments.scalars)
    head_dim_v = spec.head_dim_v or spec.head_dim
    q = normal(sizes.heads_q, sizes.seq_q, spec.head_dim)
    k = normal(sizes.heads_kv, sizes.seq_k, spec.head_dim)
    v = k[..., :head_dim_v] if spec.shared_kv else normal(sizes.heads_kv, sizes.seq_k, head_dim_v)
    dout = normal(sizes.heads_q, sizes.seq_q, head_dim_v)
    dlse = normal(sizes.heads_q, sizes.seq_q, 1)[..., 0].float() if spec.is_softmax else None
    offsets = {"q_offset": q_offset, "k_offset": k_offset}
    tensor_sizes = replace(sizes, seq_k=max(sizes.seq_k, capacity))
    tensors, tensor_examples = tensor_values(
        spec,
        arguments.path,
        tensor_sizes,
        **offsets,
        seed=arguments.seed,
        device=device,
        scalars=scalars,
    )
    options: dict[str, Any] = {"scalars": scalars, "tensors": tensors, **offsets}
    if arguments.dropout or any(tensor.name == RANDOM_STATE for tensor in spec.tensors):
        options["rng"] = torch.tensor([arguments.seed, 0], device=device)
    if arguments.dropout:
        options["dropout_p"] = arguments.dropout
    moving = Tangents()
    if arguments.tangent:
        movable = {"q": q, "k": k, "v": v} | tensors
        ways = (
            torch.randn(movable[name].shape, generator=generator).to(movable[name])
            for name in tangents_of(spec)
        )
        moving = Tangents(next(ways), next(ways), next(ways), tuple(ways))
    examples = frozenset([*scalar_examples, *tensor_examples])
    return RandomCall((q, k, v), (dout, dlse), options, moving, examples)


def operand_elements(spec: AttentionSpec, sizes: Shape) -> int:
    """The elements of q, k, v and the output."""
    dims = spec.head_dim + (spec.head_dim_v or spec.head_dim)
    rows = sizes.heads_q * sizes.seq_q + sizes.heads_kv * sizes.seq_k
    return sizes.batch * rows * dims


def _check_memory(spec: AttentionSpec, sizes: Shape) -> None:
    """Checks that the float32 numbers of q, k, v and the output's gradient fit this machine."""
    needed = 4 * operand_elements(spec, sizes)
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    if has and needed > has:
        raise InputError(
            "the operands of this shape do not fit the memory of this machine",
            where="option --shape",
            numbers=f"{sizes}: {needed:,} B; the machine has {has:,} B",
            way_out="a smaller --shape",
        )


def choose_backend(option: str | None) -> tuple[str, str]:
    """The backend, and the reason for it: the option, FLASHGEN_BACKEND, or whether a GPU is there.

    Raises:
        InputError: there is no such backend.
        LaunchError: the backend is "gpu" and there is no GPU.
    """
    import torch

    no_gpu = launch.available()
    if no_gpu is None and not torch.cuda.is_available():
        no_gpu = "this torch is built without CUDA"
    name = option or config.backend()
    if name is None:
        return ("gpu", torch.cuda.get_device_name()) if no_gpu is None else ("emulator", no_gpu)
    if config.split_backend(name) is None:
        raise InputError(
            "there is no such backend",
            where="option --backend",
            numbers=f"given {name!r}; available: {', '.join(config.BACKENDS)}",
            way_out="--backend emulator, or leave the option out",
        )
    if name == "gpu" and no_gpu is not None:
        raise LaunchError(
            "there is no GPU to run on",
            where="option --backend" if option else "environment, FLASHGEN_BACKEND",
            numbers=no_gpu,
            way_out="--backend emulator, which executes the same kernel",
        )
    return name, "from --backend" if option else "from FLASHGEN_BACKEND"
