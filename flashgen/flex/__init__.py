"""A drop-in replacement for torch's flex_attention: mods written for torch run unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashgen.flex.block_masks import has_blocks, layout_beside_mask
from flashgen.flex.checks import (
    FlexUnsupported,
    FlexValueError,
    check_batch,
    check_tensors,
    mask_mod_of,
)
from flashgen.flex.graph_capture import captures_a_graph, warn_of_values
from flashgen.flex.known_mods import read
from flashgen.flex.recorded_mods import Notes, Record, record
from flashgen.flex.recorder import Recorder
from flashgen.flex.traced_mods import CallSizes, TracedMods, as_argument, trace
from flashgen.flex.tracer import DTYPES
from flashgen.language.spec_options import HEAD_DIM_STEP
from flashgen.runtime.arguments.refusals import refuse_jit_trace

__all__ = [
    "Notes",
    "Record",
    "Recorder",
    "TracedMods",
    "as_argument",
    "flex_attention",
    "padded",
    "record",
    "trace",
]

Tensor = torch.Tensor


class _Returned(NamedTuple):
    """The arguments of `flex_attention` that determine what it returns besides the output."""

    lse: bool
    aux: Any


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """PyTorch's flex_attention, computed by flashgen; mods written for PyTorch run unchanged.

    The mods are executed at each call, on tensors without elements, and what they compute is traced
    once to expressions, from which kernels are made. Tensors that they capture become arguments of
    the kernels, with gradients. New contents, lengths and batch sizes, and mods that apply the same
    operations, reuse the compiled kernels. A captured number is a constant of the kernels at first,
    and a run-time scalar from its second value on; with torch.use_deterministic_algorithms, from
    its first. Casts between floating-point dtypes have no effect inside a mod, which is computed in
    float32. torch.compile leaves a break in the graph at the call; with fullgraph=True it refuses
    the call and says why.

    Args:
        query: [batch, heads, seq_q, head_dim], float16, bfloat16 or float32.
        key: [batch, heads_kv, seq_k, head_dim].
        value: [batch, heads_kv, seq_k, head_dim_v].
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, the new score; None leaves scores as
            they are.
        block_mask: a PyTorch BlockMask, or None. If its blocks follow from its mask_mod, as with
            create_block_mask, only the mask_mod is used. Otherwise its blocks become a block
            layout too. The comparison is made anew when the lists of the BlockMask, or values that
            its mask_mod reads, have changed.
        scale: factor on q.k; 1 / sqrt(head_dim) if None.
        enable_gqa: whether heads may be a multiple of heads_kv.
        return_lse: whether to return the log-sum-exp of each row too.
        kernel_options: options of PyTorch's kernels; accepted and ignored.
        return_aux: a PyTorch AuxRequest; only lse can be requested.

    Returns:
        out [batch, heads, seq_q, head_dim_v] of query's dtype; with return_lse a tuple (out, lse),
        lse float32 [batch, heads, seq_q]; with return_aux a tuple (out, AuxOutput).

    Raises:
        SpecError: a mod uses an operation that cannot be expressed, or computes something else each
            time that it is executed, or a number that can only be a constant has its eighth value;
            the error names the operation and the line.
        InputError: an argument is invalid. The error is also the ValueError, RuntimeError or
            NotImplementedError that PyTorch raises.

    Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention
    Kernels", 2024.
    """
    call = _untraced() if "torch._dynamo" in sys.modules else _attend
    returned = _Returned(return_lse, return_aux)
    return call(query, key, value, score_mod, block_mask, scale, enable_gqa, returned)


WHY_UNTRACED = (
    "fg.flex_attention reads its mods as Python functions and cannot be one node of a graph. With "
    "fullgraph=True, use fg.attention(fg.AttentionSpec(mask_mod=..., score_mod=...)), made outside "
    "of the compiled function; without it, this call is a break in the graph"
)

# The attributes that torch.compiler.disable sets: torch.compile does not trace the function.
flex_attention._torchdynamo_disable = True  # type: ignore[attr-defined]
flex_attention._torchdynamo_disable_msg = WHY_UNTRACED  # type: ignore[attr-defined]

_made: dict[str, Callable[..., Any]] = {}


def _untraced() -> Callable[..., Any]:
    """`_attend`, which torch.compile does not trace, nor any function that it calls."""
    # A dictionary, because torch.compile warns of functools.cache.
    if "attend" not in _made:
        _made["attend"] = torch.compiler.disable(_attend, reason=WHY_UNTRACED)  # type: ignore[no-untyped-call]
    return _made["attend"]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    returned: _Returned,
) -> Any:
    refuse_jit_trace()
    check_tensors(query, key, value, enable_gqa)
    _check_returned(returned)
    check_batch(query, key, block_mask)
    mask_mod = mask_mod_of(block_mask, query, key)
    sizes = CallSizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
    reading, found = read(mask_mod, score_mod, sizes)
    if key.shape[0] != query.shape[0]:
        key = key.expand(query.shape[0], -1, -1, -1)
        value = value.expand(query.shape[0], -1, -1, -1)
    if scale is None:
        scale = query.shape[3] ** -0.5
    dims = query.shape[3], value.shape[3]
    query, key, value = map(padded, (query, key, value))
    captures = reading.captures(found, query.device)
    lengths = (*query.shape[:3], key.shape[2])
    blocks = layout_beside_mask(block_mask, reading, found, lengths)
    if captures_a_graph(query.device):
        warn_of_values((mask_mod, score_mod), found, has_blocks(block_mask))
    sparse = None if blocks is None else blocks.sparse
    if blocks is not None:
        captures["layout"] = blocks.layout
    operator = reading.operator(query.shape[3], value.shape[3], DTYPES[query.dtype], sparse)
    out, lse = operator(query, key, value, scale=scale, return_lse=True, **captures)
    if out.shape[3] != dims[1]:
        out = out[..., : dims[1]]
    if returned.aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if returned.aux.lse else None, max_scores=None)
    return (out, lse) if returned.lse else out


def _check_returned(returned: _Returned) -> None:
    if returned.aux is None:
        return
    if returned.lse:
        raise FlexValueError(
            "Cannot specify both return_lse and return_aux. "
            "return_lse is deprecated, please use return_aux=AuxRequest(lse=True) instead.",
            where="argument return_aux",
            numbers=f"return_lse {returned.lse}, return_aux {returned.aux}",
            way_out="return_aux=AuxRequest(lse=True)",
        )
    if returned.aux.max_scores:
        raise FlexUnsupported(
            "the kernels do not return the largest score of each row",
            where="argument return_aux",
            numbers=f"{returned.aux}",
            way_out="AuxRequest(lse=True)",
        )


def padded(tensor: Tensor) -> Tensor:
    """The tensor with contiguous rows, and with zeros up to a head dim that kernels support.

    The zeros change no product.
    """
    missing = -tensor.shape[3] % HEAD_DIM_STEP
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
