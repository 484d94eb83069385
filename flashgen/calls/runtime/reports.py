"""Reports: how the result of a call was computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flashgen.kernels.codegen import Source
    from flashgen.kernels.compile import Binary
    from flashgen.kernels.planner import Plan
    from flashgen.shared.launch_facts import LaunchBlocks

Tensor = torch.Tensor


@dataclass(frozen=True)
class Report:
    """How one kernel ran, without its tensors.

    Attributes:
        backend: "gpu", "emulator", "tiled", or "none" when the result is defined without a kernel.
        arch: the architecture of the kernel, or whose tiles the CPU path uses.
        access_bytes, access_reason: bytes of one access to global memory, and the reason; 0 when
            there is no kernel.
        kernel: the `kernels.pipeline.Build` with plan, source and binary, or the kernel of an
            export; None when nothing was launched.
        counters: the counters of the emulator; None otherwise.
        build_seconds: duration of building the kernel or loading it from a cache.
        run_seconds: duration of the emulator or the CPU path; on a GPU, of queueing the launch.
        tables: reports of the kernels that made the min/max tables of a forward kernel.
        heads_reason: the reason for the number of heads in the tiles of a forward kernel; "" where
            there is no choice.
        blocks: for a persistent kernel, the number of its blocks with the reason; else None.
        arch_reason: the reason for the architecture of the call.
        table: for a kernel of a min/max table, the table: [levels, 2, lines, entries]. Entry i of
            level l is defined where i + 2^l <= entries.
        integers: "32-bit" or "64-bit" with the reason, for a kernel that has both forms; else "".
        split_size: the keys of a split; 0 where they are not split.
        run: with split keys, the neighbouring splits of a thread block that writes a part.
        merge: with split keys, the report of the kernel that merges the results over each split.
        columns: the columns of V that the kernel computes.
        others: the reports of the forward kernels of the other columns of V, where no tile holds
            all of them.
    """

    backend: str
    arch: str
    access_bytes: int
    access_reason: str
    kernel: Any = None
    counters: Any = None
    build_seconds: float = 0.0
    run_seconds: float = 0.0
    tables: tuple[Report, ...] = ()
    heads_reason: str = ""
    blocks: LaunchBlocks | None = None
    arch_reason: str = ""
    table: Tensor | None = None
    integers: str = ""
    split_size: int = 0
    run: int = 1
    merge: Report | None = None
    columns: int = 0
    others: tuple[Report, ...] = ()

    def for_run(
        self, kernel: Any, counters: Any, seconds: float, table: Tensor | None = None
    ) -> Report:
        """The report of another kernel of the call: the fields of a `KernelRun` in their places."""
        return replace(self, kernel=kernel, counters=counters, run_seconds=seconds, table=table)

    def html(self) -> str:
        """The kernels of the call as one HTML page: texts linked line by line, plans, resources.

        Returns:
            A document that loads nothing. It has the machine code where nvdisasm is installed, and
            heat maps where the call ran in the emulator.

        Raises:
            CompileError: nvdisasm cannot read a cubin.
        """
        from flashgen.tools.views.render import html_of
        from flashgen.tools.views.report_page import page_of

        return html_of(page_of(self))

    def _repr_html_(self) -> str:
        """The page in a frame, which notebooks show."""
        from flashgen.tools.views.render import notebook_html
        from flashgen.tools.views.report_page import page_of

        return notebook_html(page_of(self))


@dataclass(frozen=True)
class ForwardRun:
    """The result of a forward call, with its report.

    Attributes:
        out: [batch, heads_q, seq_q, head_dim_v], dtype of q; float32 for a partial result.
        lse: [batch, heads_q, seq_q], float32, natural log.
        rng: int64 [2], seed and offset of random numbers; None when there were none.
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
class TangentRun:
    """The tangents of the results of a call, with their reports.

    Attributes:
        out, lse: the tangents of these results, in their shapes and dtypes.
        reports, copies: as in `BackwardRun`.
    """

    out: Tensor
    lse: Tensor
    reports: tuple[Report, ...]
    copies: tuple[str, ...]


@dataclass(frozen=True)
class BackwardRun:
    """The gradients of a call, with their reports.

    Attributes:
        dq, dk, dv: shapes, dtype and order of axes of q, k and v.
        reports: one per launch, in the order of the launches; one without a kernel when there was
            no launch.
        copies: the operands that were copied because kernels cannot read their memory layout, each
            with the reason.
        deterministic: whether the gradients have the same bits in every run.
        captured: the gradient of each tensor that the spec declares with grad=True, in the shape
            and dtype of the tensor.
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
