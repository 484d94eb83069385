"""The attention function that is registered with transformers."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from flashgen.calls.runtime.arguments.refusals import constant, refuse_jit_trace
from flashgen.frontends.flex.traced_mods import as_argument, padded
from flashgen.frontends.score_tensors import given_tensor
from flashgen.frontends.transformers.layers import (
    CAUSAL,
    FULL,
    captures_of,
    created_tensor,
    operator_name,
    operators,
    reads,
)
from flashgen.frontends.transformers.masks import Mask
from flashgen.frontends.transformers.ranks import check_layer, current, refuse_context_of_torch
from flashgen.frontends.transformers.sequences import (
    check_positions,
    inputs_of_forward,
    sequences_of,
)
from flashgen.shared.errors import InputError

Tensor = torch.Tensor

_UNSUPPORTED = {
    "cache": "a paged cache of continuous batching",
    "block_indices": "a selection of blocks that is computed for each query",
    "head_mask": "a factor for each head after the softmax",
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"),
        "boundaries of sequences, which transformers calls cu_seq_lens_q and cu_seq_lens_k",
    ),
}
"""Arguments of attention functions that change the result and have no counterpart here."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as `transformers.AttentionInterface` defines its functions.

    Args:
        module: the layer; ``module.is_causal`` matters where there is no mask.
        query: [batch, heads, seq_q, head_dim].
        key: [batch, heads_kv, seq_k, head_dim]; heads is a multiple of heads_kv.
        value: [batch, heads_kv, seq_k, head_dim_v].
        attention_mask: a mask of `make_mask`, or a tensor [batch or 1, heads or 1, seq_q or 1,
            seq_k or more]: bool, True where a key is attended to, or floating point, added to the
            scores. None for a layer without a mask, which must say whether it is causal.
        dropout: the probability with which elements of P are dropped.
        scaling: factor on q.k; 1 / sqrt(head_dim) if None.
        is_causal: for a layer without a mask; ``module.is_causal`` if None.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: [heads], a logit for each head that joins the softmax's denominator.
        position_bias: [batch or 1, heads or 1, seq_q or 1, seq_k or more], added to the scores.
        sinks: [batch or 1, heads or 1, seq_q or 1, 1], a logit for each row, as ``s_aux``.
        options: further arguments of transformers: cu_seq_lens_q and cu_seq_lens_k, int [sequences
            + 1], keep the sequences of one row apart; position_ids are checked against the mask;
            indices, integers [batch, seq_q, any], are the keys that each query attends to, of which
            numbers that are no key's choose none; those in `_UNSUPPORTED` are refused.

    Returns:
        out [batch, seq_q, heads, head_dim_v], and None in place of the attention weights.

    Raises:
        InputError: an argument is invalid or unsupported; nothing has run.
    """
    if not torch.compiler.is_compiling():
        refuse_jit_trace()
        refuse_context_of_torch()
    _check(query, key, attention_mask, options)
    captures: dict[str, Any] = {}
    mask = FULL
    q_offset: int | Tensor = 0
    k_offset: int | Tensor = 0
    score_tensors: list[tuple[Any, ...]] = []
    sizes = *query.shape[:3], key.shape[2]
    ranks = attention_mask.ranks if isinstance(attention_mask, Mask) else None
    if ranks is not None or current() is not None:
        bias = attention_mask.bias if isinstance(attention_mask, Mask) else None
        per_score = {"position_bias": position_bias, "attention_mask": bias}
        per_score["indices"] = options.get("indices")
        check_layer(ranks, (sizes[2], sizes[3]), per_score)
    if isinstance(attention_mask, Mask):
        _check_mask(attention_mask, query, key)
        mask = attention_mask.name
        q_offset, k_offset = attention_mask.q_offset, attention_mask.k_offset
        _capture(attention_mask, query.device, captures)
        if attention_mask.bias is not None:
            added = attention_mask.bias
            position_bias = added if position_bias is None else position_bias + added
    elif attention_mask is None:
        mask = _without_mask(module, is_causal, sizes)
    else:
        score_tensors.append(given_tensor("attention_mask", attention_mask, sizes, captures))
    sequences = sequences_of(options, sizes, mask, ranks is not None)
    if sequences is None and ranks is None:
        _check_packed(attention_mask, options.get("position_ids"), sizes)
    if position_bias is not None:
        score_tensors.append(given_tensor("position_bias", position_bias, sizes, captures))
    chosen = options.get("indices")
    if chosen is not None:
        keys = _chosen_keys(chosen, sizes)
        score_tensors.append(given_tensor("chosen_keys", keys, sizes, captures))
    # Whether indices of queries and of keys begin with the call's first.
    local = [any(not expanded[axis] for *_, expanded in score_tensors) for axis in (2, 3)]
    if sequences is not None:
        captures["sequences_q"], captures["sequences_k"] = sequences
        local = [True, True]
    starts = (
        _start("q_start", q_offset, captures) if local[0] else "",
        _start("k_start", k_offset, captures) if local[1] else "",
    )
    if s_aux is not None:
        captures["sink"] = s_aux
    dims = query.shape[3], value.shape[3]
    if scaling is None:
        scaling = dims[0] ** -0.5
    query, key, value = padded(query), padded(key), padded(value)
    layer = (  # the fields of LayerKind
        constant(query.shape[3]),
        constant(value.shape[3]),
        query.dtype,
        constant(dropout > 0.0),
        None if softcap is None else constant(softcap),
        None if s_aux is None else (s_aux.dtype, s_aux.requires_grad),
        tuple(score_tensors),
        starts,
        sequences is not None,
    )
    op = getattr(operators, operator_name(mask, layer))
    call = {"scale": scaling, "dropout_p": dropout, "return_lse": sinks is not None, **captures}
    if ranks is not None:
        out = ranks.attention(op, query, key, value, **call)
    else:
        out = op(query, key, value, q_offset=q_offset, k_offset=k_offset, **call)
    if sinks is not None:
        out = _beside_sinks(out[0], out[1], sinks)
    if out.shape[3] != dims[1]:
        out = out[..., : dims[1]]
    return out.transpose(1, 2).contiguous(), None


def _capture(mask: Mask, device: torch.device, captures: dict[str, Any]) -> None:
    """The tensors and lengths that a mask reads, as arguments of the operator."""
    for name, index, dim in captures_of(mask.name):
        tensor = created_tensor(mask.name, name) if index is None else mask.tensors[index]
        if dim is not None:
            captures[name] = tensor.shape[dim]
            continue
        captures[name] = as_argument(tensor.detach() if tensor.requires_grad else tensor, device)


def _beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The output where a logit of each row joins the denominator of the row's softmax.

    A sink of a spec counts rows by their positions, and the rows of a call begin behind a cache.
    """
    sizes = zip(sinks.shape, (*lse.shape, 1), strict=False)
    if sinks.dim() != 4 or any(length not in (1, size) for length, size in sizes):
        raise InputError(
            "sinks do not broadcast to the rows of the call",
            where="argument sinks of the attention function",
            numbers=f"shape {tuple(sinks.shape)}; rows are {tuple(lse.shape)}",
            way_out="[batch or 1, heads or 1, seq_q or 1, 1]",
        )
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # of a row without keys, whose output is 0
    return (out.float() * torch.sigmoid(lse[..., None] - sinks.float())).to(out.dtype)


def _start(name: str, offset: int | Tensor, captures: dict[str, Any]) -> str:
    """How the operator gets the first position, for tensors whose indices begin there."""
    if isinstance(offset, Tensor):
        captures[name] = offset.reshape(())
        return "int64" if offset.dtype == torch.int64 else "int32"
    if offset == 0:
        return ""
    captures[name] = offset
    return "number"


def _check_packed(mask: Any, positions: Any, sizes: tuple[int, ...]) -> None:
    """Refuses positions of packed sequences that nothing keeps apart, in a call without boundaries.

    Positions that only the model itself reads cannot be seen while torch.compile traces it.
    """
    compiling = torch.compiler.is_compiling()
    if isinstance(mask, Mask):
        for layer_positions in (positions, mask.positions):
            if any(layer_positions is other for other in mask.checked):
                continue
            check_positions(layer_positions, mask.padding, mask.tensors, sizes)
            if not compiling:
                mask.checked.append(layer_positions)
    elif mask is not None and not compiling:
        model_positions, padding = inputs_of_forward(outermost=True)
        if padding is None or (isinstance(padding, Tensor) and padding.dim() == 2):
            # A model that makes its mask by itself.
            check_positions(model_positions, padding, (), sizes, mask)


def _without_mask(module: torch.nn.Module, is_causal: bool | None, sizes: tuple[int, ...]) -> str:
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal:
        return FULL
    if is_causal is None or sizes[2] != sizes[3]:
        raise InputError(
            "a causal layer has no mask",
            where=f"attention_mask of {type(module).__name__}",
            numbers=f"None, with is_causal {is_causal}, {sizes[2]} queries and {sizes[3]} keys: "
            "padding, a window or positions would be lost",
            way_out="register() of flashgen.integrations.transformers, which registers the mask "
            "function too, or is_causal=True where there are as many queries as keys",
        )
    return CAUSAL


def _chosen_keys(indices: Any, sizes: tuple[int, ...]) -> Tensor:
    """A mask [batch, 1, seq_q, seq_k] of the keys that a layer has chosen for each query."""
    batch, _, seq_q, seq_k = sizes
    fits = isinstance(indices, Tensor) and indices.dim() == 3
    if not fits or indices.shape[:2] != (batch, seq_q) or indices.is_floating_point():
        shape = f" of shape {tuple(indices.shape)}" if isinstance(indices, Tensor) else ""
        raise InputError(
            "the chosen keys are no integers [batch, seq_q, keys]",
            where="argument indices of the attention function",
            numbers=f"a {type(indices).__name__}{shape}, for {batch} sequences of {seq_q} queries",
            way_out='attn_implementation="eager" for this model',
        )
    # Other numbers, as -1, choose no key: they write into a column of their own.
    chosen = torch.where((indices < 0) | (indices >= seq_k), seq_k, indices).long()
    none = torch.zeros(batch, seq_q, seq_k + 1, dtype=torch.bool, device=indices.device)
    return none.scatter(-1, chosen, True)[:, None, :, :seq_k]


def _check(query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> None:
    for name, feature in _UNSUPPORTED.items():
        if options.get(name) is not None:
            _refuse(f"attention with {name}, {feature}, has no kernel", name)
    if options.get("output_attentions"):
        _refuse("no kernel stores the attention weights", "output_attentions")
    if mask is None or isinstance(mask, Mask):
        return
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        shape = f", shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else ""
        raise InputError(
            "the mask is neither a mask of flashgen nor a tensor with four dimensions",
            where="argument attention_mask of the attention function",
            numbers=f"given a {type(mask).__name__}{shape}",
            way_out="a mask function by transformers.masking_utils, or a tensor "
            "[batch, 1, seq_q, seq_k], bool or added to the scores",
        )
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise InputError(
            "a mask of integers has no single meaning",
            where="argument attention_mask of the attention function",
            numbers=f"{mask.dtype}, shape {tuple(mask.shape)}",
            way_out="mask.bool(), True where a key is attended to",
        )


def _check_mask(mask: Mask, query: Tensor, key: Tensor) -> None:
    sizes = query.shape[0], query.shape[2], key.shape[2]
    if mask.lengths == sizes:
        return
    reading = reads(mask.name)
    compared = zip(mask.lengths, sizes, (reading[0], reading[2], reading[3]), strict=True)
    if any(size != other and read for size, other, read in compared):
        raise InputError(
            "the mask was made for other sizes than those of the layer",
            where="argument attention_mask of the attention function",
            numbers=f"batch, queries and keys {sizes}; the mask has {mask.lengths}",
            way_out='attn_implementation="eager" for this model, or for this part of it by a '
            "dictionary",
        )


def _refuse(what: str, name: str) -> NoReturn:
    raise InputError(
        what,
        where=f"argument {name} of the attention function",
        numbers="attn_implementation of flashgen",
        way_out='attn_implementation="eager" for this model',
    )
