"""Windows: every index that a warp's part of a tile has lies in the window of the analysis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy

import flashgen as fg
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.windows import window_of
from flashgen.spec.language.lets import elements_of
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO, SEQ_K, K, Q

Fn = Any


def clip(x: Any, lo: int, hi: int) -> Any:
    return fg.minimum(fg.maximum(x, lo), hi)


def window(index: Fn, dims: tuple[Any, ...], rows: int = 16, keys: int = 96) -> Any:
    """The window of ``t[index(q, k)]``."""
    t = fg.Tensor("t", dims, "float32", grad=True)
    spec = fg.AttentionSpec(score_mod=lambda s, b, h, q, k: s + t[index(q, k)], head_dim=64)
    (element,) = elements_of(spec.score)
    return window_of(element, dims, rows, keys)


BOUNDED: list[Any] = [
    ("q - k", lambda q, k: q - k + 40, 111),
    ("k - q", lambda q, k: k - q, 111),
    ("of a size", lambda q, k: q - k + fg.seq_k - 1, 111),
    ("distance", lambda q, k: fg.abs(q - k), 111),
    ("clipped", lambda q, k: clip(q - k, -20, 20) + 20, 111),
    ("halved", lambda q, k: (q - k) // 2 + 60, 56),
    ("quotients", lambda q, k: q // 16 - k // 16 + 9, 8),
    ("remainder", lambda q, k: (q - k) % 7, 7),
    ("remainders", lambda q, k: q % 16 - k % 16 + 15, 31),
    ("doubled", lambda q, k: 2 * q - k, 126),
    ("of two", lambda q, k: fg.maximum(q // 8, k // 8), 13),
]


@pytest.mark.parametrize(
    ("index", "entries"), [b[1:] for b in BOUNDED], ids=[b[0] for b in BOUNDED]
)
def test_every_index_of_a_tile_is_in_its_window(index: Fn, entries: int) -> None:
    found = window(index, ("n",))
    assert found is not None
    assert found.entries == entries
    (axis,) = found.axes
    (expr,) = found.element.indices
    seq_k = {SEQ_K: np.int64(500)}
    for q_lo in (0, 3, 16, 33, 250):
        for k_lo in (0, 5, 96, 288):
            ends = {Q_LO: q_lo, Q_HI: q_lo + 15, K_LO: k_lo, K_HI: k_lo + 95}
            first = int(evaluate(axis.first, {s: np.int64(v) for s, v in ends.items()} | seq_k))
            q, k = np.arange(q_lo, q_lo + 16)[:, None], np.arange(k_lo, k_lo + 96)[None, :]
            values = np.asarray(evaluate(expr, {Q: q, K: k} | seq_k))
            assert first <= values.min()
            assert values.max() < first + axis.extent


@pytest.mark.parametrize(
    "index",
    [
        lambda q, k: q * k,
        lambda q, k: q * fg.seq_k + k,
        lambda q, k: fg.where(q > k, q, k),
        lambda q, k: 3 * q + 16 * k,
    ],
    ids=["product", "every score", "choice", "almost every score"],
)
def test_an_index_without_a_bound_or_with_many_values_has_no_window(index: Fn) -> None:
    assert window(index, ("n",)) is None


def test_a_tensor_of_few_elements_is_a_window_whatever_its_index() -> None:
    found = window(lambda q, k: fg.where(q > k, q * k, k), (32,))
    assert (found.entries, found.axes[0].first) == (32, sympy.S.Zero)


def test_a_window_of_two_axes_has_all_their_combinations() -> None:
    found = window(lambda q, k: (q // 16 - k // 16 + 9, q % 16 - k % 16 + 15), ("y", "x"))
    assert [axis.extent for axis in found.axes] == [8, 31]
    assert found.entries == 248
    assert window(lambda q, k: (q - k, q), ("y", "x")) is None, "more than a quarter of the scores"


def test_an_axis_that_does_not_vary_in_a_tile_is_not_in_the_window() -> None:
    t = fg.Tensor("t", ("heads", "n"), "float32", grad=True)
    spec = fg.AttentionSpec(score_mod=lambda s, b, h, q, k: s + t[h, q - k], head_dim=64)
    (element,) = elements_of(spec.score)
    found = window_of(element, ("heads", "n"), 32, 32)
    assert found is not None
    assert [axis.axis for axis in found.axes] == [1]
    assert found.entries == 63


def test_an_index_made_from_the_score_has_a_window_only_in_a_small_tensor() -> None:
    for dims, entries in ((("n",), None), ((20,), 20)):
        t = fg.Tensor("t", dims, "float32", grad=True)
        spec = fg.AttentionSpec(
            score_mod=lambda s, b, h, q, k, t=t: s + t[fg.where(s > 0, q - k, 0)], head_dim=64
        )
        (element,) = elements_of(spec.score)
        found = window_of(element, dims, 16, 96)
        assert (found.entries if found else None) == entries
