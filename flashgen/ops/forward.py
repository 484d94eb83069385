"""One forward call: check, choose a kernel, build it, run it; for the operator and the commands."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashgen import arch as archs
from flashgen import config
from flashgen.ops import backends
from flashgen.ops.checks import Problem, check
from flashgen.pipeline import Build, build
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    from flashgen.compile import Binary
    from flashgen.plan import Plan
    from flashgen.render import Source

Tensor = torch.Tensor
Number = int | float | bool

DEFAULT_ARCH = "sm_80"
"""What the emulator runs when nobody says otherwise: the code path that works everywhere."""


@dataclass(frozen=True)
class Report:
    """What a call did, without its tensors.

    Attributes:
        backend: "gpu", "emulator", or "none" when the result is defined without a kernel.
        arch: that the kernel was made for.
        access_bytes, access_reason: how many bytes the kernel moves at once, and why.
        kernel: plan, source and binary; None when nothing was launched.
        counters: the emulator's; None on a GPU.
        build_seconds: until the binary was there, from any cache.
        run_seconds: of the emulator; on a GPU, of queueing the launch.
    """

    backend: str
    arch: str
    access_bytes: int
    access_reason: str
    kernel: Build | None = None
    counters: Any = None
    build_seconds: float = 0.0
    run_seconds: float = 0.0


@dataclass(frozen=True)
class ForwardRun:
    """The result of a call and how it came about.

    Attributes:
        out: [batch, heads_q, seq_q, head_dim_v], dtype of q.
        lse: [batch, heads_q, seq_q], float32, natural log.
    """

    out: Tensor
    lse: Tensor
    report: Report

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


def run_forward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scalars: Mapping[str, object] | None = None,
    scale: float | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    backend: str | None = None,
    arch: str | None = None,
    check_memory: bool = True,
) -> ForwardRun:
    """Runs the kernel of ``spec`` that fits these tensors. Arguments as in `flashgen.attention`.

    Args:
        check_memory: the emulator's checkers for memory and races.

    Raises:
        InputError: an argument is wrong; nothing has run then.
        FlashgenError: planning, compiling or running failed.
    """
    problem = check(
        spec, q, k, v, scale=scale, q_offset=q_offset, k_offset=k_offset, scalars=scalars or {}
    )
    where = backends.choose(backend, q.device)
    target = arch or config.arch() or _arch_of(where, q.device)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    out = _empty_like_q(q, problem)
    lse = torch.empty(
        problem.batch, problem.heads_q, problem.seq_q, dtype=torch.float32, device=q.device
    )
    if problem.is_empty:
        report = Report("none", target, 0, "nothing to launch: a size is 0")
        return ForwardRun(out.zero_(), lse.fill_(-math.inf), report)

    start = time.perf_counter()
    width, reason = backends.access_bytes(q, k, v, out)
    kernel = build(spec, target, access_bytes=width)
    built = time.perf_counter()

    values = _arguments(problem, q, k, v, out, lse)
    grid = kernel.plan.grid(
        problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q, problem.seq_k
    )
    counters = None
    if where == "emulator":
        counters = backends.emulate(kernel, grid, values, checkers=check_memory)
    else:
        backends.launch(kernel, grid, values, q.device)
    done = time.perf_counter()
    report = Report(where, target, width, reason, kernel, counters, built - start, done - built)
    return ForwardRun(out, lse, report)


def _arch_of(backend: str, device: torch.device) -> str:
    if backend == "emulator":
        return DEFAULT_ARCH
    from flashgen import launch

    index = device.index if device.index is not None else torch.cuda.current_device()
    return nearest_arch(launch.device_arch(index))


def nearest_arch(device: str) -> str:
    """The newest architecture known to flashgen whose code runs on ``device``, itself if known.

    A cubin runs on devices of its own major version from its minor version up.

    Raises:
        PlanError: there is none.
    """
    major, minor = device[:-1], int(device[-1])
    fitting = [name for name in archs.known() if name[:-1] == major and int(name[-1]) <= minor]
    return archs.facts(fitting[-1] if fitting else device).name


def _empty_like_q(q: Tensor, problem: Problem) -> Tensor:
    """Uninitialised output, with the order of axes that q has in memory.

    A q stored [batch, seq, heads, head_dim] gives an output stored like it, as torch's own
    attention does, so that ``out.transpose(1, 2).flatten(2)`` copies nothing; otherwise contiguous.
    """
    batch, heads, seq, dim = problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v
    if q.stride(1) < q.stride(2) and q.stride(1) != 0:
        return torch.empty(batch, seq, heads, dim, dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty(batch, heads, seq, dim, dtype=q.dtype, device=q.device)


def _arguments(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> list[object]:
    """Values for the kernel's ``struct Params``, in its order; tensors stand for their pointers."""
    return [
        *(q, k, v, out, lse),
        *(stride for tensor in (q, k, v, out) for stride in _steps(tensor)),
        *(problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q, problem.seq_k),
        *(problem.q_offset, problem.k_offset),
        problem.scale,
        *problem.scalars.values(),
    ]


def _steps(tensor: Tensor) -> list[int]:
    """Strides of batch, heads and rows; 0 for an axis of length 1, whose stride means nothing."""
    return [
        stride if size > 1 else 0
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    ]
