"""One forward call: checks, the choice of a kernel, its build, and its launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from flashgen.calls.runtime import memory_layout
from flashgen.calls.runtime.arguments.call import check
from flashgen.calls.runtime.arguments.refusals import refuse
from flashgen.calls.runtime.arguments.slices import split_number
from flashgen.calls.runtime.backends import Target
from flashgen.calls.runtime.bind_arguments import bind, numbers_of_pages, ranges_of
from flashgen.calls.runtime.bound_kernel import BoundKernel, KernelRun, Tensors
from flashgen.calls.runtime.chosen_keys import ChosenCall, ChosenPass
from flashgen.calls.runtime.kernel_arguments import named, pointers_of
from flashgen.calls.runtime.learned_gradients import lse_without_keys
from flashgen.calls.runtime.memory_layout import empty_rows
from flashgen.calls.runtime.merge import Splits
from flashgen.calls.runtime.minmax_tables import MinMaxTables
from flashgen.calls.runtime.prepared_call import (
    CPU_REASON,
    EMPTY,
    PreparedCall,
    Setup,
    columns_of_parts,
    without_autocast,
)
from flashgen.calls.runtime.programs import CallProgram, ForwardRequest
from flashgen.calls.runtime.reports import Report
from flashgen.shared.call import (
    DEFAULT_LAUNCH,
    INVARIANT,
    CallOptions,
    CheckedCall,
    LaunchOptions,
    Operands,
)
from flashgen.shared.errors import InputError
from flashgen.shared.paged import contiguous_call
from flashgen.shared.signature import SPLIT, WHOLE
from flashgen.shared.split_choice import ALL_SPLITS

if TYPE_CHECKING:
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

_NAMES = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True)
class ForwardKernel:
    """The forward kernel of a call for one width of memory accesses.

    Attributes:
        heads_reason: the reason for the number of heads in its tiles; "" where there is no choice.
        tables: the kernels of the min/max tables that it reads.
        integers: the width of its integers, as in `Report`.
    """

    bound: BoundKernel
    heads_reason: str
    tables: MinMaxTables
    integers: str = ""


class ForwardOutcome(NamedTuple):
    """The facts of one `PreparedForward.run`, from which `report` makes a Report on demand.

    ``others`` are the facts of the launches for the other columns of V.

    Calls keep them as a plain tuple, which is made in a fifth of the time.
    """

    call: PreparedForward
    width: int
    reason: str
    kernel: ForwardKernel | None = None
    counters: Any = None
    build_seconds: float = 0.0
    run_seconds: float = 0.0
    tables: list[KernelRun] | tuple[KernelRun, ...] = ()
    merge: KernelRun | None = None
    others: tuple[ForwardOutcome, ...] = ()


class PreparedForward(PreparedCall):
    """A checked forward call."""

    def __init__(self, setup: Setup, operands: Operands, *, invariant: bool = False) -> None:
        """
        Args:
            invariant: whether the call is batch-invariant.
        """
        super().__init__(setup)
        (q, k, v), call, target = operands[:3], self.call, self.target
        self._invariant = invariant
        path = self.program.path_of_pass(target, "forward")
        self._kernel_arch, self._aligned_reason = memory_layout.path_for(
            path.arch, path.why, q=q, k=k, v=v
        )
        self._is_empty = call.is_empty
        # Tensors of one element: torch.empty_like makes contiguous tensors of the results' shapes
        # from them, in half of the time that torch.empty needs to read a shape.
        batch, heads, seq, dim = *q.shape[:3], call.head_dim_v
        assert self.signature.out_dtype is not None, "that of a call"
        dtype = getattr(torch, self.signature.out_dtype)
        self._out_model = q.new_empty((), dtype=dtype).expand(batch, heads, seq, dim)
        self._out_strides: tuple[int, ...] | None = None  # where it is not contiguous
        if memory_layout.rows_before_heads(q):
            like_q = torch.empty_strided(q.shape, q.stride(), device="meta")
            self._out_strides = empty_rows(like_q, dim).stride()
        self._lse_model = q.new_empty((), dtype=torch.float32).expand(batch, heads, seq)
        if invariant and self._kernel_arch != path.arch and target.backend != "tiled":
            self._refuse_other_arithmetic(self._aligned_reason)
        # Codes are copied 16 at once, or 8 where rows of the tensor are no multiple of that.
        coded = q.element_size() != k.element_size()
        self._narrower = tuple(2 if coded and x.shape[3] % 16 else 1 for x in (k, v))
        self._units = (16, *(16 // narrower for narrower in self._narrower), 16)
        obstacles = map(memory_layout.stride_obstacle, _NAMES, (q, k, v), self._units)
        self._obstacle = next((text for text in obstacles if text), None)
        self._kernels: dict[int, ForwardKernel] = {}
        self._splits: Splits | None = None
        if self.signature.split and not (self.signature.folds or call.is_empty):
            self._splits = Splits(self.program, call, target)

    def run(self, operands: Operands, out: Tensor | None = None) -> tuple[Any, ...]:
        """Returns the results of the call, and the fields of a `ForwardOutcome` for `report`.

        The results are out, lse and, where the signature says so, the largest score of each row.

        Args:
            out: where kernels write the output; a new tensor where None.
        """
        read, by_name = self._read(operands)
        if self._is_empty:
            return self._without_scores(operands.q, operands.captured)
        q, k, v, _, rng = read
        if operands.captured and not self._reads_inside:
            self._check_reads(q, k, v, by_name)
        if self.target.backend == "tiled":
            return self._on_cpu(read, by_name)
        if out is None:
            out = self.new_output(q)
        lse = torch.empty_like(self._lse_model)
        lse_of_nothing = self.signature.lse_of_nothing
        if self.signature.packed:  # rows outside all sequences are rows without keys
            out.zero_()
        if self.signature.packed or self.signature.normalize == "none":
            lse.fill_(lse_of_nothing)
        to_out, to_lse = out, lse  # what the kernel writes
        if self._splits is not None:
            to_out, to_lse = self._splits.parts(out, lse)
            if self.signature.packed:
                to_lse.fill_(lse_of_nothing)
                if self.signature.normalize != "softmax":  # no LSE says that a part is not needed
                    to_out.zero_()
        maxima = self._like_lse(to_lse)
        addresses: tuple[int, ...]
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), to_out.data_ptr(), to_lse.data_ptr())
        k_factor, v_factor = self._narrower
        combined = addresses[0] | addresses[3] | addresses[1] * k_factor | addresses[2] * v_factor
        if self._obstacle is None and not combined % 16:
            width, reason = 16, self._aligned_reason
        else:
            width, reason = q.element_size(), self._unaligned_reason(q, k, v, out)
            if self._invariant:
                self._refuse_other_arithmetic(reason)
        kernel = self._kernels.get(width)
        if kernel is None:
            kernel = self._kernel(width, _tensors(q, k, v, to_out, to_lse, maxima), by_name)
        bound = kernel.bound
        built, self._built = self._built, 0.0
        counters = merge = None
        tables: list[KernelRun] = []
        tile_counter = None  # counts the work tiles that blocks have drawn
        if bound.blocks is not None and bound.blocks.persistent:
            tile_counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        start = perf_counter()
        if self.target.backend == "gpu" and not by_name:
            if maxima is not None:
                addresses = (*addresses, maxima.data_ptr())
            if rng is not None:
                addresses = (*addresses, rng.data_ptr())
            if bound.blocks is not None:
                addresses = (*addresses, 0 if tile_counter is None else tile_counter.data_ptr())
            bound.launch(addresses, self.target.index)
        else:
            tensors = _tensors(q, k, v, to_out, to_lse, maxima)
            tensors |= {"rng": rng, "tile_counter": tile_counter}
            tensors |= pointers_of(by_name)
            table_tensors, tables = kernel.tables.run(self.target, by_name, self.launch)
            tensors |= table_tensors
            start = perf_counter()
            counters = bound.run(self.target, tensors, self.launch)
        seconds = perf_counter() - start
        if self._splits is not None:
            merge = self._splits.merge((to_out, to_lse), (out, lse), by_name, self.launch)
        outcome = self, width, reason, kernel, counters, built, seconds, tables, merge
        if maxima is None:
            return out, lse, outcome
        return out, lse, maxima if self._splits is None else maxima.amax(0), outcome

    def new_output(self, q: Tensor) -> Tensor:
        """An uninitialised output with the axis order of q in memory."""
        model, strides = self._out_model, self._out_strides
        if strides is None:
            return torch.empty_like(model)
        return q.new_empty_strided(model.shape, strides, dtype=model.dtype)

    def _like_lse(self, lse: Tensor) -> Tensor | None:
        """Where the kernel writes the largest scores of rows; None where it writes none."""
        if not self.signature.returns_maxima:
            return None
        maxima = torch.empty_like(lse)
        # Rows outside all sequences are rows without keys.
        return maxima.fill_(-math.inf) if self.signature.packed else maxima

    def _kernel(
        self, width: int, tensors: Tensors, captured: Mapping[str, Tensor]
    ) -> ForwardKernel:
        start = perf_counter()
        target, call = self.target, self.call
        splits = self._splits
        # With split keys or pages a tuned tile would give a row other bits than another call.
        serving = self.signature.split or self.signature.paged
        launch = self._tuned("forward") if width == 16 and not serving else self.launch
        ranges = ranges_of(call, self.signature)
        request = ForwardRequest(self._kernel_arch, width, call, captured, launch, ranges)
        built, reason = self.program.forward(request)
        self._built = perf_counter() - start
        numbers: dict[str, int] = {}
        k = tensors["k"]
        assert k is not None, "an operand"
        if splits is not None:
            parts_out, parts_lse = tensors["o"], tensors["lse"]
            assert parts_out is not None, "the kernel writes it"
            assert parts_lse is not None, "the kernel writes it"
            numbers = {"o_stride_s": parts_out.stride(0), "lse_stride_s": parts_lse.stride(0)}
            tensors = {**tensors, "o": parts_out[0]}
        if self.signature.paged:
            numbers |= numbers_of_pages(k)
        bound = bind(
            built,
            call,
            tensors,
            captured,
            numbers=numbers,
            packed=self.signature.packed,
            sms=target.sms if built.facts.is_persistent else None,
            blocks=launch.blocks,
        )
        tables = MinMaxTables(self.program, target.arch, captured, (bound,))
        integers = built.integers(ranges)
        kernel = self._kernels[width] = ForwardKernel(bound, reason, tables, integers)
        return kernel

    @staticmethod
    def _refuse_other_arithmetic(reason: str) -> NoReturn:
        refuse(
            "a batch-invariant call would have the arithmetic of another kernel",
            "batch_invariant=True",
            reason,
            "tensors whose addresses and strides are multiples of 16 B and not 0: x.contiguous()",
        )

    def _unaligned_reason(self, *tensors: Tensor) -> str:
        bases = map(memory_layout.base_obstacle, _NAMES, tensors, self._units)
        return self._obstacle or next(text for text in bases if text)

    def _without_scores(self, q: Tensor, captured: tuple[Tensor, ...]) -> tuple[Any, ...]:
        out = empty_rows(q, self.call.head_dim_v, self._out_model.dtype).zero_()
        if self.signature.sink is None:
            lse_of_nothing = self.signature.lse_of_nothing
            lse = q.new_full(q.shape[:3], lse_of_nothing, dtype=torch.float32)
        else:
            by_name = named(self.signature, captured)
            lse = lse_without_keys(self.signature, by_name, q, self.call)
        maxima = [lse.new_full(lse.shape, -math.inf)] if self.signature.returns_maxima else []
        return out, lse, *maxima, ForwardOutcome(self, 0, EMPTY)

    def _on_cpu(self, operands: Operands, captured: Mapping[str, Tensor]) -> tuple[Any, ...]:
        start = perf_counter()
        with without_autocast():
            if self.signature.paged:
                results = self._from_contiguous(operands, captured)
            else:
                results = self._by_tiles(self.spec, operands, captured)
        seconds = perf_counter() - start
        return *results, ForwardOutcome(self, 0, CPU_REASON, run_seconds=seconds)

    def _by_tiles(
        self, spec: AttentionSpec, operands: Operands, captured: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        from flashgen.calls import cpu

        q, k, v, _, rng = operands
        if self._invariant:
            arguments = self._tile_arguments(captured, rng, backward=False)
            return cpu.invariant_forward(spec, q, k, v, arguments)
        return cpu.forward(spec, q, k, v, *self._tiles(q, k, captured, rng, backward=False))

    def _from_contiguous(
        self, operands: Operands, captured: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """The results of a call with a paged cache, from copies of its keys and values."""
        from flashgen.spec.language.signature import contiguous

        q, k, v, _, rng = operands
        copied = contiguous_call(q, k, v, captured)
        contiguous_operands = Operands(*copied[:3], (), rng)
        out, *row_results = self._by_tiles(
            contiguous(self.spec), contiguous_operands, copied.tensors
        )
        out = memory_layout.in_memory_order_of(q, copied.like_queries(out, q))
        return out, *(copied.like_queries(result, q) for result in row_results)


class ChosenForward(ChosenPass):
    """A forward call with lists, whose results and record are as in `PreparedForward`."""

    def __init__(self, setup: Setup, operands: Operands, *arguments: Any) -> None:
        super().__init__(setup, operands, *arguments)
        if setup.target.backend != "tiled" and not setup.call.is_empty:
            self._chosen = ChosenCall(setup, operands, self._options)

    def run(self, operands: Operands, out: Tensor | None = None) -> Any:
        if self._chosen is None:
            return super().run(operands)
        self._named(operands.captured, operands.k)
        return self._chosen.forward(operands, prepare)


ForwardCall = PreparedForward | ChosenForward


class ForwardInParts(PreparedForward):
    """A checked forward call whose launches compute some columns of V each."""

    in_parts = True

    def __init__(
        self, setup: Setup, operands: Operands, *, invariant: bool, parts: Sequence[ForwardCall]
    ) -> None:
        """
        Args:
            parts: the calls for some columns each, in order.
        """
        super().__init__(setup, operands, invariant=invariant)
        self._parts = parts

    def run(self, operands: Operands, out: Tensor | None = None) -> tuple[Any, ...]:
        if out is None:
            out = self.new_output(operands.q)
        results_of_parts = [
            part.run(operands._replace(v=operands.v[..., columns]), out[..., columns])
            for part, columns in zip(self._parts, columns_of_parts(self._parts), strict=True)
        ]
        _, *row_results, record = results_of_parts[0]
        other_records = tuple(
            ForwardOutcome(*part_results[-1]) for part_results in results_of_parts[1:]
        )
        return out, *row_results, ForwardOutcome(*record)._replace(others=other_records)


def _tensors(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, maxima: Tensor | None
) -> dict[str, Tensor | None]:
    """Operands and results by their names in kernels; paged ones call k and v caches."""
    results = {"o": o, "lse": lse, "max_scores": maxima}
    return {"q": q, "k": k, "v": v, "k_cache": k, "v_cache": v, **results}


def report(fields: tuple[Any, ...]) -> Report:
    """The Report of a forward call, from what `PreparedForward.run` returned."""
    record = ForwardOutcome(*fields)
    kernel, target, merge = record.kernel, record.call.target, record.merge
    report_of_call = Report(
        "none" if record.reason is EMPTY else target.backend,
        target.arch,
        record.width,
        record.reason,
        run_seconds=record.run_seconds,
        arch_reason=target.arch_reason,
    )
    if kernel is None:
        return report_of_call
    aligned = replace(report_of_call, access_bytes=16, access_reason=memory_layout.ALIGNED)
    return replace(
        report_of_call,
        kernel=kernel.bound.build,
        counters=record.counters,
        build_seconds=record.build_seconds,
        tables=tuple(report_of_call.for_run(*run) for run in record.tables),
        heads_reason=kernel.heads_reason,
        blocks=kernel.bound.blocks,
        integers=kernel.integers,
        merge=None if merge is None else aligned.for_run(*merge),
        split_size=int(record.call.call.scalars.get(SPLIT, 0)),
        run=record.call.call.run,
        columns=record.call.call.head_dim_v,
        others=tuple(map(report, record.others)),
    )


def prepare(
    spec: AttentionSpec | CallProgram,
    operands: Operands,
    options: CallOptions,
    launch: LaunchOptions = DEFAULT_LAUNCH,
) -> ForwardCall:
    """Checks a forward call and chooses its backend, architecture and kernels.

    Raises:
        InputError: an argument is wrong.
        PlanError: the generation of the GPU is not supported.
    """
    size = split_number(options.split_size)
    setup = Setup.for_call(spec, operands, options, launch, forward=True)
    program, call, target, _ = setup
    if program.signature.choice is not None:
        return ChosenForward(setup, operands, options, prepare)
    # With as many query rows as keys, a plan need not be made to know that it splits no keys.
    may_split = program.signature.paged or call.query_rows < call.seq_k
    tiled = target.backend == "tiled"
    fixed = launch.tiles or launch.blocks is not None or tiled
    invariant = options.split_size == INVARIANT
    if invariant and not (tiled or call.is_empty):
        size = program.invariant_split(target)
    elif options.split_size is None and may_split and not (fixed or call.is_empty):
        size = program.planned_split(target, call)
    # The tiled algorithms split no keys, and mods of packed sequences read lengths of their own.
    if size and not (tiled and program.signature.packed):
        program, call = split(program, call, operands, options, size, target)
        setup = setup._replace(program=program, call=call)
    if launch.blocks is not None and tiled:
        raise InputError(
            "tiled algorithms have no blocks",
            where="argument blocks",
            numbers=f"given {launch.blocks!r} for the backend 'tiled'",
            way_out="backend='emulator', or leave blocks out",
        )
    parts = [
        prepare(part, operands._replace(v=operands.v[..., columns]), options, launch)
        for part, columns in setup.parts(spec, "forward")
    ]
    if parts:
        return ForwardInParts(setup, operands, invariant=invariant, parts=parts)
    return PreparedForward(setup, operands, invariant=invariant)


def split(
    program: CallProgram,
    call: CheckedCall,
    operands: Operands,
    options: CallOptions,
    size: int,
    target: Target | None = None,
) -> tuple[CallProgram, CheckedCall]:
    """The program that splits the keys of a checked call, and the call with its scalars.

    Where blocks of a kernel that joins the results over several splits keep the GPU of the target
    busy, fewer parts are written and merged, or none.
    """
    scalars = options.scalars
    if WHOLE[0] not in call.scalars:
        scalars += (0, max(call.heads_q, 1), call.seq_q, call.seq_k)
    program = program.split()
    options = options._replace(scalars=(*scalars, size))
    call = check(program.signature, operands, options)
    runs = target is not None and target.backend != "tiled" and not call.is_empty
    run = program.run_of(target, call) if target is not None and runs else 1
    if run != 1:
        program = program.joining(run)
    if run != ALL_SPLITS:
        call = call.in_runs(run)
    return program, call
