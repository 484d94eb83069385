"""The public functions that run one pass of a spec and return a report.

`flashgen.ops` exports them. The operator, which caches checked calls, does not use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flashgen.call import CallOptions, CheckedCall, LaunchOptions, Operands, OutputGradients
from flashgen.runtime import backward, checks, forward
from flashgen.runtime.argument_names import check_names
from flashgen.runtime.block_layouts import with_layout
from flashgen.runtime.number_arguments import draw_rng
from flashgen.runtime.offset_tensors import dtypes_of, given_offsets, numbers_of
from flashgen.runtime.programs import program_of
from flashgen.runtime.reports import BackwardRun, ForwardRun
from flashgen.runtime.wholes import scalars_of_part
from flashgen.signature import BOUNDARIES

if TYPE_CHECKING:
    from flashgen.language.spec import AttentionSpec
    from flashgen.planner import Tile

Tensor = torch.Tensor


def run_forward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scalars: Mapping[str, object] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    q_offset: int | Tensor = 0,
    k_offset: int | Tensor = 0,
    dropout_p: float | Tensor = 0.0,
    rng: Tensor | None = None,
    backend: str | None = None,
    arch: str | None = None,
    split_size: int | None = None,
    sram: int | None = None,
    tiles: Mapping[str, Tile] | None = None,
    blocks: int | None = None,
    check_memory: bool = True,
    order_seed: int | None = None,
) -> ForwardRun:
    """Computes the forward pass of ``spec`` without autograd, and reports how it ran.

    Args:
        q, k, v, scale, q_offset, k_offset, dropout_p, rng, backend, arch, split_size: as in
            `flashgen.attention`.
        scalars, tensors: a number for each run-time scalar and a tensor for each captured tensor,
            by name; "layout" as in `flashgen.attention`.
        sram: bytes of shared memory per block to plan for, instead of the architecture's.
        tiles: {"forward": tile} instead of the planner's tile or a tuned one.
        blocks: blocks of the launch of a persistent kernel, instead of the plan's number.
        check_memory: whether the emulator checks memory accesses and races.
        order_seed: the emulator runs blocks and warps in an order drawn from this seed.

    Raises:
        InputError: an argument is wrong; nothing has run then.
        FlashgenError: planning, compiling or running failed.
    """
    if rng is None and isinstance(q, Tensor) and spec.dropout:
        rng = draw_rng(dropout_p, q.device)
    spec, scalars = variant_of(spec, q, k, split_size, scalars=scalars, tensors=tensors)
    spec, q_offset, k_offset, tensors = _at_offsets(spec, q_offset, k_offset, tensors)
    captured, values = _captures(spec, tensors, scalars)
    operands = Operands(q, k, v, captured, rng)
    options = CallOptions(scale, q_offset, k_offset, backend, arch, None, values, dropout_p)
    launch = LaunchOptions(sram, tiles or {}, blocks, check_memory, order_seed)
    call = forward.prepare(spec, operands, options, launch)
    out, lse, record = call.run(operands)
    return ForwardRun(out, lse, forward.report(record), rng if call.drops else None)


def run_backward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    scalars: Mapping[str, object] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    q_offset: int | Tensor = 0,
    k_offset: int | Tensor = 0,
    dropout_p: float | Tensor = 0.0,
    rng: Tensor | None = None,
    backend: str | None = None,
    arch: str | None = None,
    deterministic: bool | None = None,
    sram: int | None = None,
    tiles: Mapping[str, Tile] | None = None,
    check_memory: bool = True,
    order_seed: int | None = None,
) -> BackwardRun:
    """Computes the gradients of q, k, v and of the learned tensors, and reports how it ran.

    Args:
        out, lse: the results of the forward call.
        dout: gradient of out, any strides.
        dlse: gradient of lse, float32; zeros when None.
        rng: seed and offset of the forward call; needed when dropout_p is not 0.
        deterministic: whether gradients have the same bits in every run; None follows torch's
            switch.
        tiles: tiles of the backward kernels by name, as in `flashgen.planner.plan_backward`.
        other arguments: those of the forward call, as in `run_forward`.

    Raises:
        InputError: an argument is wrong; nothing has run then.
        FlashgenError: planning, compiling or running failed.
    """
    spec, q_offset, k_offset, tensors = _at_offsets(spec, q_offset, k_offset, tensors)
    captured, values = _captures(spec, tensors, scalars)
    operands = Operands(q, k, v, captured, rng)
    gradients = OutputGradients(out, lse, dout, dlse)
    options = CallOptions(
        scale, q_offset, k_offset, backend, arch, deterministic, values, dropout_p
    )
    launch = LaunchOptions(sram, tiles or {}, None, check_memory, order_seed)
    call = backward.prepare(spec, operands, gradients, options, launch)
    (dq, dk, dv, *learned), record = call.run(operands, gradients)
    reports = backward.reports(record)
    return BackwardRun(dq, dk, dv, reports, record.copies, call.deterministic, tuple(learned))


def check(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    q_offset: int | Tensor = 0,
    k_offset: int | Tensor = 0,
    scalars: Mapping[str, object] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    dropout_p: float | Tensor = 0.0,
    rng: Tensor | None = None,
    split_size: int | None = None,
) -> CheckedCall:
    """The checked sizes and numbers of a forward call, with the arguments of `run_forward`.

    Raises:
        InputError: for the first mistake; the error names the argument.
    """
    spec, scalars = variant_of(spec, q, k, split_size, scalars=scalars, tensors=tensors)
    spec, q_offset, k_offset, tensors = _at_offsets(spec, q_offset, k_offset, tensors)
    captured, values = _captures(spec, tensors, scalars)
    options = CallOptions(scale, q_offset, k_offset, None, None, None, values, dropout_p)
    return checks.check(
        program_of(spec).of_dtype(getattr(q, "dtype", None)).signature,
        Operands(q, k, v, captured, rng),
        options,
    )


def variant_of(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    split_size: int | None,
    *,
    scalars: Mapping[str, object] | None,
    tensors: Mapping[str, Tensor] | None,
) -> tuple[AttentionSpec, Mapping[str, object]]:
    """The variant of ``spec`` for split keys or packed queries in pages, and its scalars.

    Arguments as in `run_forward`, with its own result where a call has neither.

    Raises:
        InputError: split_size is not a number of keys that kernels can split.
        SpecError: the spec has packed sequences, whose keys cannot be split.
    """
    from flashgen.language.signature import packed_queries, split

    if spec.paged and BOUNDARIES[0] in (tensors or {}):
        spec = packed_queries(spec)
    part = scalars_of_part(0, None, split_size, q, k, tensors or {})
    return split(spec) if part else spec, {**(scalars or {}), **part}


def _at_offsets(
    spec: AttentionSpec,
    q_offset: int | Tensor,
    k_offset: int | Tensor,
    tensors: Mapping[str, Tensor] | None,
) -> tuple[AttentionSpec, int, int, Mapping[str, Tensor]]:
    """The spec, the numeric offsets and the tensors, with offsets that are tensors among these."""
    from flashgen.language.signature import at_offsets

    tensors, given = tensors or {}, given_offsets(q_offset, k_offset)
    numbers = numbers_of(q_offset, k_offset)
    return at_offsets(spec, dtypes_of(given)), *numbers, {**tensors, **given}


def _captures(
    spec: AttentionSpec,
    tensors: Mapping[str, Tensor] | None,
    scalars: Mapping[str, object] | None,
) -> tuple[tuple[Tensor, ...], tuple[object, ...]]:
    """The captured tensors and the values of the scalars, in the order of the signature."""
    from flashgen.language.signature import signature_of

    signature = signature_of(spec)
    given, numbers = with_layout(signature, tensors or {}), scalars or {}
    check_names(signature, given, signature.tensors)
    check_names(signature, numbers, signature.scalars)
    return (
        tuple(given[tensor.name] for tensor in signature.tensors),
        tuple(numbers[scalar.name] for scalar in signature.scalars),
    )
