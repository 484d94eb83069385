"""The implementations of attention that are timed side by side: their interface and their list.

A contender states whether it supports a case, and makes a function of q, k and v for it. Gradients
come from autograd for all contenders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from benchmarks.suite.cases import PASSES, Case
from benchmarks.suite.device import Device

Tensor = torch.Tensor
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def _nothing() -> tuple[str, str]:
    return "", ""


@dataclass(frozen=True)
class Prepared:
    """A contender that is prepared for one case.

    Attributes:
        attend: q, k, v -> out, differentiable where `passes` has more than "forward".
        passes: the passes that can be timed.
        materialises: whether it stores the whole matrix of scores, so that one set of inputs is
            enough to overflow any cache, and several sets may overflow the memory.
        described: code path and plan of the last call, for records; empty strings for peers.
        learned: learned tensors of the case by name: leaves whose gradients are also computed.
        undropped: the same call without dropout, whose result can be checked; None where
            `attend` has none.
    """

    attend: Function
    passes: tuple[str, ...] = PASSES
    materialises: bool = False
    described: Callable[[], tuple[str, str]] = _nothing
    learned: Mapping[str, Tensor] = field(default_factory=dict)
    undropped: Function | None = None


def learned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a case's tensors that have gradients."""
    return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}


def passes_of(case: Case, *, deterministic: bool = False) -> tuple[str, ...]:
    """The passes that a contender with gradients is timed in: decoding has none, and a mode with
    reproducible gradients has the forward kernels of the other."""
    if deterministic:
        return PASSES[1:]
    return PASSES[:1] if case.seq_q == 1 else PASSES


class Contender(Protocol):
    """
    Attributes:
        name: the name in records.
        ours: whether it is flashgen.
    """

    name: str
    ours: bool

    def library(self, device: Device) -> str:
        """Names and versions of the packages that compute on this device."""

    def supports(self, case: Case, device: Device) -> str | None:
        """The reason why the case is not supported on this device, or None."""

    def prepare(self, case: Case, device: Device) -> Prepared:
        """Prepares the contender, which may compile; only for cases that `supports` accepts."""


def contenders(device: Device) -> list[Contender]:
    """All of them, flashgen first."""
    from benchmarks.suite.contenders.cudnn_flex import CudnnFlex
    from benchmarks.suite.contenders.cudnn_graph import CudnnGraph
    from benchmarks.suite.contenders.flash_attention import FlashAttention
    from benchmarks.suite.contenders.flashinfer import FlashInfer
    from benchmarks.suite.contenders.flex import flexes
    from benchmarks.suite.contenders.ours import flashgens
    from benchmarks.suite.contenders.sdpa import sdpas
    from benchmarks.suite.contenders.served import Served
    from benchmarks.suite.contenders.standard import Standard

    served = [Served(arch, paged=paged) for arch in device.archs for paged in (False, True)]
    peers: list[Contender] = [
        kind(deterministic=d) for kind in (FlashAttention, CudnnGraph) for d in (False, True)
    ]
    peers += [CudnnGraph(paged=True), CudnnFlex(), FlashInfer()]
    peers += [*sdpas(), *flexes(), Standard()]
    return [*flashgens(device), *served, *peers]
