"""torch.func over flex_attention, at the first call with a mod as at later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vjp, vmap
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashgen as fg
from tests.support.flex_mods import noise, operands

Tensor = torch.Tensor

Q, K, V = (x.detach() for x in operands(1, 2, 8, 8, dim=8))
BIAS = noise(2)


pytestmark = pytest.mark.usefixtures("nothing_is_known")


def of_flashgen(q: Tensor, bias: Tensor) -> Tensor:
    def mod(s, b, h, i, j):
        return s * torch.tanh(bias[h]) + bias[h] * (i - j)

    return fg.flex_attention(q, K, V, mod).square().sum()


def of_torch(q: Tensor, bias: Tensor) -> Tensor:
    places = torch.arange(8)
    factor, slope = torch.tanh(bias)[:, None, None], bias[:, None, None]
    scores = q @ K.transpose(-1, -2) / 8**0.5 * factor + slope * (places[:, None] - places)
    return (scores.softmax(-1) @ V).square().sum()


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: grad(f, argnums=(0, 1))(Q, BIAS),
    "grad of q alone": lambda f: grad(f)(Q, BIAS),
    "grad of a parameter": lambda f: grad(f)(Q, torch.nn.Parameter(BIAS)),
    "vjp": lambda f: vjp(lambda bias: f(Q, bias), BIAS)[1](torch.ones(())),
    "jacrev": lambda f: jacrev(lambda bias: f(Q, bias))(BIAS),
    "vmap": lambda f: vmap(f, in_dims=(0, None))(torch.stack([Q, 2 * Q]), BIAS),
    "vmap of grad": lambda f: vmap(grad(f), in_dims=(0, None))(torch.stack([Q, 2 * Q]), BIAS),
    "vmap of grad over the capture": lambda f: vmap(grad(f, argnums=1), in_dims=(None, 0))(
        Q, torch.stack([BIAS, 2 * BIAS])
    ),
    "no gradients": lambda f: torch.no_grad()(f)(Q, BIAS),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_of_a_captured_tensor(name: str) -> None:
    wanted = TRANSFORMS[name](of_torch)
    for _ in range(2):
        torch.testing.assert_close(TRANSFORMS[name](of_flashgen), wanted, rtol=1e-3, atol=1e-4)


def test_of_a_module_whose_mod_reads_its_parameters() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(BIAS.clone())
            self.function = function

        def mod(self, s, b, h, i, j):
            return s * torch.tanh(self.bias[h]) + self.bias[h] * (i - j)

        def forward(self) -> Tensor:
            if self.function is of_torch:
                return of_torch(Q, self.bias)
            return fg.flex_attention(Q, K, V, self.mod).square().sum()

    def gradient(layer: Layer) -> Tensor:
        given = {"bias": 2 * BIAS}
        return grad(lambda given: functional_call(layer, given, ()))(given)["bias"]

    ours, theirs = Layer(of_flashgen), Layer(of_torch)
    for _ in range(2):
        torch.testing.assert_close(gradient(ours), gradient(theirs), rtol=1e-3, atol=1e-4)
    ours().backward()
    theirs().backward()
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=1e-3, atol=1e-4)


KEPT = torch.tensor([True, False, True, True, False, True, True, True])


def with_blocks(q: Tensor, kept: Tensor, inside: bool) -> Tensor:
    def make() -> BlockMask:
        return create_block_mask(
            lambda b, h, i, j: kept[j], None, None, 8, 8, device="cpu", BLOCK_SIZE=4
        )

    made = None if inside else make()

    def attended(q: Tensor) -> Tensor:
        mask = make() if made is None else made
        return fg.flex_attention(q, K, V, None, mask).square().sum()

    return grad(attended)(q)


@pytest.mark.parametrize("inside", [False, True], ids=["made before", "made inside"])
def test_of_a_block_mask_that_reads_a_tensor(inside: bool) -> None:
    def of_torch(q: Tensor) -> Tensor:
        scores = (q @ K.transpose(-1, -2) / 8**0.5).masked_fill(~KEPT, -torch.inf)
        return (scores.softmax(-1) @ V).square().sum()

    for _ in range(2):
        torch.testing.assert_close(with_blocks(Q, KEPT, inside), grad(of_torch)(Q))


def test_blocks_that_differ_in_a_vmap_are_refused() -> None:
    mask = create_block_mask(
        lambda b, h, i, j: i >= 0, None, None, 8, 8, device="cpu", BLOCK_SIZE=4
    )

    def masked(kept: Tensor) -> Tensor:
        mask.mask_mod = lambda b, h, i, j: kept[j]
        return fg.flex_attention(Q, K, V, None, mask)

    def scored(kept: Tensor) -> Tensor:
        return fg.flex_attention(Q, K, V, lambda s, b, h, i, j: torch.where(kept[j], s, -torch.inf))

    many = torch.stack([KEPT, KEPT.flip(0)])
    with pytest.raises(NotImplementedError, match=r"torch\.vmap") as caught:
        vmap(masked)(many)
    assert "in the score_mod: torch.where(condition, score, -math.inf)" in str(caught.value)
    torch.testing.assert_close(vmap(scored)(many), torch.stack([scored(each) for each in many]))
