"""Calls of flex_attention under torch.compile, and what they compute in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from flashgen.frontends.flex import compiled
from flashgen.integrations.torch import register_flex, unregister_flex
from tests.support.flex_mods import noise

Tensor = torch.Tensor


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's flex_attention on flashgen's operators, without torch's refusal of the CPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(compiled, "_told", compiled.ReasonsTold())
    torch._dynamo.reset()
    register_flex()
    yield
    unregister_flex()
    torch._dynamo.reset()


def operands(*, heads_kv: int = 4, seq: int = 40, learn: bool = True) -> list[Tensor]:
    shapes = (1, 4, seq, 16), (1, heads_kv, seq, 16), (1, heads_kv, seq, 16)
    return [noise(*s, seed=n).requires_grad_(learn) for n, s in enumerate(shapes)]


def compile(function: Any, backend: str = "aot_eager", **options: Any) -> tuple[Any, Any]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def expected(q: Tensor, k: Tensor, v: Tensor, score: Any = None, mask: Any = None) -> Any:
    """out and lse by dense math in float64, differentiable."""
    heads, dim = q.shape[1], q.shape[3]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1).double() for x in (k, v))
    scores = q.double() @ k.mT * dim**-0.5
    places = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score is not None:
        scores = score(scores, *places)
    if mask is not None:
        scores = scores.masked_fill(~mask(*places), -torch.inf)
    lse = scores.logsumexp(-1)
    return scores.sub(lse.where(lse > -torch.inf, 0.0)[..., None]).exp() @ v, lse


def assert_same(found: Any, wanted: Any, inputs: list[Tensor]) -> None:
    """Compares results, and gradients through all of them."""
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)
    weights = [noise(*x.shape, seed=7).double() for x in wanted]
    losses = [
        sum((x.double() * w).sum() for x, w in zip(results, weights, strict=True))
        for results in (found, wanted)
    ]
    gradients = [torch.autograd.grad(loss, inputs) for loss in losses]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
