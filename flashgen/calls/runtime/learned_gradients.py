"""Gradients of learned tensors: the sums that kernels add to, and the gradients made from them.

At the end are the parts of the sink's gradient and of LSE that no kernel computes.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from flashgen.calls import sinks
from flashgen.calls.runtime.arguments.positions import has_sequences, rows_outside
from flashgen.calls.runtime.bound_kernel import BoundKernel
from flashgen.shared.call import CheckedCall
from flashgen.shared.dtypes import OPERANDS
from flashgen.shared.signature import CallSignature, GradientTerm, TensorArgument, field_stem

if TYPE_CHECKING:
    from flashgen.kernels.planner import Plan
    from flashgen.shared.launch_facts import LaunchFacts

Tensor = torch.Tensor

SUM_BITS = 62
"""The magnitude of an exact sum is at most 2^62, which leaves a bit for its sign."""

SINK_SUMS = "sink_sums"
"""The delta kernel's pointer to the contributions of each warp's rows to the sink's gradient."""

_FRACTION_BITS = 23  # fraction bits of a float32; the exponent is above them
_NOT_FINITE = 255  # the exponent of infinities and NaN
_BIAS = 127
_WIDE_FRACTION, _WIDE_BIAS = 52, 1023  # fraction bits and exponent bias of a float64


class LearnedGradients(abc.ABC):
    """The gradients of learned tensors: sums from kernels, and terms that are added afterwards.

    Attributes:
        pointers: the tensors of sums by the names of kernels' pointers.
    """

    def __init__(
        self, signature: CallSignature, captured: Mapping[str, Tensor], dtype: torch.dtype
    ) -> None:
        """
        Args:
            dtype: the dtype of the sums, which are contiguous.
        """
        self._tensors = {tensor.name: captured[tensor.name] for tensor in signature.learned}
        self._totals = {
            name: torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
            for name, tensor in self._tensors.items()
        }
        self.pointers: dict[str, Tensor | None] = {
            f"dc_{field_stem(name)}": total for name, total in self._totals.items()
        }
        self._added: dict[str, Tensor] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds a term that no kernel computes: float32, of the shape of the tensor."""
        self._added[name] = gradient

    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients, in the shapes and dtypes of the learned tensors, in signature order."""
        return tuple(self._gradient(name, tensor.dtype) for name, tensor in self._tensors.items())

    @abc.abstractmethod
    def _gradient(self, name: str, dtype: torch.dtype) -> Tensor:
        """The gradient of one learned tensor, in this dtype."""


class FloatSums(LearnedGradients):
    """Float sums to which kernels add in the order in which their blocks run."""

    def __init__(self, signature: CallSignature, captured: Mapping[str, Tensor]) -> None:
        assert signature.dtype is not None, "that of a call"
        dtype = OPERANDS[signature.dtype].sums.dtype
        super().__init__(signature, captured, getattr(torch, dtype))

    def _gradient(self, name: str, dtype: torch.dtype) -> Tensor:
        total, added = self._totals[name], self._added.get(name)
        return (total if added is None else total + added).to(dtype)


class ExactSums(LearnedGradients):
    """64-bit sums of multiples of a unit, which are the same in any order.

    The unit of a tensor is a power of 2. It follows from the greatest contribution and from the
    number of contributions to one element. With a contribution that is infinite or NaN the whole
    gradient of that tensor is NaN.
    """

    def __init__(self, signature: CallSignature, captured: Mapping[str, Tensor]) -> None:
        super().__init__(signature, captured, torch.int64)
        self._greatest = {
            name: torch.zeros((), dtype=torch.int32, device=tensor.device)
            for name, tensor in self._tensors.items()
        }
        self._units: dict[str, Tensor] = {}
        for name in self._tensors:  # the units are computed later
            self.pointers |= {f"greatest_{name}": self._greatest[name], f"root_{name}": None}

    def measured(self, counts: Mapping[str, int]) -> dict[str, Tensor]:
        """Computes the units from the greatest contributions; returns the pointers to their roots.

        Args:
            counts: the largest number of contributions to one element, by name of the tensor, for
                tensors to which a kernel adds.
        """
        roots = {}
        for name, most in counts.items():
            root, self._units[name] = unit_of(self._greatest[name], most)
            roots[f"root_{name}"] = root
        return roots

    def _gradient(self, name: str, dtype: torch.dtype) -> Tensor:
        total, added, unit = self._totals[name], self._added.get(name), self._units.get(name)
        if added is not None:
            return (added if unit is None else total * unit + added).to(dtype)
        if unit is None:  # no kernel added to it
            return total.to(dtype)
        # A product in float64, rounded when it is written.
        return torch.mul(total, unit, out=torch.empty_like(total, dtype=dtype))


def unit_of(greatest: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The unit of exact sums, and the square root of its reciprocal: both powers of 2.

    A contribution is below 2^(e - 126), where e is the biased exponent of the greatest one. With
    n = 62 - log2(most), rounded down, a contribution may be up to 2^n units, so that ``most`` of
    them stay within 2^62. The root is a float32 for denormal contributions too.

    Args:
        greatest: int32, the bits of a float32 that is not negative.
        most: the largest number of contributions to one sum.

    Returns:
        The root in float32, and the unit in float64; NaN where the greatest contribution is not
        finite. No value is read on the host.
    """
    exponent = greatest >> _FRACTION_BITS
    bits = SUM_BITS - (most - 1).bit_length()
    half = (bits + _BIAS - 1 - exponent) >> 1
    root = ((half + _BIAS) << _FRACTION_BITS).view(torch.float32)
    unit = ((_WIDE_BIAS - 2 * half).to(torch.int64) << _WIDE_FRACTION).view(torch.float64)
    return root, torch.where(exponent < _NOT_FINITE, unit, math.nan)


def contributions_of(
    terms: Iterable[GradientTerm],
    plan: Plan | LaunchFacts,
    call: CheckedCall,
    captured: Mapping[str, Tensor],
    *,
    packed: bool,
) -> dict[str, int]:
    """For each learned tensor, the largest number of contributions to one of its elements.

    Args:
        terms: the elements to whose gradients the kernel adds.
        plan: the plan of that kernel.
        packed: whether the call has packed sequences, which share its lengths.
    """
    most: dict[str, int] = {}
    for term in terms:
        known_positions = _known_positions(call, captured)
        count = _contributions(
            term, plan, call, known_positions, captured[term.tensor].shape, packed
        )
        most[term.tensor] = most.get(term.tensor, 0) + count
    return most


def _contributions(
    term: GradientTerm,
    plan: Plan | LaunchFacts,
    call: CheckedCall,
    known_positions: Mapping[str, tuple[int, int]],
    shape: Sequence[int],
    packed: bool,
) -> int:
    """The largest number of contributions of one term to one element."""
    seq_q, seq_k, batch = call.seq_q, call.seq_k, call.batch
    tiles = seq_q // plan.block_q + batch if packed else -(-seq_q // plan.block_q)
    warps = tiles * plan.warps
    by_rows, by_columns = {
        "element": (seq_q, seq_k),
        "row": (seq_q, 1),
        "column": (warps, seq_k),
        "block": (warps, 1),
    }[term.summed_over]
    separating = _separating_indices(term, known_positions, shape)
    # The rows of all sequences together are at most seq_q, their keys at most seq_k.
    along = "q" not in separating or ("k" not in separating and by_columns > 1)
    entries = 1 if packed and along else batch
    counts = {"b": entries, "h": call.heads_q, "q": by_rows, "k": by_columns}
    return math.prod(count for index, count in counts.items() if index not in separating)


def _known_positions(
    call: CheckedCall, captured: Mapping[str, Tensor]
) -> dict[str, tuple[int, int]]:
    """The half-open ranges of the indices b, h, q and k, but of offsets that are tensors."""
    ranges = {
        "b": (0, call.batch),
        "h": (0, call.heads_q),
        "q": (call.q_offset, call.q_offset + call.seq_q),
        "k": (call.k_offset, call.k_offset + call.seq_k),
    }
    return {index: ends for index, ends in ranges.items() if f"{index}_offset" not in captured}


def _separating_indices(
    term: GradientTerm, known_positions: Mapping[str, tuple[int, int]], shape: Sequence[int]
) -> set[str]:
    """The indices b, h, q, k whose values all address different elements of the tensor."""
    return {
        index
        for index, size in zip(term.indices, shape, strict=True)
        if index is not None
        and index in known_positions
        and known_positions[index][0] >= 0
        and known_positions[index][1] <= size
    }


def lse_without_keys(
    signature: CallSignature, captured: Mapping[str, Tensor], q: Tensor, call: CheckedCall
) -> Tensor:
    """LSE of a call with seq_k 0, float32 [batch, heads_q, seq_q]: the sink's logit in each row."""
    if not has_sequences(signature, captured):
        return q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    sink, rows = (
        _sink(signature),
        sinks.rows_of_call(signature, captured, q, call.first_head, call.q_offset),
    )
    lse = sinks.logits_of(captured[sink.name], sink.dims, rows).expand(q.shape[:3]).contiguous()
    if signature.packed:
        lse.masked_fill_(rows_outside(captured, q.shape[2]), -torch.inf)
    return lse


def add_sink_without_keys(
    signature: CallSignature,
    gradients: LearnedGradients,
    captured: Mapping[str, Tensor],
    dlse: Tensor | None,
    call: CheckedCall,
) -> None:
    """Adds the sink's gradient of a call with seq_k 0, where that gradient is needed."""
    sink = signature.sink
    needed = sink is not None and sink.grad and has_sequences(signature, captured)
    if sink is not None and needed and dlse is not None:
        if signature.packed:
            dlse = dlse.masked_fill(rows_outside(captured, dlse.shape[2]), 0)
        rows = sinks.rows_of_call(signature, captured, dlse, call.first_head, call.q_offset)
        tensor = captured[sink.name]
        sink_gradient = sinks.gradient_without_keys(tensor, sink.dims, rows, dlse.float())
        gradients.add(sink.name, sink_gradient)


def add_sink_of_rows(
    signature: CallSignature,
    gradients: LearnedGradients,
    captured: Mapping[str, Tensor],
    lse: Tensor,
    rows: Tensor,
    call: CheckedCall,
) -> None:
    """Adds the gradient of a learned sink that differs between the rows of a head.

    A sink is like a key whose V is 0: its dS is -P * delta.

    Args:
        rows: the delta kernel's results, whose second numbers are delta.
    """
    sink = _sink(signature)
    sink_rows = sinks.rows_of_call(signature, captured, lse, call.first_head, call.q_offset)
    logits = captured[sink.name].detach()
    row_gradients = -sinks.weights_of(logits, sink.dims, sink_rows, lse) * rows[..., 1]
    sink_gradient = sinks.gradient_of_rows(logits, sink.dims, sink_rows, row_gradients)
    gradients.add(sink.name, sink_gradient)


def sink_sums_for(kernel: BoundKernel, q: Tensor) -> Tensor:
    """A buffer for the sums of the delta kernel's warps, [batch, heads_q, row tiles, warps]."""
    sizes = (*q.shape[:2], kernel.grid[0], kernel.build.facts.warps)
    return q.new_empty(sizes, dtype=torch.float32)


def add_sink_sums(
    signature: CallSignature,
    gradients: LearnedGradients,
    captured: Mapping[str, Tensor],
    warp_sums: Tensor,
    call: CheckedCall,
) -> None:
    """Adds the sums of the delta kernel's warps, in a fixed order.

    Args:
        warp_sums: the buffer of `sink_sums_for`.
    """
    name = _sink(signature).name
    by_head = warp_sums.sum((0, 2, 3))
    gradients.add(name, sinks.gradient_of(captured[name], by_head, call.first_head))


def _sink(signature: CallSignature) -> TensorArgument:
    assert signature.sink is not None, "called for specs with a sink only"
    return signature.sink
