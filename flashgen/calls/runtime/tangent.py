"""One call of the tangent pass: checks, the choice of a kernel, its build, and its launch.

The pass computes the tangents of the results of a forward call along tangents of its operands. It
starts from the results themselves, as the backward pass does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashgen.calls import sinks
from flashgen.calls.runtime import memory_layout
from flashgen.calls.runtime.arguments.tensors import check_tangents
from flashgen.calls.runtime.bind_arguments import bind, ranges_of
from flashgen.calls.runtime.bound_kernel import BoundKernel, KernelRun
from flashgen.calls.runtime.chosen_keys import ChosenPass
from flashgen.calls.runtime.kernel_arguments import named, pointers_of
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
    CallOptions,
    LaunchOptions,
    Operands,
    Tangents,
)
from flashgen.shared.signature import CallSignature

if TYPE_CHECKING:
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor
OPERANDS = ("q", "k", "v")
SINK_ALONE = "nothing to launch: no score and no V has a tangent"


class PreparedTangent(PreparedCall):
    """A checked call of the tangent pass.

    Attributes:
        names: the names of the tensors that have a tangent, in the order of a kernel's plan.
    """

    def __init__(self, setup: Setup, names: tuple[str, ...]) -> None:
        super().__init__(setup)
        self.names = names
        self._moves = self.program.moves(names)
        path = self.program.path_of_pass(self.target, "tangent", names)
        self._open_arch, self._open_why = path.arch, path.why
        self._bound: dict[tuple[Any, ...], tuple[BoundKernel, MinMaxTables, str]] = {}

    def run(
        self, operands: Operands, results: tuple[Tensor, Tensor], tangents: Tangents
    ) -> tuple[Tensor, Tensor, DerivativeOutcome]:
        """The tangents of out and of lse, and a record.

        Args:
            results: out and lse of the forward call.
        """
        out, lse = results
        is_tiled = self.target.backend == "tiled"
        if self.call.is_empty or not (self._moves or is_tiled):
            reason = EMPTY if self.call.is_empty else SINK_ALONE
            sink_tangents = self._sink_tangents(operands, results, tangents)
            return *sink_tangents, DerivativeOutcome(self, reason)
        operands, by_name = self._read(operands)
        if is_tiled:
            return self._on_cpu(operands, results, tangents, by_name)
        q, k, v, _, rng = operands
        out_tangent = empty_rows(q, v.shape[3])
        lse_tangent = torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
        if self.signature.packed:
            out_tangent.zero_()  # kernels do not write rows outside all sequences
        scaled, factor = self._scaled(tangents)
        read: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "o": out}
        read |= {f"{name}_tangent": getattr(scaled, name) for name in OPERANDS}
        copies = _readable(read)
        names = self.signature.tangent_names
        learned_tangents = zip(self.signature.learned, scaled.captured, strict=False)
        by_name |= {names[x.name]: y for x, y in learned_tangents if y is not None}
        tensors: dict[str, Tensor | None] = {
            **read,
            "lse": lse.contiguous(),
            "o_tangent": out_tangent,
            "lse_tangent": lse_tangent,
            "rng": rng,
            **pointers_of(by_name),
        }
        bound, tables, reason = self._bind(tensors, by_name)
        table_tensors, runs = tables.run(self.target, by_name, self.launch)
        tensors |= table_tensors
        runs.append(bound.timed(self.target, tensors, self.launch))
        built, self._built = self._built, 0.0
        if factor is not None:
            out_tangent.mul_(factor)
            lse_tangent.mul_(factor)
        return out_tangent, lse_tangent, DerivativeOutcome(self, reason, tuple(runs), copies, built)

    def _sink_tangents(
        self, operands: Operands, results: tuple[Tensor, Tensor], tangents: Tangents
    ) -> tuple[Tensor, Tensor]:
        """The tangents where the sink alone has one: the share of the sink in a row is known."""
        q, captured, (out, lse) = operands.q, operands.captured, results
        signature, sink = self.signature, self.signature.sink
        learned = zip(signature.learned, tangents.captured, strict=False)
        sink_tangent = next(
            (x for argument, x in learned if sink and argument.name == sink.name), None
        )
        out_tangent, lse_tangent = empty_rows(q, out.shape[3]).zero_(), torch.zeros_like(lse)
        if sink is None or sink_tangent is None:
            return out_tangent, lse_tangent
        by_name, call = named(signature, captured), self.call
        rows = sinks.rows_of_call(signature, by_name, q, call.first_head, call.q_offset)
        share = sinks.weights_of(by_name[sink.name].detach(), sink.dims, rows, lse)
        logit_tangents = sinks.logits_of(sink_tangent, sink.dims, rows)
        lse_tangent = (share * logit_tangents).masked_fill_(share == 0, 0)
        return out_tangent.sub_(lse_tangent[..., None] * out), lse_tangent

    def _on_cpu(
        self,
        operands: Operands,
        results: tuple[Tensor, Tensor],
        tangents: Tangents,
        by_name: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, DerivativeOutcome]:
        from flashgen.calls import cpu

        start = time.perf_counter()
        q, k, v, _, rng = operands
        with without_autocast():
            arguments = self._tile_arguments(by_name, rng, backward=True)
            out_tangent, lse_tangent = cpu.tangent(self.spec, q, k, v, results, tangents, arguments)
            out_tangent = in_memory_order_of(q, out_tangent.to(q.dtype))
        run = KernelRun(None, None, time.perf_counter() - start)
        return out_tangent, lse_tangent, DerivativeOutcome(self, CPU_REASON, (run,))

    def _scaled(self, tangents: Tangents) -> tuple[Tangents, Tensor | None]:
        """The tangents, in a float16 call divided by a power of two, and this power.

        Results are linear in all tangents together. The largest tangent is then about 1: products
        with V are of float16 numbers, which would overflow, or lose their bits.
        """
        if self.signature.dtype != "float16":
            return tangents, None
        present = [
            tangent for tangent in (*tangents[:3], *tangents.captured) if tangent is not None
        ]
        most = torch.stack([tangent.detach().abs().amax().float() for tangent in present]).amax()
        usable = (most > 0) & (most < float("inf"))
        power = torch.exp2(torch.floor(torch.log2(torch.where(usable, most, 1.0))))

        def divided(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor / power

        q, k, v, captured = tangents
        learned = tuple(map(divided, captured))
        return Tangents(divided(q), divided(k), divided(v), learned), power

    def _bind(
        self, tensors: dict[str, Tensor | None], captured: dict[str, Tensor]
    ) -> tuple[BoundKernel, MinMaxTables, str]:
        rows = {name: tensors[name] for name in (*OPERANDS, *(f"{x}_tangent" for x in OPERANDS))}
        present = {name: tensor for name, tensor in rows.items() if tensor is not None}
        arch, why = memory_layout.path_for(self._open_arch, self._open_why, **present)
        key = (arch, *(tensor.stride() for tensor in present.values()))
        key += (*tensors["o"].stride(), *(t.stride() for t in captured.values()))  # type: ignore[union-attr]
        bound_tables = self._bound.get(key)
        if bound_tables is not None:
            return bound_tables
        start = time.perf_counter()
        launch, signature = self.launch, self.signature
        self._kernel_arch = arch
        if len(self.names) == len(OPERANDS) + len(signature.learned):
            launch = self._tuned("tangent")  # measured with the tangents of all operands
        ranges = ranges_of(self.call, signature)
        build = self.program.tangent(arch, self.names, launch, ranges)
        self._built = time.perf_counter() - start
        if build.facts.path != arch and arch == self._open_arch:
            why = f"the kernel of tangents is of path {build.facts.path}"
        bound = bind(build, self.call, tensors, captured, packed=signature.packed)
        tables = MinMaxTables(self.program, self.target.arch, captured, (bound,))
        self._bound[key] = bound_tables = bound, tables, why
        return bound_tables


TangentCall = PreparedTangent | ChosenPass


class TangentInParts(PreparedTangent):
    """A checked call whose launches compute the tangents of some columns of the output each."""

    def __init__(self, setup: Setup, names: tuple[str, ...], parts: Sequence[TangentCall]) -> None:
        """
        Args:
            parts: the calls for some columns each, in order.
        """
        super().__init__(setup, names)
        self._parts = parts

    def run(
        self, operands: Operands, results: tuple[Tensor, Tensor], tangents: Tangents
    ) -> tuple[Tensor, Tensor, DerivativeOutcome]:
        out_tangent = empty_rows(operands.q, self.call.head_dim_v)
        lse_tangents: list[Tensor] = []
        records: list[DerivativeOutcome] = []
        for part, columns in zip(self._parts, columns_of_parts(self._parts), strict=True):
            out_tangent[..., columns], lse_tangent, record = part.run(
                *_arguments_of_columns(operands, results, tangents, columns)
            )
            lse_tangents.append(lse_tangent)
            records.append(record)
        return out_tangent, lse_tangents[0], DerivativeOutcome.from_parts(records)


def _arguments_of_columns(
    operands: Operands, results: tuple[Tensor, Tensor], tangents: Tangents, columns: slice
) -> tuple[Operands, tuple[Tensor, Tensor], Tangents]:
    """The arguments of a call for some columns of V and of the output."""
    (out, lse), v_tangent = results, tangents.v
    moving = tangents._replace(v=None if v_tangent is None else v_tangent[..., columns])
    return operands._replace(v=operands.v[..., columns]), (out[..., columns], lse), moving


def _readable(read: dict[str, Tensor | None]) -> tuple[str, ...]:
    """Copies the tensors that kernels cannot read, in place in ``read``; a reason for each copy."""
    copies = []
    for name, tensor in read.items():
        if tensor is None:
            continue
        if tensor.is_neg():
            tensor = read[name] = tensor.resolve_neg()
        argument = "out" if name == "o" else name
        why = memory_layout.row_obstacle(argument, tensor)
        why = why or memory_layout.base_obstacle(argument, tensor)
        if why is not None:
            read[name] = tensor.clone(memory_format=torch.contiguous_format)
            copies.append(f"{argument} was copied: {why}")
    return tuple(copies)


def names_of(signature: CallSignature, tangents: Tangents) -> tuple[str, ...]:
    """The names of the tensors that have a tangent in a call."""
    learned = zip(signature.learned, tangents.captured, strict=False)
    return (
        *(name for name in OPERANDS if getattr(tangents, name) is not None),
        *(tensor.name for tensor, tangent in learned if tangent is not None),
    )


def prepare(
    spec: AttentionSpec | CallProgram,
    operands: Operands,
    results: tuple[Tensor, Tensor],
    tangents: Tangents,
    options: CallOptions,
    launch: LaunchOptions = DEFAULT_LAUNCH,
) -> TangentCall:
    """Checks a call and chooses its backend, architecture and kernel.

    Raises:
        InputError: an argument is wrong.
        SpecError: the spec has no derivatives.
        PlanError: the generation of the GPU is not supported.
    """
    setup = Setup.for_call(spec, operands, options, launch)
    signature = setup.program.signature
    check_tangents(signature, operands, tangents)
    if signature.choice is not None:
        return ChosenPass(setup, operands, options, prepare)
    names = names_of(signature, tangents)
    column_parts = setup.parts(spec, "tangent", names) if setup.program.moves(names) else ()
    parts = [
        prepare(part, *_arguments_of_columns(operands, results, tangents, columns), options, launch)
        for part, columns in column_parts
    ]
    return TangentInParts(setup, names, parts) if parts else PreparedTangent(setup, names)
