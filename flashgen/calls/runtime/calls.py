"""The public functions that run one pass of a spec and return a report.

`flashgen.calls.ops` exports them. The operator, which caches checked calls, does not use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashgen.calls.runtime import backward, forward, tangent
from flashgen.calls.runtime.arguments.call import Call
from flashgen.calls.runtime.arguments.call import check as check_call
from flashgen.calls.runtime.arguments.options import draw_rng, new_rng
from flashgen.calls.runtime.arguments.refusals import refuse, shown
from flashgen.calls.runtime.arguments.slices import split_number
from flashgen.calls.runtime.programs import CallProgram, Variant, program_of
from flashgen.calls.runtime.reports import BackwardRun, ForwardRun, TangentRun
from flashgen.shared.call import (
    CallOptions,
    CheckedCall,
    LaunchOptions,
    Operands,
    OutputGradients,
    Tangents,
)

if TYPE_CHECKING:
    from flashgen.kernels.planner import Tile
    from flashgen.spec.language.spec import AttentionSpec

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
        tiles: {"forward": tile} instead of the planner's tile or a tuned one. With tiles or
            blocks, keys are split for a given split_size only.
        blocks: blocks of the launch of a persistent kernel, instead of the plan's number.
        check_memory: whether the emulator checks memory accesses and races.
        order_seed: the emulator runs blocks and warps in an order drawn from this seed.

    Raises:
        InputError: an argument is wrong; nothing has run then.
        FlashgenError: planning, compiling or running failed.
    """
    draws = program_of(spec).signature.draws
    if rng is None and isinstance(q, Tensor) and (spec.dropout or draws):
        rng = new_rng(q.device) if draws else draw_rng(dropout_p, q.device)
    options = CallOptions(scale, q_offset, k_offset, backend, arch, None, split_size, (), dropout_p)
    program, operands, options = _call_of(spec, (q, k, v), rng, options, scalars, tensors)
    launch = LaunchOptions(sram, tiles or {}, blocks, check_memory, order_seed)
    call = forward.prepare(program, operands, options, launch)
    out, lse, *_, record = call.run(operands)
    return ForwardRun(out, lse, forward.report(record), rng if call.drops or draws else None)


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
        rng: seed and offset of the forward call; needed when dropout_p is not 0 or mods call
            fg.rand.
        deterministic: whether gradients have the same bits in every run; None follows torch's
            switch.
        tiles: tiles of the backward kernels by name, as in `kernels.planner.plan_backward`.
        other arguments: as for the forward call, in `run_forward`.

    Raises:
        InputError: an argument is wrong; nothing has run then.
        FlashgenError: planning, compiling or running failed.
    """
    numbers = scale, q_offset, k_offset, backend, arch, deterministic
    options = CallOptions(*numbers, dropout_p=dropout_p)
    program, operands, options = _call_of(spec, (q, k, v), rng, options, scalars, tensors)
    gradients = OutputGradients(out, lse, dout, dlse)
    launch = LaunchOptions(sram, tiles or {}, None, check_memory, order_seed)
    call = backward.prepare(program, operands, gradients, options, launch)
    (dq, dk, dv, *learned), record = call.run(operands, gradients)
    return BackwardRun(
        dq, dk, dv, record.reports(), record.copies, call.deterministic, tuple(learned)
    )


def run_tangent(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    moving: Tangents,
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
    sram: int | None = None,
    tiles: Mapping[str, Tile] | None = None,
    check_memory: bool = True,
    order_seed: int | None = None,
) -> TangentRun:
    """Computes the tangents of the results from the tangents of the operands; reports how it ran.

    Args:
        out, lse: the results of the forward call.
        moving: the tangents of the operands.
        rng: seed and offset of the forward call; needed when dropout_p is not 0.
        tiles: {"tangent": tile} instead of the planner's tile.
        other arguments: as for the forward call, in `run_forward`.

    Raises:
        InputError: an argument is wrong; nothing has run then.
        FlashgenError: planning, compiling or running failed.
    """
    options = CallOptions(scale, q_offset, k_offset, backend, arch, dropout_p=dropout_p)
    program, operands, options = _call_of(spec, (q, k, v), rng, options, scalars, tensors)
    launch = LaunchOptions(sram, tiles or {}, None, check_memory, order_seed)
    call = tangent.prepare(program, operands, (out, lse), moving, options, launch)
    out_tangent, lse_tangent, record = call.run(operands, (out, lse), moving)
    return TangentRun(out_tangent, lse_tangent, record.reports(), record.copies)


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

    Keys are split for a given split_size only.

    Raises:
        InputError: for the first mistake; the error names the argument.
    """
    options = CallOptions(scale, q_offset, k_offset, dropout_p=dropout_p)
    program, operands, options = _call_of(spec, (q, k, v), rng, options, scalars, tensors)
    program = program.with_dtype(getattr(q, "dtype", None))
    call = check_call(program.signature, operands, options)
    size = split_number(split_size)
    return forward.split(program, call, operands, options, size)[1] if size else call


def _call_of(
    spec: AttentionSpec,
    qkv: tuple[Tensor, Tensor, Tensor],
    rng: Tensor | None,
    options: CallOptions,
    scalars: Mapping[str, object] | None,
    tensors: Mapping[str, Tensor] | None,
) -> Call:
    program = program_of(spec)

    def variant(*fields: Any) -> CallProgram:
        return program_of(program.variant(Variant(*fields)))

    signature, tensors, scalars = program.signature, tensors or {}, scalars or {}
    for kind, mapping, other_captures in (
        ("tensor", tensors, signature.scalars),
        ("scalar", scalars, signature.tensors),
    ):
        for capture in other_captures:
            if capture.name in mapping:
                refuse(
                    f"{capture.name!r} is not a {kind} of the spec",
                    f"argument {kind}s",
                    f"given {shown(mapping[capture.name])}",
                    "numbers in scalars={...}, and captured tensors in tensors={...}",
                )
    captures = {**tensors, **scalars}
    return Call.from_arguments(program, variant, Operands(*qkv, (), rng), options, captures)
