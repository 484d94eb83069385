"""The arrow from spec to binary: analyse, plan, render, compile. Each stage is one call.

``emit`` stops at the source and needs no compiler; ``build`` goes on to PTX and cubin and needs no GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen import render
from flashgen.analysis import Analysis, analyse
from flashgen.compile import Binary, compile
from flashgen.plan import Plan, plan
from flashgen.render import Source
from flashgen.spec import AttentionSpec

__all__ = ["Build", "Kernels", "build", "emit"]


@dataclass(frozen=True)
class Kernels:
    """The emitted files of one spec."""

    analysis: Analysis
    forward: Source


@dataclass(frozen=True)
class Build:
    """An emitted and compiled kernel: every stage can be looked at by name."""

    analysis: Analysis
    source: Source
    binary: Binary

    @property
    def plan(self) -> Plan:
        return self.source.plan

    @property
    def ptx(self) -> str:
        return self.binary.ptx

    @property
    def cubin(self) -> bytes:
        return self.binary.cubin


def emit(
    spec: AttentionSpec,
    arch: str = "sm_80",
    *,
    sram: int | None = None,
    policy: str = "derived",
    access_bytes: int | None = None,
) -> Kernels:
    """The CUDA source of ``spec``: deterministic, without compiler or GPU.

    Args:
        arch: "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120".
        sram: shared memory per block in bytes to plan for, instead of the architecture's.
        policy: "derived", or "paper" for Algorithm 1's block sizes.
        access_bytes: 16 for tensors whose addresses and strides are multiples of 16 bytes, the
            operand size for any other tensors.

    Raises:
        PlanError: no tile fits.
        RenderError: the template and the plan disagree.
    """
    analysis = analyse(spec)
    chosen = plan(spec, arch, sram=sram, policy=policy, access_bytes=access_bytes)
    return Kernels(analysis, render.forward(spec, analysis, chosen))


def build(
    spec: AttentionSpec,
    arch: str = "sm_80",
    *,
    sram: int | None = None,
    policy: str = "derived",
    access_bytes: int | None = None,
) -> Build:
    """``emit``, then NVRTC: ``.ptx``, ``.cubin``, ``.binary.resources``, ``.binary.log``.

    Args: those of ``emit``.

    Raises:
        PlanError, RenderError: as ``emit``.
        CompileError: NVRTC is missing or rejects the source.
    """
    return _build(spec, arch, sram, policy, access_bytes)


@functools.lru_cache(maxsize=512)
def _build(
    spec: AttentionSpec, arch: str, sram: int | None, policy: str, access_bytes: int | None
) -> Build:
    kernels = emit(spec, arch, sram=sram, policy=policy, access_bytes=access_bytes)
    source = kernels.forward
    binary = compile(source.text, filename=source.filename, kernel=source.name, arch=arch)
    return Build(kernels.analysis, source, binary)
