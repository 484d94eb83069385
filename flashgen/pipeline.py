"""The arrow from spec to binary: analyse, plan, render, compile. Each stage is one call.

``emit`` stops at the source and needs no compiler; ``build`` and ``build_backward`` go on to
cubins, without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flashgen import config, render
from flashgen.analysis import Analysis, Walk, analyse
from flashgen.compile import Binary, compile
from flashgen.errors import PlanError
from flashgen.plan import NO_TILES, Plan, Tile, plan, plan_backward, plan_summary
from flashgen.render import Source
from flashgen.spec import AttentionSpec

__all__ = ["Build", "Kernels", "build", "build_backward", "build_summaries", "emit"]

# How many registers to keep free, in turn, until the compiler spills none.
SPARE_REGISTERS = (0, 16, 32, 64, 96)


@dataclass(frozen=True)
class Kernels:
    """The emitted files of one spec; the backward's are made when they are first asked for.

    Attributes:
        summaries: kernels that run once per call, before all others: they make tables of the
            tensors by which a mask skips tiles.
    """

    analysis: Analysis
    summaries: tuple[Source, ...]
    forward: Source
    _backward: Callable[[], tuple[Source, ...]] = field(repr=False, compare=False)

    @functools.cached_property
    def backward(self) -> tuple[Source, ...]:
        """In the order of their launches.

        Raises:
            PlanError: no tile fits.
        """
        return self._backward()


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
    deterministic: bool = False,
    tile: Tile | None = None,
    tiles: Mapping[str, Tile] = NO_TILES,
    heads_per_tile: int = 1,
) -> Kernels:
    """The CUDA sources of ``spec``: the same each time, without compiler or GPU.

    Args:
        arch: "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120".
        sram: shared memory per block in bytes to plan for, instead of the architecture's.
        policy: "derived", or "paper" for Algorithm 1's block sizes in the forward kernel.
        access_bytes: 16 for tensors whose addresses and strides are multiples of 16 bytes, the
            operand size for any other tensors. Backward kernels take 16 only.
        spare_registers: per thread, kept free beyond what the forward plan's model asks for.
        deterministic: backward kernels that add in a fixed order.
        tile: of the forward kernel, instead of the policy's.
        tiles: of backward kernels by their names, instead of the cheapest.
        heads_per_tile: of the forward kernel; as for `flashgen.plan`.

    Raises:
        PlanError: no tile fits, or none with so many heads.
        RenderError: the template and the plan disagree.
    """
    analysis = _analysed(spec, render.walk_of_kernel("forward"))
    chosen = plan(
        spec,
        arch,
        sram=sram,
        policy=policy,
        access_bytes=access_bytes,
        spare_registers=spare_registers,
        tile=tile,
        heads_per_tile=heads_per_tile,
    )
    config.tell(1, str(chosen))
    if config.debug_level() >= 3:  # printing expressions takes longer than making them
        config.tell(3, str(analysis))
    source = render.forward(spec, analysis, chosen)
    config.tell(4, source.text)
    summaries = _emit_summaries(spec, arch)
    return Kernels(
        analysis,
        summaries,
        source,
        lambda: _emit_backward(spec, arch, sram, deterministic, {}, tiles),
    )


def _emit_summaries(spec: AttentionSpec, arch: str) -> tuple[Source, ...]:
    """The kernels of the tables that any kernel of ``spec`` reads."""
    walks = {render.walk_of_kernel(role) for role in ("forward", "dkdv")}
    asked = {each for walk in walks for each in _analysed(spec, walk).mask.summarised}
    return tuple(
        render.summary(spec, tensor, axis, plan_summary(spec, arch))
        for tensor in spec.tensors
        for axis in range(len(tensor.dims))
        if (tensor.symbol, axis) in asked
    )


def _emit_backward(
    spec: AttentionSpec,
    arch: str,
    sram: int | None,
    deterministic: bool,
    spare_registers: Mapping[str, int],
    tiles: Mapping[str, Tile],
) -> tuple[Source, ...]:
    chosen = plan_backward(
        spec,
        arch,
        sram=sram,
        deterministic=deterministic,
        spare_registers=spare_registers,
        tiles=tiles,
    )
    config.tell(1, str(chosen))
    sources = tuple(
        render.backward(spec, _analysed(spec, render.walk_of_kernel(kernel.kernel)), kernel)
        for kernel in chosen.kernels
    )
    for source in sources:
        config.tell(4, source.text)
    return sources


@functools.lru_cache(maxsize=512)
def _analysed(spec: AttentionSpec, walk: Walk) -> Analysis:
    return analyse(spec, walk)


def build(
    spec: AttentionSpec,
    arch: str = "sm_80",
    *,
    sram: int | None = None,
    policy: str = "derived",
    access_bytes: int | None = None,
    tile: Tile | None = None,
    heads_per_tile: int = 1,
) -> Build:
    """``emit``, then NVRTC: ``.ptx``, ``.cubin``, ``.binary.resources``, ``.binary.log``.

    The plan's model of registers covers ordinary score functions. When the compiler spills all the
    same, the plan is made again with registers to spare, which gives a smaller tile; the plan's
    own derivation shows them. A given tile stays as it is: the binary's warnings say what spills.

    Args: those of ``emit`` that are not for the backward pass, but for spare_registers.

    Raises:
        PlanError, RenderError: as ``emit``.
        CompileError: NVRTC is missing or rejects the source.
    """
    return _build(spec, arch, sram, policy, access_bytes, tile, heads_per_tile)


@functools.lru_cache(maxsize=512)
def _build(
    spec: AttentionSpec,
    arch: str,
    sram: int | None,
    policy: str,
    access_bytes: int | None,
    tile: Tile | None,
    heads_per_tile: int,
) -> Build:
    best: Build | None = None
    for spare in SPARE_REGISTERS if tile is None else (0,):
        try:
            kernels = emit(
                spec,
                arch,
                sram=sram,
                policy=policy,
                access_bytes=access_bytes,
                spare_registers=spare,
                tile=tile,
                heads_per_tile=heads_per_tile,
            )
        except PlanError:
            if best is None:
                raise
            break  # no smaller tile is left: what was found spills, and its warnings say so
        made = _compiled(kernels.forward, kernels.analysis)
        if best is None or _spilled(made) < _spilled(best):
            best = made
        if not _spilled(made):
            break
        _tell_spill(made, spare)
    assert best is not None, "the first round gives a build or raises"
    return best


def build_summaries(spec: AttentionSpec, arch: str = "sm_80") -> tuple[Build, ...]:
    """The kernels that make tables of captured tensors, compiled; none for most specs.

    Raises:
        PlanError, RenderError, CompileError: as ``build``.
    """
    return _build_summaries(spec, arch)


@functools.lru_cache(maxsize=512)
def _build_summaries(spec: AttentionSpec, arch: str) -> tuple[Build, ...]:
    analysis = _analysed(spec, render.walk_of_kernel("forward"))
    return tuple(_compiled(source, analysis) for source in _emit_summaries(spec, arch))


def build_backward(
    spec: AttentionSpec,
    arch: str = "sm_80",
    *,
    sram: int | None = None,
    deterministic: bool = False,
    tiles: Mapping[str, Tile] = NO_TILES,
) -> tuple[Build, ...]:
    """The backward kernels of ``spec``, compiled, in the order of their launches.

    As in ``build``, the plan is made again with registers to spare where the compiler spills.

    Args: those of ``emit``.

    Raises:
        PlanError, RenderError, CompileError: as ``build``.
    """
    return _build_backward(spec, arch, sram, deterministic, tuple(sorted(tiles.items())))


@functools.lru_cache(maxsize=512)
def _build_backward(
    spec: AttentionSpec,
    arch: str,
    sram: int | None,
    deterministic: bool,
    tiles: tuple[tuple[str, Tile], ...],
) -> tuple[Build, ...]:
    given = dict(tiles)
    spare: dict[str, int] = {}
    best: tuple[Build, ...] | None = None
    while True:
        try:
            sources = _emit_backward(spec, arch, sram, deterministic, dict(spare), given)
        except PlanError:
            if best is None:
                raise
            return best  # no smaller tile is left: what was found spills, and its warnings say so
        made = tuple(
            _compiled(source, _analysed(spec, render.walk_of_kernel(source.role)))
            for source in sources
        )
        if best is None or sum(map(_spilled, made)) < sum(map(_spilled, best)):
            best = made
        spilling = [build for build in made if _spilled(build) and build.source.role not in given]
        for build in spilling:
            role = build.source.role
            _tell_spill(build, spare.get(role, 0))
            larger = [n for n in SPARE_REGISTERS if n > spare.get(role, 0)]
            if not larger:
                return best
            spare[role] = larger[0]
        if not spilling:
            return made


def _compiled(source: Source, analysis: Analysis) -> Build:
    arch = source.plan.arch
    binary = compile(source.text, filename=source.filename, kernel=source.name, arch=arch)
    return Build(analysis, source, binary)


def _spilled(build: Build) -> int:
    return build.binary.resources.spill_store_bytes


def _tell_spill(build: Build, spare: int) -> None:
    name, spilled = build.source.name, _spilled(build)
    config.tell(1, f"flashgen: {name} spills {spilled} B with {spare} spare registers")
