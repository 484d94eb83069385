"""What calls give besides tensors: how the result came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashgen.pipeline import Build

if TYPE_CHECKING:
    from flashgen.compile import Binary
    from flashgen.plan import Plan
    from flashgen.plan.jobs import Blocks
    from flashgen.render import Source

Tensor = torch.Tensor


@dataclass(frozen=True)
class Report:
    """What a kernel did, without its tensors.

    Attributes:
        backend: "gpu", "emulator", "tiled", or "none" when the result is defined without a kernel.
        arch: that the kernel was made for, or whose tiles the tiled algorithms use.
        access_bytes, access_reason: how many bytes the kernel moves at once, and why; 0 when there
            is no kernel.
        kernel: plan, source and binary; None when nothing was launched.
        counters: the emulator's; None otherwise.
        build_seconds: until the binary was there, from any cache.
        run_seconds: of the emulator or the tiled algorithms; on a GPU, of queueing the launch.
        tables: of the kernels that ran before a forward kernel, for its tables of extremes of
            captured tensors.
        heads_reason: of a forward kernel, why its tiles have so many heads as its plan says; ""
            where nothing else was in question.
        blocks: of a kernel whose blocks take jobs, how many there are, and why; else None.
    """

    backend: str
    arch: str
    access_bytes: int
    access_reason: str
    kernel: Build | None = None
    counters: Any = None
    build_seconds: float = 0.0
    run_seconds: float = 0.0
    tables: tuple[Report, ...] = ()
    heads_reason: str = ""
    blocks: Blocks | None = None


@dataclass(frozen=True)
class ForwardRun:
    """The result of a call and how it came about.

    Attributes:
        out: [batch, heads_q, seq_q, head_dim_v], dtype of q.
        lse: [batch, heads_q, seq_q], float32, natural log.
        rng: int64 [2], the dropout's seed and offset; None when nothing was dropped.
    """

    out: Tensor
    lse: Tensor
    report: Report
    rng: Tensor | None = None

    @property
    def backend(self) -> str:
        return self.report.backend

    @property
    def arch(self) -> str:
        return self.report.arch

    @property
    def counters(self) -> Any:
        return self.report.counters

    @property
    def plan(self) -> Plan | None:
        return self.report.kernel.plan if self.report.kernel else None

    @property
    def source(self) -> Source | None:
        return self.report.kernel.source if self.report.kernel else None

    @property
    def binary(self) -> Binary | None:
        return self.report.kernel.binary if self.report.kernel else None


@dataclass(frozen=True)
class BackwardRun:
    """The gradients of a call and how they came about.

    Attributes:
        dq, dk, dv: shapes, dtype and order of axes of q, k and v.
        reports: one per launch, in their order; one without a kernel when none was launched.
        copies: what was copied first because kernels cannot read it as it lies, and why.
        deterministic: whether equal bits in every run were asked for.
        captured: the gradient of each tensor that the spec declares with grad=True, of the shape
            and dtype of the one given.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    reports: tuple[Report, ...]
    copies: tuple[str, ...]
    deterministic: bool
    captured: tuple[Tensor, ...] = ()

    @property
    def backend(self) -> str:
        return self.reports[0].backend

    @property
    def arch(self) -> str:
        return self.reports[0].arch
