"""The backend of CPU tensors: the tiled algorithms on torch tensors, with the tiles of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from flashgen.call import CheckedCall, LaunchOptions, Operands, OutputGradients
from flashgen.runtime.backends import DEFAULT_ARCH
from flashgen.runtime.compiler import cpu_blocks
from flashgen.runtime.memory_layout import in_memory_order_of

if TYPE_CHECKING:
    from flashgen.cpu import TileArguments
    from flashgen.language.spec import AttentionSpec

Tensor = torch.Tensor

REASON = "tiled algorithms on torch tensors: no kernel"


class CpuCall:
    """A spec on CPU tensors, for calls of the same sizes and numbers."""

    __slots__ = ("_arch", "_call", "_launch", "_spec")

    def __init__(
        self, spec: AttentionSpec, call: CheckedCall, arch: str, launch: LaunchOptions
    ) -> None:
        self._spec = spec
        self._call = call
        self._arch = arch
        self._launch = launch

    def forward(self, operands: Operands, captured: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Computes out and lse.

        Args:
            captured: captured tensors by name, including those of a block layout.
        """
        from flashgen import cpu

        q, k, v, _, rng = operands
        with _plain_torch():
            arguments = self._arguments(captured, rng, backward=False)
            out, lse = cpu.forward(self._spec, q, k, v, arguments)
            return in_memory_order_of(q, out), lse

    def backward(
        self, operands: Operands, gradients: OutputGradients, captured: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Computes dq, dk, dv and the gradients of learned tensors; arguments as in `forward`."""
        from flashgen import cpu

        q, k, v, _, rng = operands
        with _plain_torch():
            arguments = self._arguments(captured, rng, backward=True)
            found = cpu.backward(self._spec, q, k, v, gradients, arguments)
            return (
                *map(in_memory_order_of, (q, k, v), found[:3]),
                *(gradient.contiguous() for gradient in found[3:]),
            )

    def _arguments(
        self, captured: Mapping[str, Tensor], rng: Tensor | None, *, backward: bool
    ) -> TileArguments:
        from flashgen.cpu import TileArguments

        call, launch = self._call, self._launch
        block_q = block_k = None  # the tiles of DEFAULT_ARCH
        if self._arch != DEFAULT_ARCH or not launch.plans_itself:
            block_q, block_k = cpu_blocks(self._spec, self._arch, launch, backward=backward)
        return TileArguments(
            scale=call.scale,
            q_offset=call.q_offset,
            k_offset=call.k_offset,
            scalars=call.scalars,
            tensors=captured,
            dropout_p=call.dropout_p,
            rng=rng,
            block_q=block_q,
            block_k=block_k,
        )


@contextmanager
def _plain_torch() -> Iterator[None]:
    """A context without recording of gradients and without autocast: products keep their dtype."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield
