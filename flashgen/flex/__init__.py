"""torch's flex_attention, computed by flashgen: mods written for torch run as they are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from flashgen.flex.blocks import blocks_beside
from flashgen.flex.checks import (
    FlexUnsupported,
    FlexValueError,
    check_batch,
    check_tensors,
    mask_mod_of,
)
from flashgen.flex.reading import DTYPES, Reading, Sizes, read

__all__ = ["Reading", "flex_attention"]

Tensor = torch.Tensor

_HEAD_DIM_STEP = 8


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
    """Attention with a score_mod and a mask_mod written for torch's flex_attention.

    The mods are read once, into the expressions that flashgen makes kernels of; tensors that they
    capture are arguments of the kernels, with gradients. New contents, lengths and batch sizes, and
    new closures of the same code over the same numbers, use the kernels that there are. Casts
    between floats change nothing in a mod: all of it is computed in float32. torch.compile goes
    around the call, with a break in the graph.

    Args:
        query: [batch, heads, seq_q, head_dim], float16, bfloat16 or float32.
        key: [batch, heads_kv, seq_k, head_dim].
        value: [batch, heads_kv, seq_k, head_dim_v].
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, the new score.
        block_mask: a BlockMask of torch. Where its blocks follow from its mask_mod, as
            create_block_mask makes them, that alone is computed; blocks without a mask_mod, or that
            leave out what it keeps, are a block-sparse layout. They are compared with it once for
            each BlockMask.
        scale: factor on the scores before score_mod; 1 / sqrt(head_dim) when None.
        enable_gqa: whether heads may be a multiple of heads_kv.
        return_lse: whether to return the log of the softmax's normaliser too.
        kernel_options: for torch's kernels; accepted and not used.
        return_aux: an AuxRequest of torch; of what it can ask for, lse is computed.

    Returns:
        out [batch, heads, seq_q, head_dim_v]; with return_lse (out, lse); with return_aux
        (out, AuxOutput).

    Raises:
        SpecError: a mod cannot be expressed; it names the operation and the line.
        InputError: an argument is wrong; it is also the ValueError, RuntimeError or
            NotImplementedError that torch raises.
    """
    call = _undisturbed()
    return call(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)


# torch.compile does not look into it; the attribute is what torch.compiler.disable gives.
flex_attention._torchdynamo_disable = True  # type: ignore[attr-defined]


def _undisturbed() -> Callable[..., Any]:
    """`_attend` with the functions that it calls out of torch.compile's sight too."""
    if "torch._dynamo" not in sys.modules:
        return _attend
    return _disabled()


@functools.cache
def _disabled() -> Callable[..., Any]:
    return torch.compiler.disable(_attend)  # type: ignore[no-any-return,no-untyped-call]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    return_aux: Any,
) -> Any:
    check_tensors(query, key, value, enable_gqa)
    _check_aux(return_lse, return_aux)
    check_batch(query, key, block_mask)
    mask_mod = mask_mod_of(block_mask, query, key)
    sizes = Sizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
    reading, reach = read(mask_mod, score_mod, sizes)
    if key.shape[0] != query.shape[0]:
        key = key.expand(query.shape[0], -1, -1, -1)
        value = value.expand(query.shape[0], -1, -1, -1)
    if scale is None:
        scale = query.shape[3] ** -0.5
    dims = query.shape[3], value.shape[3]
    query, key, value = map(_padded, (query, key, value))
    captures = reading.captures(reach, query.device)
    lengths = (*query.shape[:3], key.shape[2])
    blocks = blocks_beside(block_mask, reading.of_mask_mod, captures, lengths)
    sparse = None if blocks is None else blocks.sparse
    if blocks is not None:
        captures["layout"] = blocks.layout
    operator = reading.operator(query.shape[3], value.shape[3], DTYPES[query.dtype], sparse)
    out, lse = operator(query, key, value, scale=scale, return_lse=True, **captures)
    if out.shape[3] != dims[1]:
        out = out[..., : dims[1]]
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out


def _check_aux(return_lse: bool, return_aux: Any) -> None:
    if return_aux is None:
        return
    if return_lse:
        raise FlexValueError(
            "Cannot specify both return_lse and return_aux. "
            "return_lse is deprecated, please use return_aux=AuxRequest(lse=True) instead.",
            where="argument return_aux",
            numbers=f"return_lse {return_lse}, return_aux {return_aux}",
            way_out="return_aux=AuxRequest(lse=True)",
        )
    if return_aux.max_scores:
        raise FlexUnsupported(
            "the largest score of each row is not something that the kernels return",
            where="argument return_aux",
            numbers=f"{return_aux}",
            way_out="AuxRequest(lse=True)",
        )


def _padded(tensor: Tensor) -> Tensor:
    """With zeros up to a length of rows that kernels take; they change no product."""
    missing = -tensor.shape[3] % _HEAD_DIM_STEP
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
