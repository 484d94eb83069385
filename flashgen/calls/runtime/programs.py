"""The programs that run the calls of one spec: signature, target, and compiled kernels.

The runtime asks a `CallProgram` for all of it. The program of an AttentionSpec plans and compiles
kernels when they are first needed; the program of an export has them in files.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from flashgen.calls.runtime.backends import Target, target_of
from flashgen.calls.runtime.bind_arguments import heads_of_call
from flashgen.calls.runtime.tuned_tiles import remembered
from flashgen.calls.trust import Decision
from flashgen.shared.arch import GpuMemory, portable
from flashgen.shared.call import CallRanges, CheckedCall, LaunchOptions
from flashgen.shared.dtypes import OPERAND_DTYPES, dtype_name
from flashgen.shared.launch_facts import Sizes
from flashgen.shared.signature import SPLIT, CallSignature

if TYPE_CHECKING:
    from flashgen.kernels.compile import Binary
    from flashgen.kernels.planner import Tile
    from flashgen.shared.launch_facts import LaunchBlocks, LaunchFacts
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

MANY_ROWS = 256
"""Rows of a sequence from which on the empty rows of its last tile do not choose the tile."""


class LaunchableKernel(Protocol):
    """A compiled kernel with the facts of its launches: a `kernels.pipeline.Build`, for one."""

    @property
    def facts(self) -> LaunchFacts: ...
    @property
    def binary(self) -> Binary: ...
    def blocks(
        self, work_tiles: int, sms: int | None = None, requested: int | None = None
    ) -> LaunchBlocks:
        """The blocks of a launch, as `flashgen.shared.launch_facts.LaunchRules.blocks_of`."""

    def integers(self, ranges: CallRanges) -> str:
        """The width of integers in a call in words; "" where the kernel has one form."""


class ForwardRequest(NamedTuple):
    """The facts on which the choice of a forward kernel depends.

    Attributes:
        arch: the architecture whose kernels can read the operands.
        access_bytes: 16, or the operand size in bytes.
        call: the checked call.
        captured: the captured tensors by name, including the tensors of a block layout.
        launch: the options of planning, with tuned tiles.
        ranges: the values that integers of mask and score are made of.
    """

    arch: str
    access_bytes: int
    call: CheckedCall
    captured: Mapping[str, Tensor]
    launch: LaunchOptions
    ranges: CallRanges


class Variant(NamedTuple):
    """The variant of a spec that a call needs, in constants of a traced graph.

    Attributes:
        dtype: the dtype of autocast; None outside of it, and where the spec has no dtype.
        offsets: the result of `flashgen.calls.runtime.arguments.positions.dtypes_of`.
        part: the names of the scalars of a call on a part of a whole, or with split keys.
        packs: whether a call with a paged cache has packed queries.
    """

    dtype: torch.dtype | None = None
    offsets: tuple[tuple[str, str], ...] = ()
    part: tuple[str, ...] = ()
    packs: bool = False


class CallProgram(abc.ABC):
    """A program that runs the calls of one spec or of one of its variants."""

    @property
    @abc.abstractmethod
    def signature(self) -> CallSignature:
        """The arguments of calls."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """A hash of all that determines the kernels, the same in every process."""

    @abc.abstractmethod
    def target(self, backend: str | None, arch: str | None, device: torch.device) -> Target:
        """The backend, architecture and device of a call, as `target_of`."""

    def with_dtype(self, dtype: object) -> CallProgram:
        """The program for calls whose q has this dtype, where the spec has none of its own."""
        return self

    @abc.abstractmethod
    def without_dropout(self) -> CallProgram:
        """The program with kernels that drop nothing."""

    @abc.abstractmethod
    def learning(self, names: frozenset[str]) -> CallProgram:
        """A program whose kernels compute the gradients of these learned tensors, if not of more.

        Its signature tells which.
        """

    @abc.abstractmethod
    def refuse_backward(self, *, alone: str = "") -> None:
        """Raises SpecError where there is no backward pass, or none of these gradients alone."""

    @abc.abstractmethod
    def variant(self, variant: Variant) -> Any:
        """The variant that computes a call: an AttentionSpec or a CallProgram."""

    @abc.abstractmethod
    def split(self) -> CallProgram:
        """The program of calls that have the scalars `WHOLE` and `SPLIT`."""

    def run_of(self, target: Target, call: CheckedCall) -> int:
        """The neighbouring splits of such a call that a thread block has and joins: one of
        `split_choice.RUNS`, or `ALL_SPLITS`."""
        return 1

    def joining(self, run: int) -> CallProgram:
        """The program of calls with another run than 1, which has the bits of this one."""
        raise AssertionError("only where `run_of` is another one")

    @abc.abstractmethod
    def planned_split(self, target: Target, call: CheckedCall) -> int:
        """The keys of a split in a call that gives no split_size; 0: they are not split."""

    @abc.abstractmethod
    def invariant_split(self, target: Target) -> int:
        """The keys of a split in batch-invariant calls."""

    @abc.abstractmethod
    def path_of_pass(
        self, target: Target, pass_name: str, tangents: tuple[str, ...] = ()
    ) -> Decision:
        """The architecture whose kernels compute a pass of a call, and why; "" where it is that of
        the target. Arguments as for `columns_of_launch`."""

    def columns_of_launch(
        self, target: Target, launch: LaunchOptions, pass_name: str, tangents: tuple[str, ...] = ()
    ) -> int:
        """The columns of V that the kernels of a pass compute at once.

        Args:
            pass_name: "forward", "backward", "deterministic", "queries", "keys" or "tangent".
            tangents: for "tangent", the names of the tensors that have a tangent.
        """
        return self.signature.head_dim_v

    def with_columns(self, columns: int) -> CallProgram:
        """The program of calls with so many columns of V."""
        raise NotImplementedError("the kernels of this program compute all columns at once")

    @abc.abstractmethod
    def tuned(self, pass_name: str, arch: str, call: CheckedCall, index: int) -> Mapping[str, Tile]:
        """Measured tiles for calls on a GPU, by kernel, as `remembered`."""

    @abc.abstractmethod
    def forward(self, request: ForwardRequest) -> tuple[LaunchableKernel, str]:
        """The forward kernel of a call, and the reason for the number of heads in its tiles."""

    @abc.abstractmethod
    def backward(
        self,
        arch: str,
        deterministic: bool,
        launch: LaunchOptions,
        ranges: CallRanges,
        sizes: Sizes,
        memory: GpuMemory | None,
    ) -> tuple[LaunchableKernel, ...]:
        """The backward kernels of a call of these sizes, in the order of their launches.

        Args:
            memory: the memory of the GPU; None for that of the architecture's product.
        """

    def alone(
        self, pass_name: str, arch: str, launch: LaunchOptions, ranges: CallRanges, seq_q: int
    ) -> tuple[LaunchableKernel, ...]:
        """The kernels of the gradients of "queries" or "keys" alone, in launch order."""
        raise AssertionError("only of specs, whose programs refuse no such call")

    @abc.abstractmethod
    def tangent(
        self, arch: str, names: tuple[str, ...], launch: LaunchOptions, ranges: CallRanges
    ) -> LaunchableKernel:
        """The kernel that computes the tangents of a call's results.

        Args:
            names: the names of the tensors that have a tangent.
        """

    def moves(self, names: tuple[str, ...]) -> bool:
        """Whether a kernel has to compute the tangents of results along these tensors."""
        return bool(names)

    @abc.abstractmethod
    def minmax_tables(self, arch: str) -> tuple[LaunchableKernel, ...]:
        """The kernels that make the min/max tables of captured tensors."""

    @abc.abstractmethod
    def merge(self, arch: str) -> LaunchableKernel:
        """The kernel that merges the results over split keys."""


class SpecProgram(CallProgram):
    """The program of an AttentionSpec, which plans and compiles kernels at their first use."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @property
    def signature(self) -> CallSignature:
        from flashgen.spec.language.signature import signature_of

        return signature_of(self.spec)

    @property
    def digest(self) -> str:
        from flashgen.spec.language.spec import digest_of

        return digest_of(self.spec.identity)

    def target(self, backend: str | None, arch: str | None, device: torch.device) -> Target:
        return target_of(backend, arch, device)

    def with_dtype(self, dtype: object) -> CallProgram:
        from flashgen.spec.language.signature import with_dtype

        name = dtype_name(dtype)
        if self.spec.dtype is not None or name not in OPERAND_DTYPES:
            return self
        return program_of(with_dtype(self.spec, name))

    def without_dropout(self) -> CallProgram:
        from flashgen.spec.language.signature import without_dropout

        return program_of(without_dropout(self.spec))

    @property
    def _spec_of_others(self) -> AttentionSpec:
        """The spec whose kernels are all but the forward kernel."""
        from flashgen.spec.language.signature import returning_maxima

        return returning_maxima(self.spec, False)

    def learning(self, names: frozenset[str]) -> CallProgram:
        from flashgen.spec.language.signature import learning

        return program_of(learning(self.spec, names))

    def refuse_backward(self, *, alone: str = "") -> None:
        from flashgen.spec.language.signature import refuse_backward

        refuse_backward(self.spec, alone=alone)

    def variant(self, variant: Variant) -> AttentionSpec:
        from flashgen.spec.language import signature as of

        spec, (dtype, offsets, part, packs) = self.spec, variant
        if packs:
            spec = of.packed_queries(spec)
        if part:
            spec = of.split(spec) if SPLIT in part else of.in_whole(spec)
        if dtype is not None:
            spec = of.with_dtype(spec, dtype_name(dtype))
        return of.at_offsets(spec, offsets)

    def split(self) -> CallProgram:
        from flashgen.spec.language.signature import split

        return program_of(split(self.spec))

    def run_of(self, target: Target, call: CheckedCall) -> int:
        from flashgen.kernels.planner import run_of_splits

        return run_of_splits(self.spec, target.arch, call, sms=target.sms)

    def joining(self, run: int) -> CallProgram:
        from flashgen.spec.language.signature import joining

        return program_of(joining(self.spec, run))

    def planned_split(self, target: Target, call: CheckedCall) -> int:
        from flashgen.kernels.planner import split_of_call

        return split_of_call(self.spec, target.arch, call, sms=target.sms)

    def invariant_split(self, target: Target) -> int:
        from flashgen.kernels.planner import invariant_splits

        return invariant_splits(self.spec, target.arch).size

    def path_of_pass(
        self, target: Target, pass_name: str, tangents: tuple[str, ...] = ()
    ) -> Decision:
        arch, alone = target.arch, pass_name in ("queries", "keys")
        if target.open_path and self.spec.block_sparse is not None and not alone:
            from flashgen.kernels.visits.layout_path import path_of_layout

            fixed = pass_name in ("deterministic", "tangent")
            backward = pass_name != "forward"
            layout_path = path_of_layout(self.spec, arch, backward=backward, deterministic=fixed)
            if layout_path is not None:
                return Decision(layout_path.arch, layout_path.why)
        if self.spec.kv_dtype is not None and portable(arch) != arch:
            why = "threads convert the codes that they copy, which TMA does not"
            return Decision(portable(arch), why)
        if pass_name == "tangent" and not tangents:  # no kernel computes them
            pass_name = "deterministic"
        return self._path_by_columns(arch, pass_name, tangents)

    def _path_by_columns(self, arch: str, pass_name: str, tangents: tuple[str, ...]) -> Decision:
        """The path of all architectures where tiles of ``arch`` do not hold all columns of V and
        its predicted time is shorter; otherwise that of ``arch``. Arguments as in
        `columns_of_launch`."""
        from flashgen.kernels.planner import columns_of_launch

        spec = self.spec if pass_name == "forward" else self._spec_of_others
        if portable(arch) == arch or spec.dtype is None or spec.head_dim_v is None:
            return Decision(arch, "")
        choice = columns_of_launch(spec, arch, pass_name, tangents=tangents)
        if choice.columns == spec.head_dim_v:
            return Decision(arch, "")
        portable_choice = columns_of_launch(spec, portable(arch), pass_name, tangents=tangents)
        if portable_choice.cost >= choice.cost:
            return Decision(arch, "")
        held = f"{choice.columns} columns of v at once" if choice.columns else "no part of v"
        comparison = f"those of {portable(arch)} take less time"
        return Decision(portable(arch), f"tiles of the path {arch} hold {held}, and {comparison}")

    def columns_of_launch(
        self, target: Target, launch: LaunchOptions, pass_name: str, tangents: tuple[str, ...] = ()
    ) -> int:
        from flashgen.kernels.planner import columns_of_launch

        if launch.tiles:
            return self.signature.head_dim_v
        path = self.path_of_pass(target, pass_name, tangents)
        spec = self.spec if pass_name == "forward" else self._spec_of_others
        choice = columns_of_launch(spec, path.arch, pass_name, tangents=tangents, sram=launch.sram)
        return choice.columns or self.signature.head_dim_v

    def with_columns(self, columns: int) -> CallProgram:
        from flashgen.spec.language.signature import with_columns

        return program_of(with_columns(self.spec, columns))

    def tuned(self, pass_name: str, arch: str, call: CheckedCall, index: int) -> Mapping[str, Tile]:
        return remembered(self._spec_of_others, arch, pass_name, call, index)

    def forward(self, request: ForwardRequest) -> tuple[LaunchableKernel, str]:
        from flashgen.kernels.pipeline import built
        from flashgen.kernels.planner import PlanRequest, plan_forward

        launch, tile = request.launch, request.launch.tiles.get("forward")
        plan_request = PlanRequest(
            self.spec, request.arch, launch.sram, access_bytes=request.access_bytes, tile=tile
        )
        heads = heads_of_call(self.spec, plan_forward(plan_request), request.call, request.captured)
        plan_request = replace(plan_request, heads_per_tile=heads.heads)
        if tile is None:
            plan_request = replace(plan_request, few_rows=heads.few_rows, unpaired=heads.unpaired)
        return built(plan_request, request.ranges)[0], heads.reason

    def backward(
        self,
        arch: str,
        deterministic: bool,
        launch: LaunchOptions,
        ranges: CallRanges,
        sizes: Sizes,
        memory: GpuMemory | None,
    ) -> tuple[LaunchableKernel, ...]:
        from flashgen.kernels.pipeline import build_backward

        return build_backward(
            self._spec_of_others,
            arch,
            sram=launch.sram,
            deterministic=deterministic,
            tiles=launch.tiles,
            ranges=ranges,
            sizes=sizes,
            memory=memory,
        )

    def alone(
        self, pass_name: str, arch: str, launch: LaunchOptions, ranges: CallRanges, seq_q: int
    ) -> tuple[LaunchableKernel, ...]:
        from flashgen.kernels.pipeline import built
        from flashgen.kernels.planner import BackwardPlanRequest

        rows = 1 << max(seq_q - 1, 0).bit_length()  # a power of two, so that kernels are few
        few, tiles = rows if rows < MANY_ROWS else 0, tuple(sorted(launch.tiles.items()))
        plan_request = BackwardPlanRequest(
            self._spec_of_others, arch, launch.sram, tiles=tiles, alone=pass_name, few_rows=few
        )
        return built(plan_request, ranges)

    def tangent(
        self, arch: str, names: tuple[str, ...], launch: LaunchOptions, ranges: CallRanges
    ) -> LaunchableKernel:
        from flashgen.kernels.pipeline import build_tangent

        tile = launch.tiles.get("tangent")
        return build_tangent(
            self._spec_of_others, arch, names, sram=launch.sram, tile=tile, ranges=ranges
        )

    def moves(self, names: tuple[str, ...]) -> bool:
        from flashgen.kernels.planner import moves

        return moves(self.spec, names)

    def minmax_tables(self, arch: str) -> tuple[LaunchableKernel, ...]:
        from flashgen.kernels.pipeline import build_minmax_tables

        return build_minmax_tables(self._spec_of_others, arch)

    def merge(self, arch: str) -> LaunchableKernel:
        from flashgen.kernels.pipeline import build_merge

        signature = self.signature
        assert signature.out_dtype is not None  # kernels are made for one dtype
        columns, dtype = signature.head_dim_v, signature.out_dtype
        return build_merge(columns, dtype, arch, splits=True, normalize=signature.normalize)


def program_of(spec: AttentionSpec | CallProgram) -> CallProgram:
    """The program of a spec; a program is its own."""
    return spec if isinstance(spec, CallProgram) else _program_of(spec)


@functools.lru_cache(maxsize=1024)
def _program_of(spec: AttentionSpec) -> CallProgram:
    return SpecProgram(spec)
