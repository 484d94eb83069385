"""Who computes attention side by side: one small interface, and the list of all.

A contender says whether it can serve a case, and makes a function of q, k and v for it. Gradients
come from autograd, for all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """A contender made ready for one case.

    Attributes:
        attend: q, k, v -> out, differentiable where `passes` has more than "forward".
        passes: what it can be timed at.
        materialises: it keeps the whole matrix of scores, so that one set of inputs is enough to
            overflow any cache, and more than one may overflow the memory.
        described: code path and plan of the last call, for records; empty strings for peers.
    """

    attend: Function
    passes: tuple[str, ...] = PASSES
    materialises: bool = False
    described: Callable[[], tuple[str, str]] = _nothing


class Contender(Protocol):
    """
    Attributes:
        name: in records.
        ours: it is flashgen.
    """

    name: str
    ours: bool

    def supports(self, case: Case, device: Device) -> str | None:
        """Why it cannot serve the case on this device, None when it can."""

    def prepare(self, case: Case, device: Device) -> Prepared:
        """Makes it ready. May compile. Called for cases that `supports` accepts only."""


def contenders(device: Device) -> list[Contender]:
    """All of them, flashgen first, then the peers that can be trusted as a reference first."""
    from benchmarks.suite.contenders.flex import Flex
    from benchmarks.suite.contenders.ours import flashgens
    from benchmarks.suite.contenders.sdpa import sdpas
    from benchmarks.suite.contenders.standard import Standard
    from benchmarks.suite.contenders.triton_fused import TritonFused

    return [*flashgens(device), *sdpas(), Flex(), TritonFused(), Standard()]
