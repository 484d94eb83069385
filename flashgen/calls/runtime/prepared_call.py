"""The part that all passes of a call share: how they begin, and what a prepared call keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashgen.calls.runtime.arguments.call import check, check_contents
from flashgen.calls.runtime.backends import Target
from flashgen.calls.runtime.bind_arguments import ranges_of
from flashgen.calls.runtime.block_layouts import static_layout
from flashgen.calls.runtime.bound_kernel import KernelRun
from flashgen.calls.runtime.kernel_arguments import named
from flashgen.calls.runtime.programs import CallProgram, SpecProgram, program_of
from flashgen.calls.runtime.reports import Report
from flashgen.shared import config
from flashgen.shared.arch import DEFAULT_ARCH
from flashgen.shared.call import DEFAULT_LAUNCH, CallOptions, CheckedCall, LaunchOptions, Operands
from flashgen.shared.errors import PlanError
from flashgen.shared.launch_facts import column_ranges
from flashgen.shared.paged import contiguous_call

if TYPE_CHECKING:
    from flashgen.calls.cpu import TileArguments
    from flashgen.calls.cpu.parts import SequenceParts
    from flashgen.calls.cpu.reads import ReadCheck
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

EMPTY = "nothing to launch: a size is 0"
CPU_REASON = "tiled algorithms on torch tensors: no kernel"


class Setup(NamedTuple):
    """The beginning of every pass: the program, the checked call, its target and its options."""

    program: CallProgram
    call: CheckedCall
    target: Target
    launch: LaunchOptions = DEFAULT_LAUNCH

    @classmethod
    def for_call(
        cls,
        spec: AttentionSpec | CallProgram,
        operands: Operands,
        options: CallOptions,
        launch: LaunchOptions = DEFAULT_LAUNCH,
        *,
        forward: bool = False,
        alone: str = "",
    ) -> Setup:
        """Checks the operands, and chooses the backend and the architecture.

        Args:
            forward: whether nothing is differentiated.
            alone: as in `CallProgram.refuse_backward`.

        Raises:
            InputError: an argument is wrong.
            SpecError: the spec has no derivatives.
            PlanError: the generation of the GPU is not supported.
        """
        program = program_of(spec).with_dtype(getattr(operands.q, "dtype", None))
        if not forward:
            program.refuse_backward(alone=alone)
        call = check(program.signature, operands, options)
        return cls(
            program, call, program.target(options.backend, options.arch, operands.q.device), launch
        )

    @property
    def kernels(self) -> CallProgram:
        """The program of the kernels: calls whose dropout_p is 0 have those that drop nothing."""
        return self.program if self.call.dropout_p > 0 else self.program.without_dropout()

    def parts(
        self, spec: AttentionSpec | CallProgram, pass_name: str, tangents: tuple[str, ...] = ()
    ) -> tuple[tuple[CallProgram, slice], ...]:
        """Several calls that compute this one: for each, its program and columns of V.

        Args:
            spec: of the call as it was given, without splits.
            pass_name, tangents: as in `CallProgram.columns_of_launch`.

        Returns:
            () where one call computes all columns.
        """
        dim = self.call.head_dim_v
        if self.target.backend == "tiled" or self.call.is_empty:
            return ()
        columns = self.kernels.columns_of_launch(self.target, self.launch, pass_name, tangents)
        if columns == dim:
            return ()
        dtype = self.program.signature.dtype
        assert dtype is not None, "that of a call"
        whole_program = program_of(spec).with_dtype(getattr(torch, dtype))
        ranges = column_ranges(dim, columns)
        return tuple((whole_program.with_columns(part.stop - part.start), part) for part in ranges)


class PreparedCall:
    """A checked call, with all choices that do not depend on the contents of tensors.

    It serves all calls with the same options and with tensors of the same shapes, strides, dtypes
    and device.
    """

    _kernel_arch: str
    """The architecture whose kernels can read the operands."""

    in_parts = False
    """Whether several calls compute some columns of V each; these are made in Python."""

    def __init__(self, setup: Setup) -> None:
        program, self.call, self.target, self.launch = setup
        self.program = setup.kernels
        self.signature = program.signature
        self.drops = self.call.dropout_p > 0
        self._layout = static_layout(self.signature, self.call, self.target.device)
        self._kept_tiles: tuple[TileArguments, tuple[SequenceParts, ...]] | None = None
        self._check: ReadCheck | None = None
        self._reads_inside = False  # whether no later call can read outside of a tensor
        self._built = 0.0  # seconds of building kernels for the call that runs

    @property
    def spec(self) -> AttentionSpec:
        """The spec of the program, which the tiled algorithms compute."""
        assert isinstance(self.program, SpecProgram), "other programs have no such target"
        return self.program.spec

    def _read(self, operands: Operands) -> tuple[Operands, dict[str, Tensor]]:
        """The operands as kernels read them, and the captured tensors by name, contents checked."""
        q, k, v, captured, rng = operands
        if q.is_neg() or k.is_neg() or v.is_neg():
            q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        rng = rng.contiguous() if self.drops and rng is not None else None
        by_name = self._named(captured, k) if captured or self._layout else {}
        return Operands(q, k, v, (), rng), by_name

    def _named(self, captured: tuple[Tensor, ...], k: Tensor) -> dict[str, Tensor]:
        """The captured tensors and the tensors of a static block layout, by name, checked."""
        by_name = named(self.signature, captured)
        check_contents(self.signature, by_name, self.call, k)
        return by_name | self._layout

    def _check_reads(self, q: Tensor, k: Tensor, v: Tensor, captured: Mapping[str, Tensor]) -> None:
        """Refuses a call whose mods use an element outside of a captured tensor.

        On a GPU this waits for the device, and is done where FLASHGEN_CHECK_READS asks for it.
        """
        wanted = config.check_reads()
        if not (self.target.backend != "gpu" if wanted is None else wanted):
            return
        if not isinstance(self.program, SpecProgram):
            self._reads_inside = True  # an export has no expressions
            return
        from flashgen.calls.cpu.reads import ReadCheck, reads_of

        call = self.call
        if self._check is None and reads_of(self.spec):
            from flashgen.spec.language.signature import contiguous

            has_lengths = self.signature.paged or self.signature.packed
            spec = contiguous(self.spec) if has_lengths else self.spec
            self._check = ReadCheck(spec, call.scalars)
        if self._check is not None:
            captured = {name: tensor.cpu() for name, tensor in captured.items()}
            if self.signature.paged:
                q, k, _, captured = contiguous_call(q.cpu(), k.cpu(), v.cpu(), captured)
            sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
            if not self._check(sizes, (call.q_offset, call.k_offset), captured):
                return
        self._reads_inside = True

    def _tuned(self, pass_name: str) -> LaunchOptions:
        """The options of the launch, on a GPU with the tuned tiles of this pass."""
        target, launch = self.target, self.launch
        if target.backend != "gpu" or not launch.plans_itself:
            return launch
        tiles = self.program.tuned(pass_name, self._kernel_arch, self.call, target.index)
        return replace(launch, tiles=tiles)

    def _tiles(
        self,
        q: Tensor,
        k: Tensor,
        captured: Mapping[str, Tensor],
        rng: Tensor | None,
        *,
        backward: bool,
    ) -> tuple[TileArguments, tuple[SequenceParts, ...]]:
        """The arguments of the tiled algorithms on the CPU, and the parts of a small call.

        They are kept where they serve all calls: where no tensor but q, k and v is read.
        """
        from flashgen.calls.cpu.chunks import FEW_AT_ONCE
        from flashgen.calls.cpu.parts import parts_of

        if self._kept_tiles is not None:
            return self._kept_tiles
        arguments = self._tile_arguments(captured, rng, backward=backward)
        call = self.call
        scores = call.batch * call.heads_q * call.seq_q * call.seq_k
        if captured or rng is not None or scores > FEW_AT_ONCE:
            return arguments, ()
        parts = tuple(parts_of(self.spec, q, k, arguments, backward=backward, keep=True))
        self._kept_tiles = arguments, parts
        return self._kept_tiles

    def _tile_arguments(
        self, captured: Mapping[str, Tensor], rng: Tensor | None, *, backward: bool
    ) -> TileArguments:
        """The arguments of the tiled algorithms on the CPU, with the tiles of a plan."""
        from flashgen.calls.cpu import TileArguments
        from flashgen.kernels.planner import plan, plan_backward
        from flashgen.spec.language.signature import contiguous

        call, arch, sram, tiles = self.call, self.target.arch, self.launch.sram, self.launch.tiles
        block_q = block_k = None  # the tiles of DEFAULT_ARCH
        if arch != DEFAULT_ARCH or not self.launch.plans_itself:
            try:
                if backward:
                    spec = contiguous(self.spec) if self.signature.paged else self.spec
                    chosen = plan_backward(spec, arch, sram=sram, tiles=tiles).key_plan
                else:
                    chosen = plan(self.spec, arch, sram=sram, tile=tiles.get("forward"))
                block_q, block_k = chosen.block_q, chosen.block_k
            except PlanError:  # tiled algorithms need no tile of a GPU
                if not self.launch.plans_itself:
                    raise
        return TileArguments(
            scale=call.scale,
            q_offset=call.q_offset,
            k_offset=call.k_offset,
            scalars=call.scalars,
            tensors=captured,
            dropout_p=call.dropout_p,
            rng=rng,
            block_q=block_q,
            block_k=block_k,
        )


class DerivativeOutcome(NamedTuple):
    """The facts of one backward or tangent call, from which `reports` makes Reports on demand."""

    call: PreparedCall
    reason: str
    launches: tuple[KernelRun, ...] = ()
    copies: tuple[str, ...] = ()
    build_seconds: float = 0.0

    @classmethod
    def from_parts(cls, parts: Sequence[DerivativeOutcome]) -> DerivativeOutcome:
        """The outcome of a call from the outcomes of calls that compute some columns of V each."""
        launches = tuple(run for part in parts for run in part.launches)
        copies = tuple(dict.fromkeys(text for part in parts for text in part.copies))
        return parts[0]._replace(launches=launches, copies=copies)

    def reports(self) -> tuple[Report, ...]:
        """One per launch; one without a kernel where nothing was launched."""
        target, launches = self.call.target, self.launches
        report = Report(
            target.backend if launches else "none",
            target.arch,
            16 if launches and self.reason is not CPU_REASON else 0,
            self.reason,
            build_seconds=self.build_seconds,
            arch_reason=target.arch_reason,
        )
        ranges = ranges_of(self.call.call, self.call.signature)
        return tuple(
            replace(
                report.for_run(*run),
                integers="" if run.build is None else run.build.integers(ranges),
            )
            for run in launches
        ) or (report,)


def columns_of_parts(parts: Sequence[PreparedCall]) -> Iterator[slice]:
    """The columns of V of each of several calls."""
    first = 0
    for part in parts:
        yield slice(first, first := first + part.call.head_dim_v)


def without_autocast() -> AbstractContextManager[object]:
    """A context in which products keep their dtype."""
    autocasts = torch.is_autocast_enabled("cpu")
    return torch.autocast("cpu", enabled=False) if autocasts else nullcontext()
