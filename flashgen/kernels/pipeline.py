"""From a spec to binaries: analyse, plan, render, compile. Each stage is one call.

``emit`` stops after the source and needs no compiler; ``build`` and ``build_backward`` continue to
cubins, without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from flashgen.kernels import codegen
from flashgen.kernels.built_kernel import Build
from flashgen.kernels.codegen import Source
from flashgen.kernels.compile import compile, override
from flashgen.kernels.enough_registers import with_enough_registers
from flashgen.kernels.planner import (
    NO_TILES,
    BackwardPlan,
    BackwardPlanRequest,
    Plan,
    PlanRequest,
    TangentPlanRequest,
    Tile,
    parts_pay,
    plan_forward,
    plan_merge,
    plan_rows,
    plan_schemes,
    plan_tangent,
    tangents_of,
)
from flashgen.shared import config
from flashgen.shared.arch import DEFAULT_ARCH, GpuMemory, facts
from flashgen.shared.call import CallRanges
from flashgen.shared.errors import CompileError, PlanError, SpecError, called_by_users
from flashgen.shared.launch_facts import Sizes
from flashgen.spec.analysis import Analysis, analyse
from flashgen.spec.analysis.intervals import WalkedAxis
from flashgen.spec.language.signature import with_options
from flashgen.spec.language.spec import AttentionSpec

__all__ = [
    "Build",
    "Kernels",
    "analysed",
    "build",
    "build_backward",
    "build_merge",
    "build_minmax_tables",
    "build_tangent",
    "built",
    "emit",
    "plan_backward_of_call",
]

Request = PlanRequest | BackwardPlanRequest | TangentPlanRequest

_WAIT = "griddepcontrol.wait"


@dataclass(frozen=True)
class Kernels:
    """The emitted files of one spec; the files of the backward pass are made at their first use.

    Attributes:
        minmax_tables: kernels that run once per call, before all others: they make the min/max
            tables of the tensors by which a mask skips tiles.
    """

    analysis: Analysis
    minmax_tables: tuple[Source, ...]
    forward: Source
    _backward: BackwardPlanRequest = field(repr=False, compare=False)

    def tangent(self, tangents: tuple[str, ...] | None = None) -> Source:
        """The file of the kernel that computes the tangents of the results, in forward mode.

        Args:
            tangents: the names of the tensors that have a tangent, of "q", "k", "v" and the learned
                tensors, in this order; None for all of them.

        Raises:
            PlanError: no tile fits the architecture, or the names are others.
            SpecError: the spec has no derivative, because it is a partial result.
        """
        request = self._backward
        names = tangents or tangents_of(request.spec)
        return _emit(TangentPlanRequest(request.spec, request.arch, names, request.sram))[0]

    @functools.cached_property
    def backward(self) -> tuple[Source, ...]:
        """The files of the backward kernels, in the order of their launches.

        Raises:
            PlanError: no tile fits the architecture.
        """
        return _emit(self._backward)


@called_by_users()
def emit(
    spec: AttentionSpec,
    arch: str = DEFAULT_ARCH,
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
    """Emits the CUDA sources of ``spec``: the same bytes each time, without compiler or GPU.

    Args:
        spec: the variant to emit.
        arch: one of `flashgen.shared.arch.KNOWN`, such as "sm_90a".
        sram: shared memory per block in bytes to plan for, instead of the architecture's.
        policy: "derived", or "paper" for the block sizes of Algorithm 1 of FlashAttention (Dao et
            al., 2022) in the forward kernel.
        access_bytes: 16 for tensors whose addresses and strides are multiples of 16 bytes, the
            operand size in bytes for all others. Backward kernels always use 16.
        spare_registers: registers per thread that the forward plan leaves free beyond the number
            that its model predicts.
        deterministic: whether backward kernels add in a fixed order.
        tile: tile of the forward kernel, instead of the policy's.
        tiles: tiles of backward kernels by kernel name, instead of the cheapest ones.
        heads_per_tile: query heads that share a tile of the forward kernel, as in `flashgen.plan`.

    Returns:
        The sources: ``.forward``, ``.backward`` (a tuple in launch order, made when it is first
        read) and ``.minmax_tables``. Each has ``.text`` and ``.filename``.

    Raises:
        PlanError: no tile fits the architecture, or no tile has this number of heads.
        RenderError: a template and the plan disagree.
    """
    request = PlanRequest(
        spec, arch, sram, policy, access_bytes, spare_registers, tile, heads_per_tile
    )
    spec = request.spec
    (forward,) = _emit(request)
    return Kernels(
        analysed(spec, codegen.walk_of_kernel("forward")),
        _emit_minmax_tables(spec, arch),
        forward,
        BackwardPlanRequest(spec, arch, sram, deterministic, tiles=_pairs(tiles)),
    )


def _planned(request: Request) -> Plan | BackwardPlan:
    if isinstance(request, BackwardPlanRequest):
        return plan_schemes(request)
    return (
        plan_tangent(request) if isinstance(request, TangentPlanRequest) else plan_forward(request)
    )


@functools.lru_cache(maxsize=192)
def _emit(request: Request, wide: bool = False) -> tuple[Source, ...]:
    """The files of the kernels that a request is for, in the order of their launches.

    Args:
        wide: whether mask and score have integers of 64 bits.
    """
    chosen, spec = _planned(request), request.spec
    config.log(1, str(chosen))
    sources = []
    for plan in chosen.kernels if isinstance(chosen, BackwardPlan) else (chosen,):
        analysis = analysed(spec, codegen.walk_of_kernel(plan.kernel))
        # Printing the expressions takes longer than the analysis.
        if isinstance(request, PlanRequest) and config.debug_level() >= 3:
            config.log(3, str(analysis))
        bits = 64 if wide and not plan.streams else 32
        sources.append(codegen.emitted(spec, analysis, replace(plan, integer_bits=bits)))
    for source in sources:
        config.log(4, source.text)
    return tuple(sources)


def _emit_minmax_tables(spec: AttentionSpec, arch: str) -> tuple[Source, ...]:
    """The kernels of the min/max tables that any kernel of ``spec`` reads."""
    walks = {codegen.walk_of_kernel(role) for role in ("forward", "dkdv")}
    read = {table for walk in walks for table in analysed(spec, walk).mask.minmax_tables}
    return tuple(
        codegen.minmax_table(spec, tensor, axis, plan_rows("minmax_table", spec, arch))
        for tensor in spec.tensors
        for axis in range(len(tensor.dims))
        if (tensor.symbol, axis) in read
    )


def _pairs(tiles: Mapping[str, Tile]) -> tuple[tuple[str, Tile], ...]:
    return tuple(sorted(tiles.items()))


@functools.lru_cache(maxsize=512)
def analysed(spec: AttentionSpec, walk: WalkedAxis) -> Analysis:
    """The analysis of a spec for the kernels that walk this axis, made once."""
    return analyse(spec, walk)


@called_by_users()
def build(
    spec: AttentionSpec,
    arch: str = DEFAULT_ARCH,
    *,
    sram: int | None = None,
    policy: str = "derived",
    access_bytes: int | None = None,
    tile: Tile | None = None,
    heads_per_tile: int = 1,
    ranges: CallRanges | None = None,
) -> Build:
    """Emits the forward kernel of ``spec`` and compiles it by NVRTC, without a GPU.

    If the compiler spills registers, the plan is made again with more spare registers, which gives
    a smaller tile; the derivation shows them. A given tile is kept, as is that of calls with split
    keys or pages, which all have one; spills are in the warnings.

    Args:
        spec: the variant to build.
        arch: as in `flashgen.emit`, like all other arguments.
        sram: shared memory per block in bytes.
        policy: "derived" or "paper".
        access_bytes: 16, or the operand size in bytes.
        tile: tile of the kernel, instead of the policy's.
        heads_per_tile: number of query heads that share one tile.
        ranges: the sizes, offsets and scalars of a call, which may need integers of 64 bits; None
            for a call whose values are within int32.

    Returns:
        ``.ptx`` (text), ``.cubin`` (bytes), ``.plan``, ``.source``, ``.binary.resources``
        (registers per thread; shared memory, stack, spills and code in bytes) and ``.binary.log``.

    Raises:
        PlanError: no tile fits.
        RenderError: a template and the plan disagree.
        CompileError: NVRTC is missing or rejects the source.
    """
    request = PlanRequest(spec, arch, sram, policy, access_bytes, 0, tile, heads_per_tile)
    return built(request, ranges)[0]


@called_by_users()
def built(request: Request, ranges: CallRanges | None = None) -> tuple[Build, ...]:
    """The compiled kernels of a request, in the order of their launches; ``ranges`` as in `build`.

    Raises:
        PlanError, RenderError, CompileError: as `build`.
    """
    return _build(request, _needs_wide(request, ranges))


def _needs_wide(request: Request, ranges: CallRanges | None) -> bool:
    """Whether a kernel with 32-bit integers cannot serve a call."""
    if ranges is None or not _beyond_int32(request, ranges.rounded()):
        return False
    return bool(_beyond_int32(request, ranges))


@functools.lru_cache(maxsize=1024)
def _beyond_int32(request: Request, ranges: CallRanges) -> str:
    """The first expression of these kernels that may exceed int32; "" where none may."""
    texts = (codegen.beyond_int32(source.assumptions, ranges) for source in _emit(request))
    return next((text for text in texts if text), "")


@override.cached(maxsize=1536)
def _build(request: Request, wide: bool) -> tuple[Build, ...]:
    """The kernels of a request, compiled, with plans that leave the compiler enough registers."""
    names = _names(request.spec, request.arch)

    def build_with(spare: Mapping[str, int]) -> tuple[Build, ...]:
        if isinstance(request, BackwardPlanRequest):
            attempt: Request = replace(request, spare_registers=tuple(spare.items()))
        else:
            attempt = replace(request, spare_registers=sum(spare.values()))
        return tuple(
            compiled(source, analysed(request.spec, codegen.walk_of_kernel(source.role)), names)
            for source in _emit(attempt, wide)
        )

    # A given tile is kept, and so is the one tile of all served calls.
    if isinstance(request, BackwardPlanRequest):
        fixed_roles: Container[str] = dict(request.tiles)
    else:
        is_served = isinstance(request, PlanRequest) and request.spec.is_served
        fixed_roles = ("forward", "tangent") if is_served or request.tile is not None else ()
    return with_enough_registers(build_with, fixed_roles)


@override.cached(maxsize=512)
def build_minmax_tables(spec: AttentionSpec, arch: str = DEFAULT_ARCH) -> tuple[Build, ...]:
    """The compiled kernels that make min/max tables of captured tensors; empty for most specs.

    Raises:
        PlanError, RenderError, CompileError: as ``build``.
    """
    analysis = analysed(spec, codegen.walk_of_kernel("forward"))
    names = _names(spec, arch)
    return tuple(compiled(source, analysis, names) for source in _emit_minmax_tables(spec, arch))


@override.cached(maxsize=64)
def build_merge(
    head_dim_v: int,
    dtype: str,
    arch: str = DEFAULT_ARCH,
    *,
    splits: bool = False,
    normalize: str = "softmax",
) -> Build:
    """The compiled kernel that merges partial results into an output of this dtype.

    Args:
        splits: as for `flashgen.kernels.planner.plan_merge`.
        normalize: the divisor of the spec, a name.

    Raises:
        SpecError: there is no kernel for the head dim or the dtype.
        PlanError, RenderError, CompileError: as ``build``.
    """
    name = "merge" if normalize == "softmax" else f"merge_{normalize}"
    spec = AttentionSpec(head_dim=head_dim_v, dtype=dtype, name=name)
    spec = with_options(spec, normalize=normalize)
    source = codegen.merge(spec, plan_merge(spec, arch, splits=splits))
    return compiled(source, analysed(spec, codegen.walk_of_kernel(source.role)))


@override.cached(maxsize=64)
def build_add_rows(dtype: str, arch: str = DEFAULT_ARCH) -> Build:
    """The compiled kernel that adds rows of this dtype to sums in float32, in a fixed order.

    Raises:
        PlanError, RenderError, CompileError: as ``build``.
    """
    spec = AttentionSpec(head_dim=64, dtype=dtype, name="add_rows")
    source = codegen.add_rows(spec, plan_rows("add_rows", spec, arch))
    return compiled(source, analysed(spec, codegen.walk_of_kernel(source.role)))


def build_backward(
    spec: AttentionSpec,
    arch: str = DEFAULT_ARCH,
    *,
    sram: int | None = None,
    deterministic: bool = False,
    tiles: Mapping[str, Tile] = NO_TILES,
    ranges: CallRanges | None = None,
    sizes: Sizes | None = None,
    memory: GpuMemory | None = None,
) -> tuple[Build, ...]:
    """The backward kernels of ``spec``, compiled, in the order of their launches.

    As in ``build``, the plan is made again with spare registers where the compiler spills.

    Args: those of ``emit``; ``ranges`` as for ``build``. ``sizes`` are those of a call, whose
    groups of query heads may be divided; ``memory`` as for ``divides_groups``.

    Raises:
        PlanError, RenderError, CompileError: as ``build``.
    """
    request = BackwardPlanRequest(spec, arch, sram, deterministic, tiles=_pairs(tiles))
    if sizes is not None:
        request = replace(request, in_parts=divides_groups(request, sizes, memory))
    return built(request, ranges)


def build_tangent(
    spec: AttentionSpec,
    arch: str = DEFAULT_ARCH,
    tangents: tuple[str, ...] | None = None,
    *,
    sram: int | None = None,
    tile: Tile | None = None,
    ranges: CallRanges | None = None,
) -> Build:
    """The compiled kernel that computes the tangents of O and LSE.

    As in ``build``, the plan is made again with spare registers where the compiler spills.

    Args:
        tangents: the names of the tensors that have a tangent, as for `Kernels.tangent`.
        sram, tile, ranges: as for ``build``.

    Raises:
        PlanError, SpecError, RenderError, CompileError: as ``build`` and `Kernels.tangent`.
    """
    names = tangents or tangents_of(spec)
    request = TangentPlanRequest(spec, arch, names, sram, tile=tile)
    return built(request, ranges)[0]


def plan_backward_of_call(
    spec: AttentionSpec,
    arch: str,
    sizes: Sizes,
    *,
    sram: int | None = None,
    deterministic: bool = False,
) -> BackwardPlan:
    """The plan of ``build_backward`` for a call of these sizes.

    Raises:
        PlanError, SpecError: as `flashgen.kernels.planner.plan_backward`.
    """
    request = BackwardPlanRequest(spec, arch, sram, deterministic)
    return plan_schemes(replace(request, in_parts=divides_groups(request, sizes)))


def divides_groups(
    request: BackwardPlanRequest, sizes: Sizes, memory: GpuMemory | None = None
) -> bool:
    """Whether blocks own parts of a group of query heads in a call of these sizes.

    A mask must give them different numbers of tiles. Then they do where L2 has no room for whole
    groups (`LaunchRules.part_heads`), and where that takes longer than the sums of the parts.

    Args:
        memory: the memory of the GPU; None for the architecture's product.
    """
    _, heads_q, heads_kv, *_ = sizes
    if not 0 < heads_kv < heads_q:
        return False
    plan = plan_schemes(request).key_plan
    if not plan.divides_groups or plan.part_heads(*sizes) >= heads_q // heads_kv:
        return False
    if analysed(request.spec, codegen.walk_of_kernel(plan.kernel)).mask.growth == 0:
        return False
    memory = memory or facts(request.arch).memory
    return parts_pay(plan, sizes, memory, packed=request.spec.packed)


def _names(spec: AttentionSpec, arch: str) -> Callable[[], tuple[str, ...]]:
    """The names of the files that are emitted for a spec, when they are asked for."""

    def names() -> tuple[str, ...]:
        sources = []
        for deterministic in (False, True):
            with suppress(PlanError, SpecError):
                kernels = emit(spec, arch, deterministic=deterministic)
                sources += [kernels.forward, *kernels.minmax_tables]
                sources += kernels.backward
        for alone in ("", "queries"):
            with suppress(PlanError, SpecError):
                sources += _emit(BackwardPlanRequest(spec, arch, in_parts=not alone, alone=alone))
        return tuple(dict.fromkeys(source.filename for source in sources))

    return names


def compiled(
    source: Source, analysis: Analysis, names: Callable[[], tuple[str, ...]] | None = None
) -> Build:
    """The kernel of an emitted file.

    Args:
        names: the names of all files of its spec; None for a kernel that specs share.

    Raises:
        CompileError: as `compile`; or an edited kernel does not wait for the launch before it.
    """
    binary = compile(
        source.text,
        filename=source.filename,
        kernel=source.name,
        arch=source.plan.arch,
        options=source.options,
        others=names,
    )
    if source.plan.overlaps and _WAIT not in binary.ptx:
        raise CompileError(
            f"the edited kernel {source.name} does not wait for the kernel before it",
            where=f"environment, FLASHGEN_OVERRIDE: {source.filename}",
            numbers=f"no {_WAIT} in its PTX; it is launched before that kernel ends",
            way_out=f'asm volatile("{_WAIT};" ::: "memory"); as its first statement',
        )
    return Build(analysis, source, binary)
