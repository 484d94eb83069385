"""The tiled backward pass is the derivative of the tiled forward pass: gradcheck in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.spec.language.spec import AttentionSpec
from tests.support.masks import causal
from tests.support.shapes import Case
from tests.support.tiers import one_in, slow
from tests.support.tiled_calls import Tiled, arguments, gradients_are_derivatives

Tensor = torch.Tensor
STATE = (1234567, 89)


window = fg.Scalar("window", "int32", minimum=1)

SPECS = {
    name: AttentionSpec(mask, score, head_dim=8, dtype="float32")
    for name, mask, score in (
        ("full", None, None),
        ("causal", causal, None),
        (
            "window and softcap",
            lambda b, h, q, k: (k <= q) & (q - k < window),
            lambda s, b, h, q, k: 3 * fg.tanh(s / 3),
        ),
        (
            "by head and batch",
            lambda b, h, q, k: (q + h - k) % (b + 2) != 0,
            lambda s, b, h, q, k: s * fg.exp(-0.1 * h) + (k - q) / (b + 1) + s * s / 9,
        ),
        ("bent", causal, lambda s, b, h, q, k: fg.where(s > 0.2, s, fg.abs(s) * fg.sigmoid(s))),
        ("without queries", causal, lambda s, b, h, q, k: fg.sin(k * 0.7 + h)),
    )
}

SHAPES = {
    "square": (2, 2, 2, 11, 11, 4, 4),
    "grouped": (2, 4, 2, 7, 11, 4, 3),
    "one kv head": (1, 3, 1, 11, 5, 3, 4),
}
SMALL = (1, 2, 1, 5, 4, 2, 3)


DROPOUT = {"dropout_p": 0.3, "rng": STATE}


def checked(
    name: str, shape: tuple[int, ...], options: dict[str, Any], *, every_element: bool
) -> bool:
    batch, heads, heads_kv, seq_q, seq_k, dim, dim_v = shape
    case = Case(seq_q, seq_k, batch, heads, heads_kv, "float32", dim, dim_v)
    spec = SPECS[name].replace(dropout=bool(options))
    # The first three rows of a causal mask have no key.
    numbers = {"q_offset": 2, "k_offset": 5, "scalars": {"window": 4} if spec.scalars else {}}
    return gradients_are_derivatives(spec, case, {}, fast=not every_element, **numbers, **options)


@pytest.mark.parametrize(
    ("shape", "options"), one_in(2, itertools.product(SHAPES.values(), [{}, DROPOUT]), first=1)
)
@pytest.mark.parametrize("name", one_in(2, SPECS))
def test_gradients_are_the_derivative_along_random_directions(
    name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    assert checked(name, shape, options, every_element=False)


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        slow("causal", SHAPES["square"], {}),
        slow("window and softcap", SHAPES["one kv head"], {}),
        slow("by head and batch", SHAPES["one kv head"], DROPOUT),
        ("by head and batch", SMALL, DROPOUT),
    ],
)
def test_every_element_of_the_gradients_is_the_derivative(
    name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    assert checked(name, shape, options, every_element=True)


@pytest.mark.parametrize("part", ["out", "lse"])
def test_each_output_has_its_own_gradient(part: str) -> None:
    """Against autograd of attention in plain PyTorch."""
    q, k, v = (x.double().requires_grad_() for x in Case(13, 17, 2, 4, 2, "float32", 8).tensors())
    spec = SPECS["causal"]
    out, lse = Tiled.apply(spec, arguments(spec, q), q, k, v)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(8)
    keep = torch.ones(13, 17, dtype=torch.bool).tril()
    scores = scores.masked_fill(~keep, -math.inf)
    plain = scores.softmax(-1) @ v.repeat_interleave(2, 1), scores.logsumexp(-1)
    found, expected = (out, plain[0]) if part == "out" else (lse, plain[1])
    weights = torch.randn_like(found)
    ours = torch.autograd.grad((found * weights).sum(), (q, k, v), allow_unused=True)
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v), allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize("weight_mod", [None, lambda score, b, h, q, k: fg.sigmoid(score)])
@pytest.mark.parametrize(("seq_q", "heads"), [(31, 7), (64, 8), (127, 7)])
def test_sums_over_the_rows_of_a_group_meet_the_error_rule(
    seq_q: int, heads: int, weight_mod: Any
) -> None:
    """Rows whose gradients are equal, as those of ``out.sum()``, leave errors of one sign."""
    normalize = "none" if weight_mod else "softmax"
    spec = AttentionSpec(head_dim=32, dtype="float32", weight_mod=weight_mod, normalize=normalize)
    q, k, v = Case(seq_q, 8, 1, heads, 1, "float32", 32).tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dout = v.detach()[:, :, :1].expand(1, heads, seq_q, 32)
    found = torch.autograd.grad(fg.attention(spec)(*leaves), leaves, dout)
    verdicts = reference.judge_gradients(found, spec, *(x.detach() for x in leaves), dout)
    assert all(verdicts.values()), verdicts


def test_a_small_model_learns_with_it() -> None:
    """Copying the previous token: the loss falls as with PyTorch's own attention."""
    spec = AttentionSpec(causal, head_dim=16, dtype="float32", dropout=True)
    losses = {}
    for kind in ("tiled", "torch"):
        torch.manual_seed(0)
        embed, positions = torch.nn.Embedding(12, 32), torch.nn.Embedding(24, 32)
        qkv, head = torch.nn.Linear(32, 96), torch.nn.Linear(32, 12)
        weights = [p for m in (embed, positions, qkv, head) for p in m.parameters()]
        optimizer = torch.optim.Adam(weights, 0.01)
        losses[kind] = []
        for _ in range(60):
            tokens = torch.randint(12, (16, 24))
            x = embed(tokens) + positions.weight
            q, k, v = (part.view(16, 24, 2, 16).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            if kind == "tiled":
                out, _ = Tiled.apply(spec, arguments(spec, q), q, k, v)
            else:
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            logits = head(out.transpose(1, 2).flatten(2))
            loss = torch.nn.functional.cross_entropy(
                logits[:, 1:].flatten(0, 1), tokens[:, :-1].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[kind].append(loss.item())
    assert losses["tiled"][-1] < 0.5 * losses["tiled"][0]
    assert losses["tiled"] == pytest.approx(losses["torch"], rel=0.01)


@pytest.mark.parametrize("extremum", [fg.minimum, fg.maximum])
def test_an_extremum_of_a_clamped_element_has_the_derivative_of_the_clamp(extremum: Any) -> None:
    """sympy folds a choice that is compared, whose derivative would then be 0."""
    table = fg.Tensor("table", ("places",), "float32", grad=True)
    spec = AttentionSpec(
        score_mod=lambda s, b, h, q, k: s + fg.expm1(extremum(0.25, fg.clamp(table[k], -1, 0.8))),
        head_dim=8,
        dtype="float32",
    )
    q, k, v = Case(5, 9, 1, 1, 1, "float32", 8).tensors()
    own = torch.linspace(-1.6, 1.5, 9).requires_grad_()  # none at a bound
    fg.attention(spec)(q, k, v, table=own).square().sum().backward()
    given = own.detach().clone().requires_grad_()
    bound = torch.tensor(0.25)
    choose = torch.minimum if extremum is fg.minimum else torch.maximum
    bias = torch.expm1(choose(bound, given.clamp(-1, 0.8)))
    scores = q @ k.transpose(2, 3) / math.sqrt(8) + bias
    (scores.softmax(3) @ v).square().sum().backward()
    torch.testing.assert_close(own.grad, given.grad, rtol=1e-4, atol=1e-5)


def from_torch(x: Any) -> Any:
    """The functions of `fg`, or those of torch for its tensors."""
    return torch if isinstance(x, torch.Tensor) else fg


BESIDE_POLES: dict[str, Any] = {
    "root of a maximum": lambda s, x: from_torch(s).sqrt(
        s.relu() if isinstance(s, torch.Tensor) else fg.maximum(s, 0.0)
    ),
    "root of a clamp": lambda s, x: from_torch(s).sqrt(from_torch(s).clamp(s, 0.0, 4.0)),
    "root of a choice": lambda s, x: from_torch(s).where(s > 0, 5 * s, 0.0) ** 0.5,
    "root of two choices": lambda s, x: from_torch(s).sqrt(
        from_torch(s).where(s > 0, s, 0.0) + from_torch(s).where(s > 0.1, s * x, 0.0)
    ),
    "distance": lambda s, x: from_torch(s).sqrt(from_torch(s).where(x > 0.4, (x - s) ** 2, 0.0)),
    "of infinity": lambda s, x: from_torch(s).rsqrt(
        1 + from_torch(s).where(s > 0, s, -math.inf) ** 2
    ),
}


@pytest.mark.parametrize("name", BESIDE_POLES)
def test_what_a_choice_ignores_has_no_gradient_beside_a_pole(name: str) -> None:
    """The slope of the root of 0 is infinite, and torch selects gradients where it chooses."""
    bent = BESIDE_POLES[name]
    table = fg.Tensor("table", ("seq_k",), "float32", grad=True)
    spec = AttentionSpec(
        score_mod=lambda s, b, h, q, k: s * table[k] + bent(s, table[k]),
        head_dim=8,
        dtype="float32",
    )
    q, k, v = (x.requires_grad_() for x in Case(5, 9, 1, 1, 1, "float32", 8).tensors())
    x = torch.linspace(0.2, 1.6, 9).requires_grad_()
    own = torch.autograd.grad(fg.attention(spec)(q, k, v, table=x).square().sum(), (q, k, x))
    scores = q @ k.transpose(2, 3) / math.sqrt(8)
    result = (scores * x + bent(scores, x)).softmax(3) @ v
    for gradient, expected in zip(
        own, torch.autograd.grad(result.square().sum(), (q, k, x)), strict=True
    ):
        assert expected.isfinite().all()
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
