"""The attention function of a backend of diffusers, and the operators that it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from flashgen.calls.ops import attention
from flashgen.calls.runtime.arguments.refusals import constant, refuse, refuse_jit_trace
from flashgen.frontends.flex.traced_mods import padded
from flashgen.frontends.score_tensors import (
    GivenTensor,
    Start,
    dtype_name,
    element,
    given_tensor,
)
from flashgen.shared.errors import InputError, SpecError
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.spec_options import as_name

Tensor = torch.Tensor


@dataclass
class Backend:
    """A backend: a spec whose dtype, head dims and dropout are those of each call.

    Attributes:
        name: the name of the backend.
        spec: the variant; the mask and causality of a call join it.
        captured: tensors and numbers that the variant's operators get in every call.
        operators: all operators by name, in the order of their first use. They are attributes,
            because torch.compile copies a dict when it first reads it.
    """

    name: str
    spec: AttentionSpec
    captured: dict[str, Any]
    operators: SimpleNamespace = field(default_factory=SimpleNamespace)
    names: dict[OperatorKey, str] = field(default_factory=dict)


backends: dict[str, Backend] = {}


class OperatorKey(NamedTuple):
    """All that determines the operator of a call, in constants."""

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    dropout: bool
    is_causal: bool
    mask: tuple[Any, ...] | None  # the fields of a GivenTensor


def function_of(backend: str) -> Callable[..., Any]:
    """The function that diffusers calls for a backend."""

    def flashgen_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q, k, v [batch, seq, heads, dim]; the other arguments are those of SDPA.

        Grouped heads need no ``enable_gqa``: without it torch refuses them.
        """
        if not torch.compiler.is_compiling():
            refuse_jit_trace()
        if backend not in backends:
            refuse(
                "the model is set to an attention backend that has been taken out of diffusers",
                f"attention backend {backend!r} of diffusers",
                f"registered: {', '.join(map(repr, backends)) or 'none'}",
                f"model.reset_attention_backend(); or register({backend!r}) again",
            )
        if _parallel_config is not None:
            _refuse(
                "sequences divided over processes by diffusers",
                "parallel_config of the model",
                f"{type(_parallel_config).__name__} is given",
                'set_attention_backend("native") for this model, or flashgen.distributed in a '
                "processor of your own",
            )
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        captures: dict[str, Any] = dict(backends[backend].captured)
        mask = None
        if attn_mask is not None:
            sizes = *q.shape[:3], k.shape[2]
            mask = given_tensor("attn_mask", _four(attn_mask, sizes), sizes, captures)
        dims = q.shape[3], v.shape[3]
        if scale is None:
            scale = backends[backend].spec.scale or dims[0] ** -0.5
        q, k, v = padded(q), padded(k), padded(v)
        columns, drops = (constant(q.shape[3]), constant(v.shape[3])), constant(dropout_p > 0.0)
        fields = *columns, q.dtype, drops, is_causal, mask
        op = getattr(backends[backend].operators, _operator_name(backend, fields))
        lse: Tensor | None = None
        options: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, **captures}
        if return_lse:
            out, lse = op(q, k, v, return_lse=True, **options)
        else:
            out = op(q, k, v, **options)
        if out.shape[3] != dims[1]:
            out = out[..., : dims[1]]
        out = out.transpose(1, 2)
        return out if lse is None else (out, lse.transpose(1, 2))

    return flashgen_attention


def _four(mask: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """A mask with four dimensions, by the rules of diffusers' native backend.

    [batch, seq_k] holds for all heads and queries; other shapes are broadcast from the right.
    """
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        _refuse(
            "a mask of integers, which has no single meaning",
            "attn_mask",
            f"{mask.dtype}, shape {tuple(mask.shape)}",
            "mask.bool(), True where a key is attended to",
        )
    batch, keys = sizes[0], sizes[3]
    if mask.dim() > 4 or (mask.dim() and mask.shape[-1] not in (1, keys)):
        _refuse(
            "a mask for other sizes",
            "attn_mask",
            f"shape {tuple(mask.shape)}; scores have {sizes}",
            "[batch, seq_k], or [batch or 1, heads or 1, seq_q or 1, seq_k]",
        )
    if mask.dim() == 2 and tuple(mask.shape) == (batch, keys):
        return mask[:, None, None]
    return mask[(None,) * (4 - mask.dim())]


def _operator_name(backend: str, fields: tuple[Any, ...]) -> str:
    """The name in `Backend.operators` of the operator of a call, made at the first call.

    Args:
        fields: those of an `OperatorKey`, which torch.compile takes as constants.

    Raises:
        InputError: no spec can have these options, such as a head dim above 576.
    """
    registered, key = backends[backend], OperatorKey(*fields)
    if key not in registered.names:
        operator = attention(_spec(registered, key))
        setattr(registered.operators, operator.name, operator)
        registered.names[key] = operator.name
    return registered.names[key]


# The same as torch.compiler.assume_constant_result, without the import of torch._dynamo.
setattr(_operator_name, "_dynamo_marked_constant", True)  # noqa: B010


def _spec(backend: Backend, key: OperatorKey) -> AttentionSpec:
    spec = backend.spec
    masks: list[Callable[..., Any]] = [] if spec.mask_mod is None else [spec.mask_mod]
    added: Callable[..., Any] | None = None
    parts = [spec.name or "attention"]
    if key.is_causal:
        masks.append(lambda b, h, q, k: k <= q)
        parts.append("causal")
    if key.mask is not None:
        mask = GivenTensor(*key.mask)
        if mask.dtype == torch.bool:
            masks.append(element(mask, Start()))
        else:
            added = element(mask, Start())
        parts.append(mask.name)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        keeps = masks[0](b, h, q, k)
        for mask in masks[1:]:
            keeps = keeps & mask(b, h, q, k)
        return keeps

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if spec.score_mod is not None:
            score = spec.score_mod(score, b, h, q, k)
        return score if added is None else score + added(b, h, q, k)

    try:
        return spec.replace(
            mask_mod=masks[0] if len(masks) == 1 else mask_mod if masks else None,
            score_mod=spec.score_mod if added is None else score_mod,
            head_dim=key.head_dim,
            head_dim_v=key.head_dim_v,
            dtype=dtype_name(key.dtype),
            dropout=key.dropout,
            name=as_name("_".join(parts)),
        )
    except SpecError as error:
        raise InputError(
            f"no kernel computes the attention of this layer: {error.what}",
            where=f"attention backend {backend.name!r} of diffusers",
            numbers=error.numbers,
            way_out='set_attention_backend("native") for this model or this layer',
        ) from error


def _refuse(what: str, where: str, numbers: str, way_out: str) -> None:
    raise InputError(
        f"no kernel computes attention with {what}",
        where=f"argument {where}",
        numbers=numbers,
        way_out=way_out,
    )
