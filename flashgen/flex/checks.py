"""Argument checks of flex_attention, with the messages and exception types of torch's."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.dtypes import OPERAND_DTYPES
from flashgen.errors import InputError


class FlexValueError(InputError, ValueError):
    """An invalid argument of flex_attention for which torch raises ValueError."""


class FlexRuntimeError(InputError, RuntimeError):
    """An invalid argument of flex_attention for which torch raises RuntimeError."""


class FlexUnsupported(InputError, NotImplementedError):
    """A feature that torch's or flashgen's flex_attention does not support."""


_DTYPES = tuple(getattr(torch, name) for name in OPERAND_DTYPES)

LARGE_BLOCK = 1 << 30
"""torch's block size of a BlockMask without block structure."""


def check_tensors(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    """Raises one of the exceptions above for the first invalid argument."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        where = f"argument {name}"
        if not isinstance(tensor, torch.Tensor):
            raise FlexValueError(
                f"{name} is not a torch tensor",
                where=where,
                numbers=f"given a {type(tensor).__name__}",
                way_out="torch.as_tensor(...)",
            )
        if tensor.is_nested:
            raise FlexUnsupported(
                "flex_attention does not support NestedTensor inputs",
                where=where,
                numbers=f"layout {tensor.layout}",
                way_out=f"{name}.to_padded_tensor(0.0), or packed sequences and a document mask",
            )
        if tensor.dim() != 4:
            raise FlexUnsupported(
                "NYI: query, key, and value must be 4D tensors",
                where=where,
                numbers=f"shape {tuple(tensor.shape)}",
                way_out="[batch, heads, seq, head_dim]",
            )
        if tensor.dtype not in _DTYPES:
            raise FlexUnsupported(
                f"{name} has a dtype that kernels are not made for",
                where=where,
                numbers=f"{tensor.dtype}; available: {', '.join(map(str, _DTYPES))}",
                way_out=f"{name}.float()",
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise FlexValueError(
                "Expected query, key, and value to have the same dtype and device type",
                where=where,
                numbers=f"{tensor.dtype} on {tensor.device}; query is {query.dtype} on "
                f"{query.device}",
                way_out=f"{name}.to(query)",
            )
    if query.shape[-1] != key.shape[-1]:
        raise FlexValueError(
            "Expect query and key/value to have the same embedding dimension "
            f"but got E={query.shape[-1]} and E={key.shape[-1]}.",
            where="argument key",
            numbers=f"query {tuple(query.shape)}, key {tuple(key.shape)}",
            way_out="one head_dim for query and key; that of value may differ",
        )
    _check_heads(query, key, enable_gqa)


def _check_heads(query: torch.Tensor, key: torch.Tensor, enable_gqa: bool) -> None:
    heads, heads_kv = query.shape[1], key.shape[1]
    numbers = f"query {tuple(query.shape)}, key {tuple(key.shape)}, enable_gqa {enable_gqa}"
    if not enable_gqa and heads != heads_kv:
        raise FlexValueError(
            "Expect query and key/value to have the same number of heads "
            f"but got Hq={heads} and Hkv={heads_kv}. Try setting enable_gqa=True for GQA.",
            where="argument key",
            numbers=numbers,
            way_out="enable_gqa=True",
        )
    if heads_kv == 0 or heads % heads_kv:
        raise FlexValueError(
            "Expect number of query heads to be a multiple of kv heads for GQA "
            f"but got Hq={heads} and Hkv={heads_kv}.",
            where="argument key",
            numbers=numbers,
            way_out="heads of query that are a multiple of those of key",
        )


def check_batch(query: torch.Tensor, key: torch.Tensor, block_mask: Any) -> None:
    """Checks the batch sizes: with a block mask, keys of batch 1 broadcast to all queries."""
    batch, batch_kv = query.shape[0], key.shape[0]
    if batch == batch_kv:
        return
    numbers = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
    if block_mask is None or block_mask.kv_num_blocks.shape[0] != batch:
        raise FlexValueError(
            "Expect query and key/value to have the same batch size, "
            f"or block_mask and query to have the same batch size, but got Bq={batch}, "
            f"Bkv={batch_kv}"
            + ("." if block_mask is None else f", B={block_mask.kv_num_blocks.shape[0]}."),
            where="argument key",
            numbers=numbers,
            way_out="key.expand(query.shape[0], -1, -1, -1)",
        )
    if batch_kv != 1:
        raise FlexRuntimeError(
            f"Bq and Bkv must broadcast. Got Bq={batch} and Bkv={batch_kv}",
            where="argument key",
            numbers=numbers,
            way_out="keys and values of batch 1, or of the batch of the queries",
        )


def mask_mod_of(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    """The mask_mod of a BlockMask; None for a BlockMask that has only blocks."""
    from torch.nn.attention import flex_attention as flex

    if block_mask is None:
        return None
    if not isinstance(block_mask, flex.BlockMask):
        raise FlexValueError(
            "block_mask is not a torch BlockMask",
            where="argument block_mask",
            numbers=f"given a {type(block_mask).__name__}",
            way_out="torch.nn.attention.flex_attention.create_block_mask(mask_mod, B, H, Q, KV)",
        )
    mask_mod = block_mask.mask_mod
    if mask_mod is getattr(flex, "_sliced_mask_mod_error", block_mask):
        raise FlexRuntimeError(
            "Cannot use mask_mod from a sliced BlockMask",
            where="argument block_mask",
            numbers=f"shape {tuple(block_mask.shape)}",
            way_out="sliced.mask_mod = the mask_mod of the whole one, with its offset",
        )
    if tuple(block_mask.BLOCK_SIZE) == (LARGE_BLOCK, LARGE_BLOCK):
        return None if mask_mod is flex.noop_mask else mask_mod
    _check_lengths(block_mask, query, key)
    _check_counts(block_mask, query)
    if block_mask.kv_num_blocks.device != query.device:
        raise FlexRuntimeError(
            "Expect q/k/v and block_mask to be on the same device but got "
            f"{query.device} and {block_mask.kv_num_blocks.device}.",
            where="argument block_mask",
            numbers=f"shape {tuple(block_mask.shape)}",
            way_out=f"block_mask.to({str(query.device)!r})",
        )
    return None if mask_mod is flex.noop_mask else mask_mod


def _check_lengths(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    lengths = query.shape[2], key.shape[2]
    made_for = tuple(block_mask.shape[-2:])
    if lengths == made_for:
        return
    smaller = lengths[0] > made_for[0] or lengths[1] > made_for[1]
    raise FlexValueError(
        f"block_mask was created for block_mask.shape={tuple(block_mask.shape)} but got "
        f"q_len={lengths[0]} and kv_len={lengths[1]}. As the block mask was created for a "
        f"{'smaller' if smaller else 'larger'} length than you're using it for, you likely need to "
        "create a new block mask.",
        where="argument block_mask",
        numbers=f"lengths {lengths}, block_mask for {made_for}",
        way_out="create_block_mask with these lengths"
        + ("" if smaller else ", or block_mask._adjust(q_len, kv_len)"),
    )


def _check_counts(block_mask: Any, query: torch.Tensor) -> None:
    shape = tuple(block_mask.kv_num_blocks.shape[:-1])
    for axis, length, wanted in zip(("B", "H"), shape, query.shape[:2], strict=False):
        if length not in (1, wanted):
            raise FlexValueError(
                f"block_mask was created for another {axis} than that of the query",
                where="argument block_mask",
                numbers=f"{axis}={length}, query {tuple(query.shape)}",
                way_out=f"create_block_mask with {axis}={wanted}, or {axis}=None for any",
            )
