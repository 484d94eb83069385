"""One backward call: checks, the choice of kernels, their build, and their launches."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashgen.calls.runtime import forward, learned_gradients, memory_layout
from flashgen.calls.runtime.arguments.options import is_deterministic
from flashgen.calls.runtime.arguments.tensors import check_gradients
from flashgen.calls.runtime.bind_arguments import (
    NO_NUMBERS,
    bind,
    elements_of_sums,
    numbers_of_pages,
    part_heads_of,
    ranges_of,
)
from flashgen.calls.runtime.bound_kernel import BoundKernel, KernelRun, Tensors
from flashgen.calls.runtime.chosen_keys import ChosenCall, ChosenPass
from flashgen.calls.runtime.kernel_arguments import pointers_of
from flashgen.calls.runtime.learned_gradients import (
    SINK_SUMS,
    ExactSums,
    FloatSums,
    contributions_of,
)
from flashgen.calls.runtime.memory_layout import empty_rows, in_memory_order_of
from flashgen.calls.runtime.minmax_tables import MinMaxTables
from flashgen.calls.runtime.prepared_call import (
    CPU_REASON,
    EMPTY,
    DerivativeOutcome,
    PreparedCall,
    Setup,
    columns_of_parts,
    without_autocast,
)
from flashgen.calls.runtime.programs import CallProgram
from flashgen.shared.call import (
    DEFAULT_LAUNCH,
    INVARIANT,
    CallOptions,
    LaunchOptions,
    Operands,
    OutputGradients,
)
from flashgen.shared.launch_facts import CONVERT_KERNELS
from flashgen.shared.paged import contiguous_call, one_entry
from flashgen.shared.signature import BOUNDARIES

if TYPE_CHECKING:
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor
Inputs = dict[str, Tensor]


# The tensors that are read row by row: their names in kernels, and the names of their arguments.
_READ = {"q": "q", "k": "k", "v": "v", "o": "out", "do": "dout"}

_GRADIENTS = {"": ("dq", "dk", "dv"), "queries": ("dq",), "keys": ("dk", "dv")}
"""The gradients of q, k and v that a call computes, by which it computes alone."""


class PreparedBackward(PreparedCall):
    """A checked backward call."""

    def __init__(
        self,
        setup: Setup,
        inputs: Inputs,
        *,
        deterministic: bool,
        invariant: bool = False,
        alone: str = "",
    ) -> None:
        """
        Args:
            setup: of a program in which only tensors whose gradients are needed have grad=True.
            inputs: the tensors q, k, v, o and do.
            invariant: whether the call is batch-invariant: tuned tiles depend on its sizes.
            alone: "queries" where only the gradient of q is computed, and k and v may be caches;
                "keys" where only the gradients of k and v are computed.
        """
        super().__init__(setup)
        self.deterministic = deterministic
        self._alone = alone
        self._invariant = invariant
        self._obstacles = {
            name: memory_layout.row_obstacle(_READ[name], tensor) for name, tensor in inputs.items()
        }
        # Operands with an obstacle are copied to contiguous tensors, which TMA can load.
        by_tma = {
            _READ[name]: tensor
            for name, tensor in inputs.items()
            if name != "o" and self._obstacles[name] is None
        }
        pass_name = alone or ("deterministic" if deterministic else "backward")
        path = self.program.path_of_pass(self.target, pass_name)
        self._kernel_arch, self._reason = memory_layout.path_for(path.arch, path.why, **by_tma)
        self._bound: dict[tuple[str, ...], tuple[tuple[BoundKernel, ...], MinMaxTables]] = {}
        self._sums: dict[str, int] = {}  # elements of the float32 sums, by their pointers
        # With exact sums: the largest number of contributions to an element of each tensor.
        self._contributions: dict[str, int] = {}

    def run(
        self, operands: Operands, gradients: OutputGradients
    ) -> tuple[tuple[Tensor, ...], DerivativeOutcome]:
        """Returns dq, dk, dv and the needed gradients of learned tensors, and a record.

        Where gradients are computed alone, the others are left out.
        """
        operands, by_name = self._read(operands)
        q, k, v, _, rng = operands
        out, lse, dout, dlse = gradients
        dlse = None if dlse is None else dlse.resolve_neg()
        gradients = OutputGradients(out.resolve_neg(), lse, dout.resolve_neg(), dlse)
        if self.target.backend == "tiled" and not self.call.is_empty:
            return self._on_cpu(operands, gradients, by_name)
        operand_of = dict(zip(_GRADIENTS[""], (q, k, v), strict=True))
        gradient_buffers = {
            name: empty_rows(operand_of[name], operand_of[name].shape[3])
            for name in _GRADIENTS[self._alone]
        }
        if self.signature.packed:  # kernels do not write rows outside all sequences
            for gradient in gradient_buffers.values():
                gradient.zero_()
        sums = (ExactSums if self.deterministic else FloatSums)(self.signature, by_name)
        if self.call.is_empty:
            learned_gradients.add_sink_without_keys(self.signature, sums, by_name, dlse, self.call)
            zeros = (gradient.zero_() for gradient in gradient_buffers.values())
            return (*zeros, *sums.gradients()), DerivativeOutcome(self, EMPTY)
        read = _inputs(operands, gradients)
        copies = self._copy_unaligned(read)
        tensors: dict[str, Tensor | None] = {
            **read,
            "lse": gradients.lse.contiguous(),
            "dlse": None if dlse is None else dlse.contiguous(),
            "rows": q.new_empty((*q.shape[:3], 2), dtype=torch.float32),
            "rng": rng,
            **gradient_buffers,
        }
        if self.signature.paged:
            tensors |= {"k_cache": read["k"], "v_cache": read["v"]}
        tensors |= pointers_of(by_name)
        tensors |= sums.pointers
        bound_and_tables = self._bound.get(copied := tuple(copies))
        if bound_and_tables is None:
            bound_and_tables = self._bound[copied] = self._bind(tensors, by_name)
        bound, tables = bound_and_tables
        tensors["dq_sum"] = None
        tensors |= {
            name: q.new_empty(elements, dtype=torch.float32)
            for name, elements in self._sums.items()
        }
        for kernel in bound:
            if SINK_SUMS in kernel.arguments.pointers:
                tensors[SINK_SUMS] = learned_gradients.sink_sums_for(kernel, q)
        table_tensors, launches = tables.run(self.target, by_name, self.launch)
        tensors |= table_tensors
        for kernel in bound:
            for turn in range(kernel.build.facts.launches):
                if turn > 0 and isinstance(sums, ExactSums):
                    tensors |= sums.measured(self._contributions)
                launches.append(kernel.timed(self.target, tensors, self.launch))
        sink_sums = tensors.get(SINK_SUMS)
        if sink_sums is not None:
            learned_gradients.add_sink_sums(self.signature, sums, by_name, sink_sums, self.call)
        sink = self.signature.sink
        if sink is not None and sink.grad and sink.by_row:
            rows = tensors["rows"]
            assert rows is not None, "made above"
            results = gradients.lse, rows
            learned_gradients.add_sink_of_rows(self.signature, sums, by_name, *results, self.call)
        built, self._built = self._built, 0.0
        record = DerivativeOutcome(
            self, self._reason, tuple(launches), tuple(copies.values()), built
        )
        return (*gradient_buffers.values(), *sums.gradients()), record

    def _copy_unaligned(self, read: Inputs) -> dict[str, str]:
        """Copies inputs that kernels cannot read, in place in ``read``; the reason of each copy."""
        copies = {}
        for name, tensor in read.items():
            why = self._obstacles[name] or memory_layout.base_obstacle(_READ[name], tensor)
            if why is not None:
                read[name] = tensor.clone(memory_format=torch.contiguous_format)
                copies[name] = f"{_READ[name]} was copied: {why}"
        return copies

    def _bind(
        self, tensors: Tensors, captured: Mapping[str, Tensor]
    ) -> tuple[tuple[BoundKernel, ...], MinMaxTables]:
        start = time.perf_counter()
        call, deterministic, packed = self.call, self.deterministic, self.signature.packed
        launch = self.launch
        if not (self._invariant or self._alone):
            launch = self._tuned("deterministic" if deterministic else "backward")
        ranges = ranges_of(call, self.signature)
        memory = self.target.memory if call.group > 1 else None  # which decides on parts of groups
        if self._alone:
            builds = self.program.alone(self._alone, self._kernel_arch, launch, ranges, call.seq_q)
        else:
            builds = self.program.backward(
                self._kernel_arch, deterministic, launch, ranges, call.sizes, memory
            )
        self._built = time.perf_counter() - start
        heads = min(part_heads_of(build.facts, call) for build in builds)
        self._sums = {
            f"{CONVERT_KERNELS[build.facts.kernel]}_sum": elements_of_sums(
                build.facts, call, packed=packed, part_heads=heads
            )
            for build in builds
            if build.facts.kernel in CONVERT_KERNELS
        }
        k = tensors["k"]
        assert k is not None, "an operand"
        numbers = numbers_of_pages(k) if self.signature.paged else NO_NUMBERS
        bound = tuple(
            bind(build, call, tensors, captured, numbers=numbers, packed=packed, part_heads=heads)
            for build in builds
        )
        for build in builds:
            if build.facts.kernel == "captured_exact":
                self._contributions = contributions_of(
                    build.facts.terms, build.facts, call, captured, packed=packed
                )
        return bound, MinMaxTables(self.program, self.target.arch, captured, bound)

    def _on_cpu(
        self, operands: Operands, gradients: OutputGradients, captured: Mapping[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], DerivativeOutcome]:
        from flashgen.calls import cpu

        start = time.perf_counter()
        q, k, v, _, rng = operands
        with without_autocast():
            if self.signature.paged:
                input_gradients = self._from_contiguous(operands, gradients, captured)
            else:
                tiles = self._tiles(q, k, captured, rng, backward=True)
                input_gradients = cpu.backward(self.spec, q, k, v, gradients, *tiles)
            ordered = map(in_memory_order_of, (q, k, v), input_gradients)
            by_gradient = dict(zip(_GRADIENTS[""], ordered, strict=False))
            results = (
                *(by_gradient[name] for name in _GRADIENTS[self._alone]),
                *(gradient.contiguous() for gradient in input_gradients[3:]),
            )
        run = KernelRun(None, None, time.perf_counter() - start)
        return results, DerivativeOutcome(self, CPU_REASON, (run,))

    def _from_contiguous(
        self, operands: Operands, gradients: OutputGradients, captured: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """The gradient of q in a call with a paged cache, from copies of its keys and values."""
        from flashgen.calls import cpu
        from flashgen.spec.language.signature import contiguous

        q, k, v, _, rng = operands
        copied = contiguous_call(q, k, v, captured)
        if BOUNDARIES[0] not in captured:
            out, lse, dout = map(one_entry, gradients[:3])
            dlse = None if gradients.dlse is None else one_entry(gradients.dlse)
            gradients = OutputGradients(out, lse, dout, dlse)
        tiles = self._tile_arguments(copied.tensors, rng, backward=True)
        dq, *_ = cpu.backward(contiguous(self.spec), *copied[:3], gradients, tiles)
        return (copied.like_queries(dq, q),)


class ChosenBackward(ChosenPass):
    """A backward call with lists, whose gradients and record are as in `PreparedBackward`."""

    def __init__(self, setup: Setup, operands: Operands, *arguments: Any) -> None:
        super().__init__(setup, operands, *arguments)
        self.deterministic = True  # sums are in the order of the lists
        learned_by_mods = [x for x in self.signature.learned if x != self.signature.sink]
        if setup.target.backend != "tiled" and not (setup.call.is_empty or learned_by_mods):
            self._chosen = ChosenCall(setup, operands, self._options)

    def run(self, operands: Operands, gradients: OutputGradients) -> Any:
        if self._chosen is None:
            return super().run(operands, gradients)
        self._named(operands.captured, operands.k)
        passes = forward.prepare, prepare_queries, functools.partial(prepare, alone="keys")
        results, record, key_records = self._chosen.backward(
            operands, gradients, self.target, *passes
        )
        launches = [*record.launches]
        for forward_records, backward_record, added in key_records:
            launches += [*map(_run_of, forward_records), *backward_record.launches, *added]
        return results, record._replace(launches=tuple(launches))


def _run_of(outcome: tuple[Any, ...]) -> KernelRun:
    """The launch of a forward call, from the record of its run."""
    record = forward.ForwardOutcome(*outcome)
    build = None if record.kernel is None else record.kernel.bound.build
    return KernelRun(build, record.counters, record.run_seconds)


BackwardCall = PreparedBackward | ChosenBackward


class BackwardInParts(PreparedBackward):
    """A checked backward call whose launches compute some columns of V each.

    The gradients of q, k and learned tensors are sums over the columns: dP = dO V^T is one, and so
    is what delta subtracts from it.
    """

    in_parts = True

    def __init__(
        self, setup: Setup, inputs: Inputs, *, parts: Sequence[BackwardCall], **options: Any
    ) -> None:
        """
        Args:
            parts: the calls for some columns each, in order.
            options: as for `PreparedBackward`.
        """
        super().__init__(setup, inputs, **options)
        self._parts = parts

    def run(
        self, operands: Operands, gradients: OutputGradients
    ) -> tuple[tuple[Tensor, ...], DerivativeOutcome]:
        names = _GRADIENTS[self._alone]
        dv = [empty_rows(operands.v, self.call.head_dim_v)] if "dv" in names else []
        sums: list[Tensor] = []
        records: list[DerivativeOutcome] = []
        for part, columns in zip(self._parts, columns_of_parts(self._parts), strict=True):
            part_arguments = (
                operands._replace(v=operands.v[..., columns]),
                columns_of_outputs(gradients, columns),
            )
            (*computed,), record = part.run(*part_arguments)
            records.append(record)
            for dv_buffer in dv:
                dv_buffer[..., columns] = computed.pop(len(names) - 1)
            sums = [a.add_(b) for a, b in zip(sums, computed, strict=True)] if sums else computed
        before = len(names) - len(dv)
        return (*sums[:before], *dv, *sums[before:]), DerivativeOutcome.from_parts(records)


def columns_of_outputs(gradients: OutputGradients, columns: slice) -> OutputGradients:
    """The gradients of some columns of the output; that of LSE belongs to the first of them."""
    out, lse, dout, dlse = gradients
    return OutputGradients(
        out[..., columns], lse, dout[..., columns], dlse if columns.start == 0 else None
    )


def _inputs(operands: Operands, gradients: OutputGradients) -> Inputs:
    """The tensors that kernels read row by row, by their names in kernels."""
    q, k, v = operands[:3]
    return {"q": q, "k": k, "v": v, "o": gradients.out, "do": gradients.dout}


def prepare(
    spec: AttentionSpec | CallProgram,
    operands: Operands,
    gradients: OutputGradients,
    options: CallOptions,
    launch: LaunchOptions = DEFAULT_LAUNCH,
    needed: tuple[bool, ...] = (),
    *,
    alone: str = "",
) -> BackwardCall:
    """Checks a backward call and chooses its backend, architecture and kernels.

    Args:
        needed: for each learned tensor, whether its gradient is needed; () when all are.
        alone: as for `PreparedBackward`.

    Raises:
        InputError: an argument is wrong.
        SpecError: the spec has no backward pass.
        PlanError: the generation of the GPU is not supported.
    """
    setup = Setup.for_call(spec, operands, options, launch, alone=alone)
    program = setup.program
    signature = program.signature
    check_gradients(operands.q, operands.v, gradients)
    deterministic = bool(alone) or is_deterministic(options.deterministic)
    if alone:
        program = program.learning(frozenset())
    elif not all(needed):
        chosen = zip(signature.learned, needed, strict=True)
        program = program.learning(frozenset(x.name for x, wanted in chosen if wanted))
    setup = setup._replace(program=program)
    if signature.choice is not None:
        return ChosenBackward(setup, operands, options, prepare)
    invariant = options.split_size == INVARIANT
    pass_options: Any = {"deterministic": deterministic, "invariant": invariant, "alone": alone}
    inputs = _inputs(operands, gradients)
    pass_name = alone or ("deterministic" if deterministic else "backward")
    parts = [
        prepare(
            part,
            operands._replace(v=operands.v[..., columns]),
            columns_of_outputs(gradients, columns),
            options,
            launch,
            needed,
            alone=alone,
        )
        for part, columns in setup.parts(spec, pass_name)
    ]
    if parts:
        return BackwardInParts(setup, inputs, parts=parts, **pass_options)
    return PreparedBackward(setup, inputs, **pass_options)


def prepare_queries(
    spec: AttentionSpec | CallProgram,
    operands: Operands,
    gradients: OutputGradients,
    options: CallOptions,
    launch: LaunchOptions = DEFAULT_LAUNCH,
) -> BackwardCall:
    """`prepare` for the gradient of q alone, which specs with a paged cache have too.

    Keys and values are constants then: operands.k and operands.v are the caches
    [pages, heads_kv, page_size, head dim], or the second is the first columns of the first. Every
    run gives the same bits. Where the page table names a page that the cache does not have, the
    rows of its sequence that reach it are NaN.

    Raises:
        InputError, PlanError: as `prepare`.
        SpecError: the results are parts of others, or the cache has codes.
    """
    return prepare(spec, operands, gradients, options, launch, alone="queries")
