"""The tangents of a call's results and of its gradients, by the tiled algorithms on any device.

Second derivatives are these two passes: the tangent of the forward pass, for which
`flashgen.calls.runtime.tangent` has kernels, and that of the backward pass, which has none.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

import torch

from flashgen.calls.runtime.arguments.refusals import refuse
from flashgen.calls.runtime.arguments.tensors import check_gradients, check_tangents
from flashgen.calls.runtime.chosen_keys import in_blocks
from flashgen.calls.runtime.memory_layout import in_memory_order_of
from flashgen.calls.runtime.prepared_call import PreparedCall, Setup, without_autocast
from flashgen.calls.runtime.programs import CallProgram, SpecProgram
from flashgen.shared.call import (
    CallOptions,
    Operands,
    OutputGradients,
    ResultTangents,
    Tangents,
)

if TYPE_CHECKING:
    from flashgen.calls.cpu import TileArguments
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor


class TiledDerivativeWarning(UserWarning):
    """A derivative of a call on a GPU is computed without kernels."""


def tangents(
    spec: AttentionSpec | CallProgram,
    operands: Operands,
    results: tuple[Tensor, Tensor],
    moving: Tangents,
    options: CallOptions,
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse from the tangents of the operands.

    Args:
        results: out and lse of the forward call.

    Raises:
        InputError: an argument is wrong, or the backend has no such pass.
        SpecError: the spec has no derivatives.
    """
    spec, operands, options = in_blocks(spec, operands, options)
    call = _TiledCall(spec, operands, moving, options)
    out, lse = call.tangents(results, moving)
    return in_memory_order_of(operands.q, out.to(operands.q.dtype)), lse


def gradient_tangents(
    spec: AttentionSpec | CallProgram,
    operands: Operands,
    gradients: OutputGradients,
    moving: Tangents,
    result_tangents: ResultTangents,
    options: CallOptions,
) -> tuple[Tensor, ...]:
    """The tangents of out, lse, dq, dk, dv and of the gradient of each learned tensor.

    Args:
        gradients: out and lse of the forward call, and their gradients.
        result_tangents: the tangents of ``gradients``. The tangents of out and lse are computed
            where they are None.

    Raises:
        InputError: an argument is wrong, or the backend has no such pass.
        SpecError: the spec has no derivatives.
    """
    from flashgen.calls import cpu

    spec, operands, options = in_blocks(spec, operands, options)
    call = _TiledCall(spec, operands, moving, options)
    q, k, v = operands[:3]
    check_gradients(q, v, gradients)
    if result_tangents.out is None or result_tangents.lse is None:
        out, lse = call.tangents(gradients[:2], moving)  # in float32
        result_tangents = result_tangents._replace(out=out, lse=lse)
    assert result_tangents.out is not None and result_tangents.lse is not None  # noqa: PT018
    results = result_tangents.out, result_tangents.lse
    with without_autocast():
        tangents = cpu.backward_tangent(
            call.spec, q, k, v, gradients, moving, result_tangents, call.arguments
        )
    learned = [
        x
        for x, argument in zip(operands.captured, call.signature.tensors, strict=True)
        if argument.grad
    ]
    rounded = [x.to(like.dtype) for x, like in zip(tangents, (q, k, v, *learned), strict=True)]
    return (
        in_memory_order_of(q, results[0].to(q.dtype, copy=True)),
        results[1].clone(),
        *map(in_memory_order_of, (q, k, v), rounded[:3]),
        *rounded[3:],
    )


class _TiledCall(PreparedCall):
    """A checked call with its tangents, for the tiled algorithms."""

    arguments: TileArguments

    def __init__(
        self,
        spec: AttentionSpec | CallProgram,
        operands: Operands,
        moving: Tangents,
        options: CallOptions,
    ) -> None:
        setup = Setup.for_call(spec, operands, options)
        program = setup.program
        if not isinstance(program, SpecProgram):
            refuse(
                "an export has no tangents and no second derivatives",
                "a derivative of an exported operator",
                f"program {program.signature.name}",
                "the operator of the spec itself: flashgen.attention(spec)",
            )
        check_tangents(program.signature, operands, moving)
        if setup.target.backend == "emulator":
            refuse(
                "the emulator has no kernels of this derivative",
                "argument backend",
                "backend 'emulator'",
                "backend='tiled', the default for CPU tensors",
            )
        if setup.target.backend == "gpu":
            warn_of_tiles()
        super().__init__(setup)
        self.operands = operands
        read, by_name = self._read(operands)
        self.arguments = self._arguments(by_name, read.rng)

    def _arguments(self, captured: dict[str, Tensor], rng: Tensor | None) -> TileArguments:
        """With the default tiles: a derivative has no kernel whose tiles it could follow."""
        from flashgen.calls.cpu import TileArguments

        call = self.call
        return TileArguments(
            call.scale, call.q_offset, call.k_offset, call.scalars, captured, call.dropout_p, rng
        )

    def tangents(self, results: tuple[Tensor, Tensor], moving: Tangents) -> tuple[Tensor, Tensor]:
        """The tangents of out and lse, in the dtype of accumulators."""
        from flashgen.calls import cpu

        with without_autocast():
            operands = self.operands[:3]
            return cpu.tangent(self.spec, *operands, results, moving, self.arguments)


@functools.cache
def warn_of_tiles() -> None:
    """Once in a process."""
    warnings.warn(
        "this derivative of attention is computed by tiled algorithms of PyTorch operations, in "
        "memory linear in the sequence length, but slower than the kernels of the other passes",
        TiledDerivativeWarning,
        stacklevel=2,
    )
