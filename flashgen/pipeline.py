"""The arrow from spec to binary: analyse, plan, render, compile. Each stage is one call.

``emit`` stops at the source and needs no compiler; ``build`` goes on to cubin, without a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen import config, render
from flashgen.analysis import Analysis, analyse
from flashgen.compile import Binary, compile
from flashgen.errors import PlanError
from flashgen.plan import Plan, plan
from flashgen.render import Source
from flashgen.spec import AttentionSpec

__all__ = ["Build", "Kernels", "build", "emit"]

# How many registers to keep free, in turn, until the compiler spills none.
SPARE_REGISTERS = (0, 16, 32, 64, 96)


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
    spare_registers: int = 0,
) -> Kernels:
    """The CUDA source of ``spec``: deterministic, without compiler or GPU.

    Args:
        arch: "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120".
        sram: shared memory per block in bytes to plan for, instead of the architecture's.
        policy: "derived", or "paper" for Algorithm 1's block sizes.
        access_bytes: 16 for tensors whose addresses and strides are multiples of 16 bytes, the
            operand size for any other tensors.
        spare_registers: per thread, kept free beyond what the plan's model asks for.

    Raises:
        PlanError: no tile fits.
        RenderError: the template and the plan disagree.
    """
    analysis = analyse(spec)
    chosen = plan(
        spec,
        arch,
        sram=sram,
        policy=policy,
        access_bytes=access_bytes,
        spare_registers=spare_registers,
    )
    config.tell(1, str(chosen))
    if config.debug_level() >= 3:  # printing expressions takes longer than making them
        config.tell(3, str(analysis))
    kernels = Kernels(analysis, render.forward(spec, analysis, chosen))
    config.tell(4, kernels.forward.text)
    return kernels


def build(
    spec: AttentionSpec,
    arch: str = "sm_80",
    *,
    sram: int | None = None,
    policy: str = "derived",
    access_bytes: int | None = None,
) -> Build:
    """``emit``, then NVRTC: ``.ptx``, ``.cubin``, ``.binary.resources``, ``.binary.log``.

    The plan's model of registers covers ordinary score functions. When the compiler spills all the
    same, the plan is made again with registers to spare, which gives a smaller tile; the plan's
    own derivation shows them.

    Args: those of ``emit``, but for spare_registers.

    Raises:
        PlanError, RenderError: as ``emit``.
        CompileError: NVRTC is missing or rejects the source.
    """
    return _build(spec, arch, sram, policy, access_bytes)


@functools.lru_cache(maxsize=512)
def _build(
    spec: AttentionSpec, arch: str, sram: int | None, policy: str, access_bytes: int | None
) -> Build:
    best: Build | None = None
    for spare in SPARE_REGISTERS:
        try:
            kernels = emit(
                spec,
                arch,
                sram=sram,
                policy=policy,
                access_bytes=access_bytes,
                spare_registers=spare,
            )
        except PlanError:
            if best is None:
                raise
            break  # no smaller tile is left: what was found spills, and its warnings say so
        source = kernels.forward
        binary = compile(source.text, filename=source.filename, kernel=source.name, arch=arch)
        spilled = binary.resources.spill_store_bytes
        if best is None or spilled < best.binary.resources.spill_store_bytes:
            best = Build(kernels.analysis, source, binary)
        if not spilled:
            break
        config.tell(1, f"flashgen: {source.name} spills {spilled} B with {spare} spare registers")
    assert best is not None, "the first round gives a build or raises"
    return best
