"""flex_attention against torch's own, with mods that are written for torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex

import flashgen as fg
from tests.support import flex_mods
from tests.support.flex_mods import MAKERS, operands, torch_answer
from tests.support.tiers import one_in

Tensor = torch.Tensor
SIZES = (2, 4, 40, 56)


def gradients(out: Tensor, lse: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Of a sum that weighs every element of out and of lse otherwise."""
    weigh = flex_mods.noise(*out.shape, seed=7).to(out.dtype)
    finite = torch.where(torch.isfinite(lse), lse, 0.0)
    total = (out * weigh).sum() + (finite * weigh.mean(-1)).sum()
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if x is None else x for leaf, x in zip(leaves, found, strict=True)
    ]


def block_mask_of(mask_mod, sizes):
    batch, h, seq_q, seq_k = sizes
    if mask_mod is None:
        return None
    return torch_flex.create_block_mask(mask_mod, batch, h, seq_q, seq_k, device="cpu")


@pytest.mark.parametrize("name", one_in(2, MAKERS))
def test_agrees_with_torch(name: str) -> None:
    mask_mod, score_mod, captured = MAKERS[name](*SIZES)
    q, k, v = operands(*SIZES)
    leaves = [q, k, v, *captured]

    out, lse = fg.flex_attention(
        q, k, v, score_mod, block_mask_of(mask_mod, SIZES), return_lse=True
    )
    given = gradients(out, lse, leaves)

    same, same_lse = torch_answer(q, k, v, mask_mod, score_mod)
    same_given = gradients(same, same_lse, leaves)
    exact, exact_lse = torch_answer(q.double(), k.double(), v.double(), mask_mod, score_mod)
    exact_given = gradients(exact, exact_lse, leaves)

    check("out", out, same, exact, 2)
    check("lse", lse, same_lse, exact_lse, 2)
    for place, parts in enumerate(zip(given, same_given, exact_given, strict=True)):
        check(f"gradient {place}", *parts, 3)


def check(what: str, given: Tensor, same: Tensor, exact: Tensor, factor: float) -> None:
    """The error rule."""
    assert not given.isnan().any(), what
    assert given.shape == exact.shape
    lost = exact == -torch.inf
    assert torch.equal(given == -torch.inf, lost), what

    def error(x: Tensor) -> float:
        return (x.double() - exact.double()).masked_fill(lost, 0).abs().max().item()

    assert error(given) <= factor * error(same) + 1e-5, what


def test_vectors_of_captured_tensors_have_gradients() -> None:
    """A network from distances to biases, and learned places, whose vectors torch cannot batch."""
    first, second = flex_mods.noise(5, 2), flex_mods.noise(4, 5)
    places, mixed = flex_mods.noise(56, 2), flex_mods.noise(4, 2, 2)
    captured = [x.requires_grad_() for x in (first, second, places, mixed)]

    def learned(score, b, h, q_idx, kv_idx):
        features = torch.stack([(q_idx - kv_idx) / 9, (q_idx + kv_idx) / 90])
        hidden = functional.gelu(functional.linear(features, first))
        x, y = places[q_idx] - places[kv_idx] + 0.25
        turned = torch.einsum("ij,j->i", mixed[h], places[q_idx])
        similar = functional.cosine_similarity(turned, places[kv_idx], dim=0)
        return score + (second @ hidden)[h] - torch.hypot(x, y) + similar

    q, k, v = operands(*SIZES)
    weigh = flex_mods.noise(*q.shape, seed=7)
    found = fg.flex_attention(q, k, v, learned)
    scores = q.double() @ k.double().mT / 4
    at = [torch.arange(size) for size in SIZES]
    scores = torch_flex._vmap_for_bhqkv(learned, prefix=(0,))(scores, *at)
    exact = scores.softmax(-1) @ v.double()
    leaves = [q, k, v, *captured]
    for x, y in zip(
        [found, *torch.autograd.grad((found * weigh).sum(), leaves)],
        [exact, *torch.autograd.grad((exact * weigh).sum(), leaves)],
        strict=True,
    ):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", one_in(3, ["causal", "softcap", "alibi", "document", "natten"]))
def test_agrees_with_torchs_public_function(name: str) -> None:
    mask_mod, score_mod, _ = MAKERS[name](*SIZES)
    q, k, v = (x.detach() for x in operands(*SIZES))
    block_mask = block_mask_of(mask_mod, SIZES)
    given = fg.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
    wanted = torch_flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_kernels_agree_with_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_BACKEND", "emulator")
    sizes = (1, 2, 20, 36)
    mask_mod, score_mod, captured = MAKERS[name](*sizes)
    q, k, v = operands(*sizes)
    leaves = [q, k, v, *captured]
    block_mask = block_mask_of(mask_mod, sizes)
    out, lse = fg.flex_attention(q, k, v, score_mod, block_mask, return_lse=True)
    wanted, wanted_lse = torch_answer(q, k, v, mask_mod, score_mod)
    given = [out, lse, *gradients(out, lse, leaves)]
    for x, y in zip(
        given, [wanted, wanted_lse, *gradients(wanted, wanted_lse, leaves)], strict=True
    ):
        # Not the dtype: torch's lse is of that of a captured float64 tensor.
        largest = y[y.isfinite()].abs().max().item()
        torch.testing.assert_close(
            x, y, rtol=1e-4, atol=1e-5 * max(1.0, largest), check_dtype=False
        )


def test_mods_of_torch_compile_are_those_that_they_were_made_of() -> None:
    q, k, v = operands(1, 2, 20, 20)
    cap = 3.0

    def capped(s, b, h, q_idx, kv_idx):
        return cap * torch.tanh(s / cap)

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    compiled = torch.compile(capped, backend="eager")
    block_mask = block_mask_of(causal, (None, None, 20, 20))
    wanted = fg.flex_attention(q, k, v, capped, block_mask)
    block_mask.mask_mod = torch.compile(causal, backend="eager")
    assert torch.equal(fg.flex_attention(q, k, v, compiled, block_mask), wanted)

    @functools.wraps(compiled)  # with the attributes of what it wraps
    def twice(*arguments):
        return 2 * capped(*arguments)

    doubled = fg.flex_attention(q, k, v, lambda *arguments: 2 * capped(*arguments))
    assert torch.equal(fg.flex_attention(q, k, v, twice), doubled)


def test_functions_of_torch_compile_in_a_mod_compile_nothing_of_the_record() -> None:
    q, k, v = operands(1, 2, 20, 20)
    torch._dynamo.reset()
    compiled = torch.compile(lambda s, cap: cap * torch.tanh(s / cap), backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=2):
        out = fg.flex_attention(q, k, v, lambda s, b, h, i, j: compiled(s, 3.0) + i - j)
    wanted = fg.flex_attention(q, k, v, lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0) + i - j)
    assert torch.equal(out, wanted)


def test_torch_compile_goes_around_it() -> None:
    table = flex_mods.noise(80).requires_grad_()
    q, k, v = operands(1, 2, 20, 30)

    def layer(q, k, v, table):
        def biased(score, b, h, q_idx, kv_idx):
            return score + table[q_idx - kv_idx]

        return fg.flex_attention(q * 2, k, v, score_mod=biased).sin()

    compiled = torch.compile(layer, backend="eager")
    for length in (20, 13):
        out = compiled(q[:, :, :length], k, v, table)
        wanted = layer(q[:, :, :length], k, v, table)
        assert torch.equal(out, wanted)
        assert torch.equal(*(torch.autograd.grad(x.sum(), table)[0] for x in (out, wanted)))


@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
def test_numbers_that_a_mod_makes_need_no_values_of_the_call(fake: bool) -> None:
    def halves(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = q_idx.new_ones((), dtype=torch.bool) & (kv_idx < torch.tensor(7 + fake))
        return torch.where(seen, score, -float("inf"))

    with FakeTensorMode() if fake else nullcontext():
        q = torch.zeros(1, 2, 20, 16, device="cpu" if fake else "meta")
        assert fg.flex_attention(q, q, q, halves).shape == q.shape


EQUAL_NUMBERS = {
    "clamp": lambda x, y: x.clamp(-1, 1),
    "clamp of a side": lambda x, y: x.clamp(min=0.0) + 2 * x.clamp_max(1.0),
    "clamp of no width": lambda x, y: x.clamp(1.0, 1.0),
    "clamp by a tensor": lambda x, y: torch.clamp(x, min=y),
    "clamp by two tensors": lambda x, y: torch.clamp(x, y, y + 1),
    "relu": lambda x, y: x.relu() + functional.relu6(x) + functional.leaky_relu(x, 0.2),
    "hard": lambda x, y: (
        functional.hardtanh(x) + 2 * functional.hardsigmoid(3 * x) + functional.hardswish(3 * x)
    ),
    "extrema": lambda x, y: torch.maximum(x, y) + 3 * torch.minimum(x, y),
    "extrema but NaN": lambda x, y: torch.fmax(x, y) + 3 * torch.fmin(x, y),
    "abs": lambda x, y: x.abs() + (x - y).abs(),
    "thresholds": lambda x, y: (
        functional.threshold(x, 0.0, 0.5) + functional.softshrink(x) + functional.hardshrink(x, 1.0)
    ),
}


@pytest.mark.parametrize("function", EQUAL_NUMBERS.values(), ids=EQUAL_NUMBERS)
def test_gradients_at_a_bound_are_those_of_torch(function: Callable[..., Tensor]) -> None:
    """They differ between releases of torch."""
    x = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], requires_grad=True)
    y = torch.tensor([-1.0, -1.0, 0.0, 0.0, 0.5, 2.0, 1.0], requires_grad=True)
    q, k, v = (torch.randn(1, 1, length, 16) for length in (5, 7, 7))
    scores = q @ k.mT / 4 + function(x, y)
    (scores.softmax(3) @ v).square().sum().backward()
    wanted, x.grad, y.grad = (x.grad, y.grad), None, None
    out = fg.flex_attention(q, k, v, lambda s, b, h, i, j: s + function(x[j], y[j]))
    out.square().sum().backward()
    for tensor, gradient in zip((x, y), wanted, strict=True):
        if gradient is not None:
            torch.testing.assert_close(tensor.grad, gradient, rtol=1e-4, atol=1e-5)
