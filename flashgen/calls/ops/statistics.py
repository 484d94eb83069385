"""A call that returns statistics beside its output.

The forward kernel writes LSE and, for a softmax, the largest scores. Other statistics are computed
by further calls, of the specs that `statistic_spec` makes: for each one pass over the scores. A
call and its statistics take the same way through torch, so that they can be compiled, mapped and
traced alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from flashgen.calls.ops.dispatched_call import dispatched_call
from flashgen.calls.ops.operator import Operator
from flashgen.calls.runtime.arguments.call import Call
from flashgen.calls.runtime.arguments.options import refuse_exported_statistics
from flashgen.calls.runtime.arguments.refusals import (
    is_constant,
    is_dtensor,
    refuse,
    runs_while_traced,
    shown,
    whole_number,
)
from flashgen.calls.sinks import rows_of_call, weights_of
from flashgen.shared.aux_results import AuxOutput, AuxRequest
from flashgen.shared.call import INVARIANT, CallOptions, Operands
from flashgen.shared.dtypes import POSITION_LIMIT
from flashgen.shared.signature import (
    BOUNDARIES,
    FIRST_ROW,
    LAYOUT_NAMES,
    OFFSETS,
    ROWS,
    WHOLE,
    TensorArgument,
)

if TYPE_CHECKING:
    from flashgen.calls.ops.api import Attention

Tensor = torch.Tensor

MOST_COLUMNS = 256
"""Blocks of keys whose mass one call computes: the columns of its V."""

_COLUMNS = 8
_transform = torch._C._functorch.peek_interpreter_stack


def call_with_statistics(
    op: Attention,
    request: Any,
    operands: Operands,
    options: CallOptions,
    captures: Mapping[str, Any],
    **part: Any,
) -> tuple[Tensor, AuxOutput]:
    """The output of a call and the statistics that are asked for.

    Args:
        request: an `AuxRequest`, or a value with some of its attributes, such as PyTorch's.
        options: without scalars; the offsets may be tensors.
        captures: the scalars and captured tensors by name.
        part: h_offset and whole.

    Raises:
        InputError: as for the call; or a statistic is not available for it.
    """
    request = _checked(op, request)
    softmax = op.signature.normalize == "softmax"
    statistics: dict[str, Any] = {}
    q, k, v, _, rng = operands
    call_options = dict(zip(_OPTIONS, (*options[:7], options.dropout_p), strict=True)) | part
    call_options["batch_invariant"] = options.split_size == INVARIANT
    if call_options["batch_invariant"]:
        call_options["split_size"] = None
    out: Any
    # Kernels of other weights have no maximum of scores, and the rules of DTensors no third result.
    if request.max_scores and softmax and not is_dtensor(q):
        out, lse, statistics["max_scores"] = op.with_maxima(
            q, k, v, rng=rng, **call_options, **captures
        )
        request = request._replace(max_scores=False)
    elif softmax:
        out, lse = op(q, k, v, rng=rng, return_lse=True, **call_options, **captures)
    else:
        out, lse = op(q, k, v, rng=rng, **call_options, **captures), None
    if request.lse:
        statistics["lse"] = lse
    if any(request[1:]) or op.own_statistics:
        passes = Passes(op, operands, options, captures, lse, **part)
        if request.max_scores:
            statistics["max_scores"] = passes.statistic("max_scores")
        if request.entropy:
            statistics["entropy"] = passes.with_gradients(passes.statistic("entropy"))
        if request.key_mass:
            statistics["key_mass"] = passes.statistic("key_mass", over="queries")
        if request.block_mass:
            statistics["block_mass"] = passes.block_mass(request.block_mass)
        statistics["statistics"] = {
            name: passes.statistic(f".{name}", over) for name, over in op.own_statistics
        }
    return out, AuxOutput(**statistics)


_OPTIONS = (
    *("scale", "q_offset", "k_offset", "backend", "arch", "deterministic", "split_size"),
    "dropout_p",
)


def _checked(op: Attention, request: Any) -> AuxRequest:
    missing = [name for name in ("lse", "max_scores") if not hasattr(request, name)]
    if missing:
        refuse(
            "return_aux is not a request for results beside the output",
            "argument return_aux",
            f"given {shown(request)}",
            "return_aux=fg.AuxRequest(lse=True)",
        )
    values = {x: getattr(request, x, None) for x in AuxRequest._fields}
    asks_block_mass = values["block_mass"] is not None
    block = whole_number(values["block_mass"]) if asks_block_mass else None
    if (asks_block_mass and (block is None or not 1 <= block <= POSITION_LIMIT)) or any(
        not isinstance(value, bool | None) for name, value in values.items() if name != "block_mass"
    ):
        refuse(
            "a request names results by True, and block_mass by the keys of a block",
            "argument return_aux",
            f"given {request!r:.200}; a block has from 1 to {POSITION_LIMIT:,} keys",
            "return_aux=fg.AuxRequest(entropy=True, block_mass=64)",
        )
    flags = {name: bool(value) for name, value in values.items() if name != "block_mass"}
    checked_request = AuxRequest(**flags, block_mass=block)
    if op.is_exported and checked_request != AuxRequest(lse=True):
        refuse_exported_statistics()
    if op.signature.normalize != "softmax" and (checked_request.lse or checked_request.entropy):
        refuse(
            "weights that are no exponentials have no log-sum-exp and no entropy",
            "argument return_aux",
            f"given {request!r:.200}; the spec has a weight_mod or another divisor",
            "max_scores, key_mass, block_mass, or fg.sum_over_keys(...) of the weights",
        )
    return checked_request


class Passes:
    """The calls that compute the statistics of one call."""

    def __init__(
        self,
        op: Attention,
        operands: Operands,
        options: CallOptions,
        captures: Mapping[str, Any],
        lse: Tensor | None,
        **part: Any,
    ) -> None:
        self._op = op
        self._fields: tuple[Any, ...] = ()

        def variant(*fields: Any) -> Operator:
            self._fields = fields
            return op.variant_of(*fields)

        autocast = torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()
        q_offset = 0 if options.q_offset is None else options.q_offset
        options = options._replace(q_offset=q_offset, dropout_p=0.0)
        operator, operands, options = Call.from_arguments(
            op.variant_of(), variant, operands, options, captures, autocast=autocast, **part
        )
        self._operands, self._options = operands, options
        self._signature = operator.signature
        self._captured = dict(zip(operator.tensors, operands.captured, strict=True))
        self._scalars = dict(zip(operator.scalars, options.scalars, strict=True))
        self._scalars[FIRST_ROW] = options.q_offset
        if lse is not None:
            self._captured[ROWS[0]] = lse.detach()
        elif op.signature.normalize == "sum":
            self._captured[ROWS[0]] = self.statistic("sums")

    def statistic(self, name: str, over: str = "keys") -> Tensor:
        """A statistic of each row of queries or, in [batch, heads_q, seq_k], of each key."""
        if over == "queries" and self._signature.choice is not None:
            refuse(
                "queries that choose their keys have no statistics of keys",
                "argument return_aux",
                f"statistic {name.removeprefix('.')!r}",
                "fg.sum_over_keys and fg.max_over_keys; or a block layout, which has them: "
                "fg.BlockSparse(None, ...) and layout=fg.Layout.of(live)",
            )
        operator = self._op.statistic_operator(name, self._fields)
        q, k, *_ = self._operands
        captured = {name: tensor.detach() for name, tensor in self._captured.items()}
        options = self._options
        if over == "queries":
            if operator.signature.paged:
                refuse(
                    "a paged cache has no statistics of keys",
                    "argument return_aux",
                    "the keys of a page can belong to several sequences",
                    "fg.sum_over_keys and fg.max_over_keys, or contiguous keys with packed=True",
                )
            q, k = k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1), q
            captured = _exchanged(captured)
            starts = options.k_offset, options.q_offset
            options = options._replace(q_offset=starts[0], k_offset=starts[1], split_size=None)
        v = k.new_zeros(_COLUMNS).expand(*k.shape[:3], _COLUMNS)
        with torch.no_grad():
            return self._call(operator, q.detach(), k.detach(), v, captured, options)[1]

    def with_gradients(self, entropy: Tensor) -> Tensor:
        """The entropy, whose gradients are the gradients of the output of another call."""
        if self._op.signature.paged or not self._is_differentiated():
            return entropy
        # In P (log P + H - mass), whose derivative is that of H where LSE and H are constant, the
        # scores of a row have less in common than in P log P.
        mass = sink_summand = torch.ones_like(entropy)
        if self._signature.sink is not None:
            share = self._weights_of_sink(self._signature.sink)
            mass = 1 - share.detach()
            sink_summand = share * (mass - entropy)
        operator = self._op.statistic_operator("entropy_slope", self._fields)
        q, k, *_ = self._operands
        captured = self._captured | {ROWS[1]: entropy - mass}
        first = torch.arange(_COLUMNS, device=k.device) == 0
        v = _on_all_ranks(first.to(k.dtype), k).expand(*k.shape[:3], _COLUMNS)
        slopes = self._call(operator, q, k, v, captured, self._options._replace(split_size=0))[0]
        carrier = slopes[..., 0].float() + sink_summand  # finite
        return entropy + (carrier - carrier.detach())

    def _is_differentiated(self) -> bool:
        tensors = (*self._operands[:2], *self._operands.captured)
        # What torch.compile traces inside of torch.func.grad does not require gradients itself.
        wrapped = torch.compiler.is_compiling() and _transform() is not None
        reverse = torch.is_grad_enabled() and (wrapped or any(x.requires_grad for x in tensors))
        return reverse or _in_forward_mode()

    def _weights_of_sink(self, sink: TensorArgument) -> Tensor:
        """The sink's share of each row, differentiable by the sink."""
        q, captured = self._operands.q, self._captured
        if is_dtensor(q):
            refuse(
                "the entropy of DTensors has no gradients beside a sink",
                "argument return_aux",
                f"entropy=True; sink {sink.name!r}, and operands with gradients",
                "under torch.no_grad() for the numbers alone; local tensors for gradients",
            )
        first_head = self._scalars.get(WHOLE[0], 0)
        rows = rows_of_call(self._signature, captured, q, first_head, self._options.q_offset)
        return weights_of(captured[sink.name], sink.dims, rows, captured[ROWS[0]])

    def block_mass(self, block: int) -> Tensor:
        """The mass of each block of keys in each row: the weights times a matrix of zeros and ones,
        with a column for each block."""
        q, k, *_ = self._operands
        if self._op.signature.paged:
            refuse(
                "a paged cache has no mass of blocks",
                "argument return_aux",
                f"block_mass {block}; pages lie anywhere in the cache",
                "contiguous keys, in a batch entry for each sequence or with packed=True",
            )
        positions = torch.arange(k.shape[2], device=k.device)
        if BOUNDARIES[1] in self._captured:
            ends = self._captured[BOUNDARIES[1]]
            sequence = torch.searchsorted(ends[1:].contiguous(), positions, right=True)
            positions = positions - ends[sequence.clamp(max=len(ends) - 2)]
        blocks, masses, first = -(-k.shape[2] // block), [], 0
        while first < blocks:
            columns = _COLUMNS
            # A symbol for the length stays one: the program is that of all lengths within a bound.
            while columns < MOST_COLUMNS and not is_constant(blocks - first <= columns):
                columns *= 2
            block_numbers = torch.arange(first, first + columns, device=k.device)
            live = (positions[:, None] // block == block_numbers).to(k.dtype)
            v = _on_all_ranks(live, k).expand(*k.shape[:3], columns)
            operator = self._op.statistic_operator("block_mass", self._fields, columns)
            options = self._options._replace(split_size=0)
            with torch.no_grad():
                out = self._call(operator, q.detach(), k.detach(), v, self._captured, options)[0]
            masses.append(out[..., : blocks - first])
            first += MOST_COLUMNS
        if not masses:
            return q.new_zeros(*q.shape[:3], 0, dtype=torch.float32)
        return torch.cat(masses, -1) if len(masses) > 1 else masses[0]

    def _call(
        self,
        operator: Operator,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: Mapping[str, Tensor],
        options: CallOptions,
    ) -> tuple[Tensor, ...]:
        tensors = tuple([captured[name] for name in operator.tensors])
        scalars = tuple([self._scalars[name] for name in operator.scalars])
        options = options._replace(scalars=scalars)
        return dispatched_call(operator, Operands(q, k, v, tensors, None), options)


@runs_while_traced
def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def _on_all_ranks(value: Tensor, beside: Tensor) -> Tensor:
    """The tensor, as a DTensor beside another one."""
    if not is_dtensor(beside):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = beside.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _exchanged(captured: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The captured tensors of the transposed problem, in which keys and queries change places."""
    exchanged = dict(captured)
    for q_name, k_name in (BOUNDARIES, OFFSETS):
        for name, exchanged_name in ((q_name, k_name), (k_name, q_name)):
            exchanged.pop(exchanged_name, None)
            if name in captured:
                exchanged[exchanged_name] = captured[name]
    if LAYOUT_NAMES[0] in captured:
        live, *lists = (captured[name] for name in LAYOUT_NAMES)
        turned = live.transpose(2, 3), *lists[2:], *lists[:2]
        exchanged |= dict(zip(LAYOUT_NAMES, turned, strict=True))
    return exchanged
