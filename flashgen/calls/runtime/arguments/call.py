"""`Call.from_arguments` sorts the arguments of a call, and `check` checks them before any launch.

The first mistake raises an InputError that names the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashgen.calls.runtime.arguments.options import (
    check_divisors,
    check_names,
    dropout_of,
    scalar_value,
    scale_of,
    state_of,
)
from flashgen.calls.runtime.arguments.pages import (
    capacity_of,
    check_pages,
    check_table,
    longest_of,
    with_scales,
)
from flashgen.calls.runtime.arguments.positions import (
    check_boundaries,
    check_dropout_positions,
    check_offsets,
    check_packed,
    dtypes_of,
    entries_of,
    offset_of,
    offset_tensors,
    refuse_static_layout,
)
from flashgen.calls.runtime.arguments.slices import scalars_of_part, splits_of
from flashgen.calls.runtime.arguments.tensors import (
    as_declared,
    check_captured,
    check_learned,
    check_lengths,
    check_operands,
    check_positions,
    check_sizes,
    values_of,
)
from flashgen.calls.runtime.block_layouts import (
    check_choice,
    check_layout,
    check_lists,
    refuse_parts_of_choice,
    with_layout,
)
from flashgen.shared.call import CallOptions, CheckedCall, Operands
from flashgen.shared.random_numbers import RANDOM_STATE
from flashgen.shared.signature import (
    BOUNDARIES,
    OFFSETS,
    PAGE_NAMES,
    WHOLE,
    CallSignature,
    heads_of,
)

Tensor = torch.Tensor


class Call(NamedTuple):
    """The arguments of a call in the order of a signature, and what computes that signature.

    Attributes:
        program: the program that computes the call: of the spec, or of a variant of the spec.
        operands: q, k and v in the dtype of autocast, where that is on; the captured tensors,
            floats in the dtypes that the spec declares.
        options: with the scalars, and with an offset of 0 in place of a tensor, which is one of
            the captured tensors.
    """

    program: Any
    operands: Operands
    options: CallOptions

    @staticmethod
    def from_arguments(
        program: Any,
        variant: Callable[..., Any],
        operands: Operands,
        options: CallOptions,
        captures: Mapping[str, Any],
        *,
        h_offset: int = 0,
        whole: Mapping[str, int] | None = None,
        autocast: bool = False,
    ) -> Call:
        """Sorts the arguments of a call, which `flashgen.calls.ops.Attention` describes.

        Args:
            program: the program that computes the spec, with the attribute ``signature``.
            variant: gives such a program for the fields of a `calls.runtime.programs.Variant`.
            operands: q, k, v and rng.
            options: without scalars; the offsets may be tensors.
            captures: the scalars and the captured tensors by name.
            autocast: whether q, k and v are cast to the dtype of torch.autocast.

        Raises:
            InputError: an argument is missing or unknown, or is of a kind that cannot be sorted.
        """
        q, k, v, _, rng = operands
        scale, q_offset, k_offset, backend, arch, deterministic, split_size, _, dropout_p = options
        signature: CallSignature = program.signature
        dtype = _autocast_dtype(q) if autocast else None
        if dtype is not None:
            q = _cast(q, dtype)
            if signature.kv_dtype is None:
                k = _cast(k, dtype)
                v = values_of(signature, k, None) if signature.shared_kv else _cast(v, dtype)
            if signature.dtype is None:
                dtype = None
        packs = signature.paged and BOUNDARIES[0] in captures
        if signature.choice is not None:
            ends = captures[BOUNDARIES[0]] if packs else None
            refuse_parts_of_choice(k_offset, h_offset, whole, ends)
        part = scalars_of_part(h_offset, whole, q, k, captures)
        offsets = offset_tensors(q_offset, k_offset)
        if dtype is not None or offsets or part or packs:
            program = variant(dtype, dtypes_of(offsets), tuple(part), packs)
            signature = program.signature
            captures = {**captures, **part, **offsets}
            q_offset = 0 if OFFSETS[0] in offsets else q_offset
            k_offset = 0 if OFFSETS[1] in offsets else k_offset
        if signature.draws:
            captures = {**captures, RANDOM_STATE: state_of(rng, q)}
            rng = rng if signature.dropout else None
        captures = with_layout(signature, captures)
        if signature.kv_dtype is not None:
            captures = with_scales(captures, k, v)
        check_names(signature, captures)
        captured = tuple([captures[tensor.name] for tensor in signature.tensors])
        if captured:
            if torch.is_grad_enabled():
                check_learned(signature, captured)
            captured = as_declared(signature, captured)
        scalars = tuple([captures[scalar.name] for scalar in signature.scalars])
        numbers = scale, q_offset, k_offset, backend, arch, deterministic, split_size
        operands, options = (
            Operands(q, k, v, captured, rng),
            CallOptions(*numbers, scalars, dropout_p),
        )
        return Call(program, operands, options)


def _autocast_dtype(q: object) -> torch.dtype | None:
    """The dtype of torch.autocast on the device of q; None where it is off."""
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return None
    return torch.get_autocast_dtype(q.device.type)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    """The tensor cast by autocast's rules: float64 and integers stay, and raise an error later."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def cast_by_autocast(tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype of torch.autocast, where that is on."""
    q, k, v = tensors
    dtype = _autocast_dtype(q)
    return tensors if dtype is None else (_cast(q, dtype), _cast(k, dtype), _cast(v, dtype))


def check(signature: CallSignature, operands: Operands, options: CallOptions) -> CheckedCall:
    """The sizes and numbers of a call.

    Raises:
        InputError: for the first mistake; the error names the argument.
    """
    q, k, v, captured, rng = operands
    check_operands(signature, q, k, v)
    pairs = zip(signature.scalars, options.scalars, strict=True)
    scalars = {scalar.name: scalar_value(scalar, value) for scalar, value in pairs}
    sizes = _check_captured(signature, captured, q, k, heads_of(scalars, q.shape[1])[1])
    seq_k = capacity_of(signature, k, captured) if signature.paged else k.shape[2]
    call = CheckedCall(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seq_q=q.shape[2],
        seq_k=seq_k,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        scale=scale_of(signature, options.scale),
        scalars=scalars,
        dropout_p=dropout_of(signature, options.dropout_p, rng, q.device),
        q_offset=offset_of("q_offset", options.q_offset, q.shape[2]),
        k_offset=offset_of("k_offset", options.k_offset, seq_k),
    )
    check_dropout_positions(signature, call)
    check_divisors(signature, call)
    refuse_static_layout(signature)
    if captured:
        _check_ends(signature, captured, call, sizes)
    if signature.split:
        call = replace(call, splits=splits_of(signature, call))
    return replace(call, batch=sizes["batch"]) if signature.packed else call


def check_traced(signature: CallSignature, operands: Operands, scalars: Sequence[Any]) -> None:
    """Checks operands while a graph is traced: sizes are symbols, and numbers are unknown.

    Sizes are compared only where they must be equal, so that a traced graph serves other
    lengths too. Everything else is checked when the graph runs.
    """
    q, k, v, captured, _ = operands
    check_operands(signature, q, k, v, traced=True)
    names = [scalar.name for scalar in signature.scalars]
    heads = scalars[names.index(WHOLE[1])] if WHOLE[1] in names else None
    _check_captured(signature, captured, q, k, heads, traced=True)


def _check_captured(
    signature: CallSignature,
    captured: Sequence[Any],
    q: Tensor,
    k: Tensor,
    heads: int | None,
    *,
    traced: bool = False,
) -> dict[str, int]:
    """Checks captured tensors whose sizes may be symbols. Returns the sizes that q and k define.

    Args:
        heads: the number of query heads of the whole; that of q if None.
    """
    check_captured(signature, captured, q.device, traced=traced)
    check_packed(signature, q, captured)
    if signature.paged:
        check_table(signature, q, captured)
    sizes = {"heads": q.shape[1], "heads_kv": k.shape[1]}
    if heads is not None:  # the whole has as many query heads for each key head as the call
        sizes = {"heads": heads, "heads_kv": k.shape[1] * heads // max(q.shape[1], 1)}
    sizes["batch"] = entries_of(signature, q, captured)
    check_sizes(signature, captured, sizes)
    return sizes


def _check_ends(
    signature: CallSignature, captured: Sequence[Tensor], call: CheckedCall, sizes: dict[str, int]
) -> None:
    """Checks that captured tensors and block layouts have elements for all positions."""
    lengths = ends = min(call.seq_q, 1), min(call.seq_k, 1)
    check_lengths(signature, captured, sizes, call.is_empty)
    if not (signature.packed or signature.offsets or signature.paged):
        lengths = call.seq_q, call.seq_k
        ends = call.q_offset + call.seq_q, call.k_offset + call.seq_k
    # Elsewhere positions are data, which `check_contents` reads on the CPU.
    check_positions(signature, captured, lengths, ends)
    check_layout(signature, captured, (call.seq_q, call.seq_k), ends)


def check_contents(
    signature: CallSignature,
    captured: Mapping[str, Tensor],
    call: CheckedCall,
    k: Tensor,
) -> None:
    """Checks the values of offsets, of boundaries and of lists of blocks, on the CPU only.

    On a GPU this would need a device synchronisation; kernels stay inside their tensors whatever
    the values are.

    Raises:
        InputError: offsets out of range, boundaries that do not ascend, or lists of other blocks
            than the live ones.
    """
    if k.device.type != "cpu":
        return
    if signature.paged:
        check_pages(captured, call, k)
    if signature.offsets or signature.paged:
        ends = check_offsets(signature, captured, call)
        tensors, lengths = tuple(captured.values()), (call.seq_q, call.seq_k)
        if signature.paged and OFFSETS[0] not in signature.offsets:
            ends = longest_of(captured), call.seq_k
        # `check_boundaries` compares with the longest sequence.
        if signature.paged or not signature.packed:
            check_positions(signature, tensors, lengths, ends)
            check_layout(signature, tensors, lengths, ends)
    if signature.packed:
        check_boundaries(signature, captured, call.seq_q, call.seq_k)
    if signature.call_layout is not None:
        check_lists(captured)
    if signature.choice is not None:
        keys = captured[PAGE_NAMES[1]] if signature.paged else call.seq_k
        check_choice(signature.choice, captured, keys)
