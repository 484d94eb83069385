"""Argument checks of flex_attention, with the messages and exception types of torch's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from flashgen.calls.runtime.arguments.refusals import (
    refuse_fx_trace,
    runs_while_traced,
    shape_of,
    shown,
)
from flashgen.shared.dtypes import OPERAND_DTYPES
from flashgen.shared.errors import InputError


class FlexValueError(InputError, ValueError):
    """An invalid argument of flex_attention for which torch raises ValueError."""


class FlexTypeError(InputError, TypeError):
    """An argument that flex_attention does not have."""


class FlexRuntimeError(InputError, RuntimeError):
    """An invalid argument of flex_attention for which torch raises RuntimeError."""


class FlexUnsupported(InputError, NotImplementedError):
    """A feature that torch's or flashgen's flex_attention does not support."""


DTYPES = tuple(getattr(torch, name) for name in OPERAND_DTYPES)

LARGE_BLOCK = 1 << 30
"""torch's block size of a BlockMask without block structure."""


_ARGUMENTS = (
    *("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse"),
    *("kernel_options", "return_aux"),
)
_SCORED = "fg.flex_attention(query, key, value, lambda s, b, h, q, k: {score}{rest})"
_KEPT = "torch.where({keep}, {score}, -math.inf)"


def refuse_arguments(
    extra: Sequence[object], others: Mapping[str, Any], score_mod: object, block_mask: object
) -> NoReturn:
    """Raises FlexTypeError for arguments that flex_attention does not have.

    Args:
        extra: the arguments by position after the last one that it has.
        others: the arguments by name that it does not have.
        score_mod, block_mask: the arguments of the call, which the way out keeps.
    """
    name, value = next(iter(others.items()), ("the tenth", None))
    score = "s" if score_mod is None else "score_mod(s, b, h, q, k)"
    rest = "" if block_mask is None else ", block_mask"
    nearest = _nearest(name)
    score_argument = "None" if score_mod is None else "score_mod"
    plain = f"fg.flex_attention(query, key, value, {score_argument}{rest})"
    way_out = plain + "; what it stands for in the score_mod or in the mask_mod of the block_mask"
    if extra or value is None or value is False:
        way_out = plain
    elif name in ("is_causal", "causal"):
        way_out = _SCORED.replace("{score}", _KEPT.replace("{keep}", "q >= k"))
    elif name in ("attn_mask", "mask", "attention_mask") and isinstance(value, torch.Tensor):
        axes = zip(("b", "h", "q", "k")[-value.dim() :], value.shape[-4:], strict=False)
        read = f"{name}[{', '.join('0' if size == 1 else axis for axis, size in axes)}]"
        keep = read if value.dtype == torch.bool else f"{read} != 0"
        added = f"{{score}} + {read}"
        way_out = _SCORED.replace(
            "{score}", added if value.is_floating_point() else _KEPT.replace("{keep}", keep)
        )
    elif name in ("mask_mod", "dropout_p", "q_offset", "k_offset", "backend", "arch"):
        way_out = "fg.attention(fg.AttentionSpec(mask_mod, score_mod, ...)), which has it"
    elif nearest or name == "softmax_scale":
        way_out = f"{nearest or 'scale'}=... instead of {name}=..."
    _refuse(
        FlexTypeError,
        f"flex_attention has no argument {name!r}"
        if others
        else "flex_attention has 9 arguments by position",
        where=f"argument {name}",
        numbers=f"given {shown(extra[0] if extra else value)}; it has {', '.join(_ARGUMENTS)}",
        way_out=way_out.format(score=score, rest=rest),
    )


@runs_while_traced
def _nearest(name: str) -> str:
    """The argument with the most similar name; "" where none is similar."""
    return next(iter(difflib.get_close_matches(name, _ARGUMENTS, 1)), "")


@runs_while_traced
def _refuse(
    kind: type[InputError], what: str, *, where: str, numbers: str, way_out: str
) -> NoReturn:
    raise kind(what, where=where, numbers=numbers, way_out=way_out)


def check_tensors(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    """Raises one of the exceptions above for the first invalid argument."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor is None:
            _refuse(
                FlexValueError,
                f"{name} is missing",
                where=f"argument {name}",
                numbers="flex_attention takes query, key and value",
                way_out="fg.flex_attention(q, k, v); fg.flex_attention(q, q, q) for self-attention "
                "without projections",
            )
        if not isinstance(tensor, torch.Tensor):
            refuse_fx_trace(tensor)
            _refuse(
                FlexValueError,
                f"{name} is not a torch tensor",
                where=f"argument {name}",
                numbers=f"given a {type(tensor).__name__}",
                way_out="torch.as_tensor(...)",
            )
        if tensor.is_nested:
            _refuse(
                FlexUnsupported,
                "flex_attention does not support NestedTensor inputs",
                where=f"argument {name}",
                numbers=f"layout {tensor.layout}",
                way_out=f"{name}.to_padded_tensor(0.0), or packed sequences and a document mask",
            )
        if tensor.layout != torch.strided:
            _refuse(
                FlexUnsupported,
                f"{name} is not an ordinary dense tensor",
                where=f"argument {name}",
                numbers=f"layout {tensor.layout}",
                way_out=f"{name}.to_dense()",
            )
        if tensor.dim() != 4:
            _refuse(
                FlexUnsupported,
                "NYI: query, key, and value must be 4D tensors",
                where=f"argument {name}",
                numbers=f"shape {shape_of(tensor)}",
                way_out="[batch, heads, seq, head_dim]",
            )
        if tensor.dtype not in DTYPES:
            _refuse(
                FlexUnsupported,
                f"{name} has a dtype that kernels are not made for",
                where=f"argument {name}",
                numbers=f"{tensor.dtype}; available: {', '.join(map(str, DTYPES))}",
                way_out=f"{name}.float()",
            )
        if tensor is not query and (tensor.dtype != query.dtype or tensor.device != query.device):
            _refuse(
                FlexValueError,
                "Expected query, key, and value to have the same dtype and device type",
                where=f"argument {name}",
                numbers=f"{tensor.dtype} on {tensor.device}; query is {query.dtype} on "
                f"{query.device}",
                way_out=f"{name}.to(query)",
            )
    if query.shape[-1] != key.shape[-1]:
        _refuse(
            FlexValueError,
            "Expect query and key/value to have the same embedding dimension "
            f"but got E={query.shape[-1]} and E={key.shape[-1]}.",
            where="argument key",
            numbers=f"query {shape_of(query)}, key {shape_of(key)}",
            way_out="one head_dim for query and key; that of value may differ",
        )
    _check_heads(query, key, enable_gqa)


def _check_heads(query: torch.Tensor, key: torch.Tensor, enable_gqa: bool) -> None:
    heads, heads_kv = query.shape[1], key.shape[1]
    divided = heads % heads_kv == 0 if heads_kv != 0 else heads == 0
    if divided and (enable_gqa or heads == heads_kv):
        return
    # Only here: a shape in numbers would bind a graph of symbols to the lengths of one call.
    numbers = f"query {shape_of(query)}, key {shape_of(key)}, enable_gqa {enable_gqa}"
    if heads_kv == 0:
        _refuse(
            FlexValueError,
            "key and value have no heads, and query has some",
            where="argument key",
            numbers=numbers,
            way_out=f"key and value with {heads} heads, as query; with enable_gqa=True also with "
            "a number that divides it",
        )
    if not enable_gqa and heads != heads_kv:
        _refuse(
            FlexValueError,
            "Expect query and key/value to have the same number of heads "
            f"but got Hq={heads} and Hkv={heads_kv}. Try setting enable_gqa=True for GQA.",
            where="argument key",
            numbers=numbers,
            way_out="enable_gqa=True",
        )
    _refuse(
        FlexValueError,
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
    if batch_kv == 1 and block_mask is not None and block_mask.kv_num_blocks.shape[0] == batch:
        return
    numbers = f"query {shape_of(query)}, key {shape_of(key)}"
    if block_mask is None or block_mask.kv_num_blocks.shape[0] != batch:
        _refuse(
            FlexValueError,
            "Expect query and key/value to have the same batch size, "
            f"or block_mask and query to have the same batch size, but got Bq={batch}, "
            f"Bkv={batch_kv}"
            + ("." if block_mask is None else f", B={block_mask.kv_num_blocks.shape[0]}."),
            where="argument key",
            numbers=numbers,
            way_out="key.expand(query.shape[0], -1, -1, -1)",
        )
    _refuse(
        FlexRuntimeError,
        f"Bq and Bkv must broadcast. Got Bq={batch} and Bkv={batch_kv}",
        where="argument key",
        numbers=numbers,
        way_out="keys and values of batch 1, or of the batch of the queries",
    )


def check_returned(return_lse: bool, return_aux: Any) -> None:
    if return_lse:
        _refuse(
            FlexValueError,
            "Cannot specify both return_lse and return_aux. "
            "return_lse is deprecated, please use return_aux=AuxRequest(lse=True) instead.",
            where="argument return_aux",
            numbers=f"return_lse {return_lse}, return_aux {return_aux}",
            way_out="return_aux=AuxRequest(lse=True)",
        )
    if not hasattr(return_aux, "max_scores"):
        _refuse(
            FlexTypeError,
            "return_aux is not a torch AuxRequest",
            where="argument return_aux",
            numbers=f"given {shown(return_aux)}",
            way_out="torch.nn.attention.flex_attention.AuxRequest(lse=True)",
        )


def mask_mod_of(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    """The mask_mod of a BlockMask; None for a BlockMask that has only blocks."""
    if block_mask is None:
        return None
    from torch.nn.attention import flex_attention as flex

    if not isinstance(block_mask, flex.BlockMask):
        _refuse(
            FlexValueError,
            "block_mask is not a torch BlockMask",
            where="argument block_mask",
            numbers=f"given a {type(block_mask).__name__}",
            way_out="torch.nn.attention.flex_attention.create_block_mask(mask_mod, B, H, Q, KV)",
        )
    mask_mod = block_mask.mask_mod
    if mask_mod is getattr(flex, "_sliced_mask_mod_error", block_mask):
        _refuse(
            FlexRuntimeError,
            "Cannot use mask_mod from a sliced BlockMask",
            where="argument block_mask",
            numbers=f"shape {tuple(block_mask.shape)}",
            way_out="sliced.mask_mod = the mask_mod of the whole one, with its offset, and "
            "sliced.seq_lengths = the lengths of the call",
        )
    if tuple(block_mask.BLOCK_SIZE) == (LARGE_BLOCK, LARGE_BLOCK):
        return None if mask_mod is flex.noop_mask else mask_mod
    _check_lengths(block_mask, query, key)
    _check_counts(block_mask, query)
    if block_mask.kv_num_blocks.device != query.device:
        _refuse(
            FlexRuntimeError,
            "Expect q/k/v and block_mask to be on the same device but got "
            f"{query.device} and {block_mask.kv_num_blocks.device}.",
            where="argument block_mask",
            numbers=f"shape {tuple(block_mask.shape)}",
            way_out=f"block_mask.to({str(query.device)!r})",
        )
    return None if mask_mod is flex.noop_mask else mask_mod


def _check_lengths(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    made_for = tuple(block_mask.shape[-2:])
    if query.shape[2] == made_for[0] and key.shape[2] == made_for[1]:
        return
    lengths = shape_of(query)[2], shape_of(key)[2]
    smaller = lengths[0] > made_for[0] or lengths[1] > made_for[1]
    _refuse(
        FlexValueError,
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
            _refuse(
                FlexValueError,
                f"block_mask was created for another {axis} than that of the query",
                where="argument block_mask",
                numbers=f"{axis}={length}, query {shape_of(query)}",
                way_out=f"create_block_mask with {axis}={wanted}, or {axis}=None for any",
            )
