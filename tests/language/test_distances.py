"""Whether a mask stays the same where query and key move by the same number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flashgen as fg
from flashgen.spec.language.distances import is_of_distances
from flashgen.spec.language.lets import lets_of

WIDTH = fg.Scalar("width", "int32")
SEQUENCES = fg.Tensor("sequences", ("batch", "seq_k"), "int32")
Mod = Callable[..., Any]


def steep(x: Any) -> Any:
    """A function whose expression is so large that its parts have names."""
    for i in range(14):
        x = (x + i) // (i % 3 + 2) * 3 + x
    return x


OF_DISTANCES: dict[str, Mod] = {
    "window": lambda b, h, q, k: (k <= q) & (q - k < WIDTH),
    "dilated": lambda b, h, q, k: (q - k) % 4 == 0,
    "multiples": lambda b, h, q, k: 2 * q < WIDTH + 2 * k,
    "products": lambda b, h, q, k: (q - k) * (q - k) < 50,
    "scaled": lambda b, h, q, k: WIDTH * q - WIDTH * k < 9,
    "of every position": lambda b, h, q, k: (q >= 0) & (fg.minimum(k, 4) < 9) & (k != -1),
    "of every choice": lambda b, h, q, k: fg.where(2 * k - q > q - k, 2 * k - q, q - k) > -(2**40),
    "elements": lambda b, h, q, k: SEQUENCES[b, q] == SEQUENCES[b, k],
    "parts": lambda b, h, q, k: steep(q - k) > 3,
}
OF_POSITIONS: dict[str, Mod] = {
    "chunks": lambda b, h, q, k: q // 4 == k // 4,
    "prefix": lambda b, h, q, k: (k <= q) | (k < WIDTH),
    "choices": lambda b, h, q, k: fg.where(k - (q - k) > q - k, 2 * k - q, q - k) > -1,
    "products": lambda b, h, q, k: q * k < 50,
    "other multiples": lambda b, h, q, k: 2 * q < 3 * k,
    "parts": lambda b, h, q, k: (k <= q) & (k < steep(q)),
}


@pytest.mark.parametrize("mod", OF_DISTANCES.values(), ids=OF_DISTANCES)
def test_masks_that_move_with_their_positions_are_of_distances(mod: Mod) -> None:
    assert is_of_distances(fg.AttentionSpec(mask_mod=mod, head_dim=64, dtype="float16").mask)


@pytest.mark.parametrize("mod", OF_POSITIONS.values(), ids=OF_POSITIONS)
def test_masks_that_count_from_the_first_position_are_not(mod: Mod) -> None:
    assert not is_of_distances(fg.AttentionSpec(mask_mod=mod, head_dim=64, dtype="float16").mask)


def test_large_masks_have_named_parts() -> None:
    """So that the masks "parts" above are about them."""
    spec = fg.AttentionSpec(mask_mod=OF_POSITIONS["parts"], head_dim=64, dtype="float16")
    assert lets_of(spec.mask)
