"""Stand-ins for packages of peers in a dry run: the functions that the suite calls, in torch.

Each takes the arguments that the package takes, in its layout, and computes on CPU tensors, so that
a dry run executes the adapters; none of them is ever timed beside a kernel.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import torch

Tensor = torch.Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    left: int | None = None,
    right: int | None = None,
    keeps: Tensor | None = None,
    cap: float = 0.0,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of [batch, heads, rows, d] over keys q - left to q + right, or by ``keeps``."""
    share = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(share, 1).float() for tensor in (k, v))
    scores = q.float() @ k.mT * q.shape[-1] ** -0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores if bias is None else scores + bias
    apart = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    inside = torch.ones_like(apart, dtype=torch.bool) if keeps is None else keeps
    inside = inside if left is None else inside & (apart >= -left)
    inside = inside if right is None else inside & (apart <= right)
    scores = scores.masked_fill(~inside, -math.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return (torch.nn.functional.dropout(weights, dropout) @ v).to(q.dtype)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> tuple[Tensor, None]:
    left, right = (None, 0) if causal else window_size
    rows = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = attention(*rows, left=left, right=right, cap=softcap, sink=learnable_sink)
    return out.transpose(1, 2), None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    deterministic: bool = False,
) -> tuple[Tensor, None]:
    parts = [
        flash_attn_func(*(tensor[None, first:last] for tensor in (q, k, v)), causal=causal)[0]
        for first, last in itertools.pairwise(cu_seqlens_q.tolist())
    ]
    return torch.cat(parts, dim=1)[0], None


def create_mask_plan(
    ends: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool, **packed: Any
) -> tuple[Tensor, Tensor]:
    """The kept keys of each row of the first batch entry, and the starts of packed sequences."""
    starts = packed.get("cu_seqlens_q", torch.tensor([0, q.shape[1]]))
    bounds = ends[0, :, : int(starts[-1])].T
    keys = torch.arange(k.shape[0] if packed else k.shape[1])
    keeps = keys < bounds[:, :1]
    if packed:
        first = starts[:-1].repeat_interleave(starts.diff().long())[:, None]
        return (keys >= first) & (keys < first + bounds[:, :1]), starts
    for low, high in zip(range(1, bounds.shape[1], 2), range(2, bounds.shape[1], 2), strict=True):
        keeps = keeps | ((keys >= bounds[:, low : low + 1]) & (keys < bounds[:, high : high + 1]))
    return keeps, starts


def flex_attn_func(q: Tensor, k: Tensor, v: Tensor, *, mask_plan: tuple[Tensor, Tensor]) -> Tensor:
    rows = [tensor if tensor.dim() == 4 else tensor[None] for tensor in (q, k, v)]
    out = attention(*(tensor.transpose(1, 2) for tensor in rows), keeps=mask_plan[0])
    out = out.transpose(1, 2)
    return out if q.dim() == 4 else out[0]


class Wrapper:
    """FlashInfer's wrapper of paged decoding, with the layout "HND"."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert layout == "HND"

    def plan(self, indptr: Tensor, pages: Tensor, *sizes: Any, **types: Any) -> None:
        self._table = pages.view(len(indptr) - 1, -1)

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        k, v = (from_pages(cache, self._table) for cache in caches)
        return attention(q[:, :, None], k, v)[:, :, 0]


def from_pages(cache: Tensor, table: Tensor) -> Tensor:
    """Caches [pages, heads, page, d] as keys [batch, heads, n, d]."""
    return cache[table.long()].transpose(1, 2).flatten(2, 3)


class Handle:
    """A tensor of a graph, which takes and forgets its settings."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self


class Graph:
    """A graph of cudnn-frontend with one sdpa node, or with its backward."""

    def __init__(self, **types: Any) -> None:
        self._outputs: tuple[Handle, ...] = ()

    def tensor_like(self, tensor: Tensor) -> Handle:
        return Handle()

    def sdpa(self, q: Handle, k: Handle, v: Handle, **options: Any) -> tuple[Handle, ...]:
        return self._node((q, k, v), options, 2)

    def sdpa_backward(self, *inputs: Handle, **options: Any) -> tuple[Handle, ...]:
        return self._node(inputs, options, 3)

    def _node(self, inputs: Any, options: Any, outputs: int) -> tuple[Handle, ...]:
        self._inputs, self._options = inputs, options
        self._outputs = tuple(Handle() for _ in range(outputs))
        return self._outputs

    def get_workspace_size(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None  # the steps between a graph and its plan

    def execute(self, tensors: dict[Handle, Tensor], workspace: Tensor, handle: Any) -> None:
        operands = [tensors[name] for name in self._inputs]
        results = [tensors[name] for name in self._outputs]
        sink = tensors.get(self._options.get("sink_token"))
        if len(operands) == 3:
            results[0].copy_(self._attention(tensors, sink, *operands))
            return
        wrt = [tensor.clone().requires_grad_() for tensor in operands[:3]]
        wrt += [] if sink is None else [sink.clone().requires_grad_()]
        with torch.enable_grad():
            out = self._attention(tensors, None if sink is None else wrt[3], *wrt[:3])
        results += [] if sink is None else [tensors[self._options["dSink_token"]]]
        for target, gradient in zip(
            results, torch.autograd.grad(out, wrt, operands[4]), strict=True
        ):
            target.copy_(gradient)

    def _attention(self, tensors: Any, sink: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options, bias = self._options, None
        if "paged_attention_k_table" in options:
            table = tensors[options["paged_attention_k_table"]][:, 0, :, 0]
            k, v = from_pages(k, table), from_pages(v, table)
        if options.get("use_alibi_mask"):
            slopes = torch.exp2(-8.0 * torch.arange(1, q.shape[1] + 1) / q.shape[1])
            apart = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
            bias = slopes[:, None, None] * apart
        left = options.get("diagonal_band_left_bound")
        return attention(
            *(q, k, v),
            left=None if left is None else left - 1,
            right=options.get("diagonal_band_right_bound"),
            bias=bias,
            sink=sink,
            dropout=options.get("dropout", (0.0,))[0],
        )


FlashAttention = SimpleNamespace(
    flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
)
CudnnFlex = SimpleNamespace(create_mask_plan=create_mask_plan, flex_attn_func=flex_attn_func)
FlashInfer = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
Cudnn = SimpleNamespace(
    pygraph=Graph,
    create_handle=Handle,
    data_type=SimpleNamespace(BFLOAT16=0, HALF=1, FLOAT=2),
    heur_mode=SimpleNamespace(A=0, FALLBACK=1),
)
