"""Attentions whose weights are no exponentials, each with its dense form on torch tensors."""

from __future__ import annotations

from typing import Any

import torch

import flashgen as fg
from tests.support.masks import causal

Tensor = torch.Tensor

bias = fg.Tensor("bias", ("heads",), grad=True)
decay = fg.Tensor("decay", ("heads",), grad=True)
row = fg.Tensor("row", ("heads", "seq_q"), grad=True)


def some_rows(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q % 7 > 0) & (k > 2)  # the other rows are empty


def silu(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * fg.sigmoid(score)


def biased_sigmoid(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.sigmoid(score + bias[h])


def relu_squared(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.maximum(score, 0) ** 2


def fourth_power(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score**4


def retention(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * fg.exp(decay[h] * (k - q))


def some_removed(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.where((q + k) % 3 == 0, -torch.inf, 5 * fg.tanh(score / 5))


SPECS: dict[str, dict[str, Any]] = {
    "hstu": {"mask_mod": causal, "weight_mod": silu, "normalize": "none"},
    "sigmoid": {"mask_mod": causal, "weight_mod": biased_sigmoid, "normalize": "none"},
    "relu_squared": {"weight_mod": relu_squared, "normalize": row},
    "power": {"mask_mod": some_rows, "weight_mod": fourth_power, "normalize": "sum"},
    "retention": {
        **{"mask_mod": causal, "weight_mod": retention, "normalize": "none"},
        "dropout": True,
    },
    "linear": {"mask_mod": causal, "normalize": "none"},
    "removed": {"score_mod": some_removed, "weight_mod": silu, "normalize": "none"},
    "exponential": {
        **{"mask_mod": some_rows, "weight_mod": lambda score, *_: fg.exp(score / 2)},
        **{"normalize": "sum", "dropout": True},
    },
}


def spec_of(name: str, head_dim: int = 64, dtype: str | None = "float16") -> fg.AttentionSpec:
    return fg.AttentionSpec(**SPECS[name], head_dim=head_dim, dtype=dtype, name=name)


def captured_by(spec: fg.AttentionSpec, heads: int, rows: int) -> dict[str, Tensor]:
    values = torch.Generator().manual_seed(5)
    known = {
        "bias": torch.randn(heads, generator=values),
        "decay": torch.rand(heads, generator=values) * 0.05,
        "row": torch.rand(heads, rows, generator=values) + 0.5,
    }
    return {tensor.name: known[tensor.name] for tensor in spec.tensors if tensor.name in known}


def dense(
    name: str, q: Tensor, k: Tensor, v: Tensor, captured: dict[str, Tensor], kept: Tensor | None
) -> Tensor:
    """O in the dtype of the operands, differentiable; ``kept`` are dropout's factors."""
    heads = q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    score = q @ k.mT * q.shape[3] ** -0.5
    at_q, at_k = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    per_head = {x: t[:, None, None] for x, t in captured.items() if x != "row"}
    weight = {
        "hstu": lambda s: torch.nn.functional.silu(s),
        "sigmoid": lambda s: torch.sigmoid(s + per_head["bias"]),
        "relu_squared": lambda s: torch.relu(s).square() / captured["row"][:, : q.shape[2], None],
        "power": lambda s: s**4,
        "retention": lambda s: s * torch.exp(per_head["decay"] * (at_k - at_q)),
        "linear": lambda s: s,
        "removed": lambda s: torch.nn.functional.silu(5 * torch.tanh(s / 5)),
        "exponential": lambda s: torch.exp(s / 2),
    }[name](score)
    mask = SPECS[name].get("mask_mod", lambda b, h, q, k: q >= -k - 1)
    keep = mask(0, 0, at_q, at_k)
    if name == "removed":
        keep = keep & ((at_q + at_k) % 3 != 0)
    weight = torch.where(keep, weight, 0.0)
    if name in ("power", "exponential"):
        total = weight.sum(-1, keepdim=True)
        weight = torch.where(total == 0, 0.0, weight / torch.where(total == 0, 1.0, total))
    return (weight if kept is None else weight * kept) @ v
