"""A drop-in replacement for torch's flex_attention: mods written for torch run unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.calls.runtime.arguments.refusals import refuse_jit_trace, untraced
from flashgen.frontends.flex.block_masks import has_blocks, layout_beside_mask
from flashgen.frontends.flex.checks import (
    check_batch,
    check_returned,
    check_tensors,
    mask_mod_of,
    refuse_arguments,
)
from flashgen.frontends.flex.compiled import as_node
from flashgen.frontends.flex.graph_capture import captures_a_graph, warn_of_values
from flashgen.frontends.flex.known_mods import read, read_alone
from flashgen.frontends.flex.recorded_mods import Mod, uncompiled
from flashgen.frontends.flex.traced_mods import CallSizes
from flashgen.shared.errors import InputError

Tensor = torch.Tensor


def flex_attention(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *more: Any,
    return_aux: Any = None,
    **others: Any,
) -> Any:
    """PyTorch's flex_attention, computed by flashgen; mods written for PyTorch run unchanged.

    The mods are executed at each call, on tensors without elements, and what they compute is traced
    once to expressions, from which kernels are made. Tensors that they capture become arguments of
    the kernels, with gradients. New contents, lengths and batch sizes, and mods that apply the same
    operations, reuse the compiled kernels. A captured number is a constant of the kernels at first,
    and a run-time scalar from its second value on; with torch.use_deterministic_algorithms, from
    its first. Casts between floating-point dtypes have no effect inside a mod, which is computed in
    float32. torch.compile makes the call one node of its graph, with the expressions of the mods
    that it has traced itself; the blocks of a BlockMask are always a block layout there.

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
        return_aux: a PyTorch AuxRequest. The largest score of each row is that after score_mod, of
            the keys that the mask keeps: float32 [batch, heads, seq_q], -inf in a row without keys,
            without a gradient. It takes a further pass over the scores.

    Returns:
        out [batch, heads, seq_q, head_dim_v] of query's dtype; with return_lse a tuple (out, lse),
        lse float32 [batch, heads, seq_q]; with return_aux a tuple (out, AuxOutput).

    Raises:
        SpecError: a mod uses an operation that cannot be expressed or that is not torch's own, or
            computes something else each time that it is executed, or a number that can only be a
            constant has its eighth value, or the mod its 64th version; the error names the
            operation and the line.
        InputError: an argument is invalid. The error is also the ValueError, RuntimeError or
            NotImplementedError that PyTorch raises; for arguments that it does not have, a
            TypeError.

    Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention
    Kernels", 2024.
    """
    refuse_jit_trace()
    if more or others:
        refuse_arguments(more, others, score_mod, block_mask)
    check_tensors(query, key, value, enable_gqa)
    if return_aux is not None:
        check_returned(return_lse, return_aux)
    check_batch(query, key, block_mask)
    mask_mod = mask_mod_of(block_mask, query, key)
    tensors, largest = (query, key, value), return_aux is not None and return_aux.max_scores
    if torch.compiler.is_dynamo_compiling():
        out, lse, max_scores = as_node(tensors, score_mod, block_mask, scale, largest)
    else:
        out, lse, max_scores = _attend(tensors, mask_mod, score_mod, block_mask, scale, largest)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=max_scores)
    return (out, lse) if return_lse else out


@untraced("its mods are executed as Python functions")
def _attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask_mod: Mod | None,
    score_mod: Mod | None,
    block_mask: Any,
    scale: float | None,
    max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    query, key, _ = tensors
    device = query.device
    mask_mod, score_mod = uncompiled(mask_mod), uncompiled(score_mod)
    sizes = CallSizes.from_tensors(query, key, device)
    traced, call_record = read(mask_mod, score_mod, sizes)
    captures = traced.captures(call_record, device)
    sparse = blocks = None
    if reads_blocks := has_blocks(block_mask):
        shape = *query.shape[:3], key.shape[2]
        blocks = layout_beside_mask(block_mask, traced, call_record, shape)
    if captures_a_graph(device):
        warn_of_values((mask_mod, score_mod), call_record, reads_blocks)
    if blocks is not None:
        sparse, captures["layout"] = blocks.sparse, blocks.layout
    try:
        return traced.attend(tensors, scale, captures, sparse, max_scores=max_scores)
    except InputError as error:
        refused = error
    # What an earlier call traced has the names and lines of its mods: the error names those of this
    # call.
    layout = {"layout": captures["layout"]} if sparse is not None else {}
    traced, call_record = read_alone(mask_mod, score_mod, sizes)
    traced.attend(tensors, scale, traced.captures(call_record, device) | layout, sparse)
    raise refused
