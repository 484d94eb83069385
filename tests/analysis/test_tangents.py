"""Tangents of scores and of their derivatives, against differences of the expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.cpu.mods import compiled
from flashgen.spec.analysis import analyse
from flashgen.spec.analysis.tangents import analyse_tangents, directions_of, tangent_tensors
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SCORE, SCORE_TANGENT, B, H, K, Q

bias = fg.Tensor("bias", ("heads", 9), "float32", grad=True)
cap = fg.Tensor("cap", ("heads",), "float32", grad=True)
row = fg.Tensor("row", ("heads", "seq_q"), "float32", grad=True)
width = fg.Scalar("width", "int32", minimum=1)


def near(q: Any, k: Any) -> Any:
    return fg.minimum(fg.maximum(q - k, 0), 8)


SCORES: dict[str, Callable[..., Any]] = {
    "softcap": lambda s, b, h, q, k: 5 * fg.tanh(s / 5),
    "learned softcap and bias": lambda s, b, h, q, k: (
        cap[h] * fg.tanh(s / cap[h]) + bias[h, near(q, k)]
    ),
    "product": lambda s, b, h, q, k: s * cap[h] * bias[h, near(q, k)],
    "two elements of one tensor": lambda s, b, h, q, k: s * bias[h, 0] * bias[h, near(q, k)],
    "squared": lambda s, b, h, q, k: s * s,
    "where": lambda s, b, h, q, k: fg.where(s > 0, s * s * s, 2 * s * cap[h]),
    "silu": lambda s, b, h, q, k: s * fg.sigmoid(s),
    "relu squared": lambda s, b, h, q, k: fg.maximum(s, 0) ** 2,
    "decay": lambda s, b, h, q, k: s * fg.exp(cap[h] * (q - k) / 8),
    "absolute values": lambda s, b, h, q, k: fg.log1p(fg.abs(s + cap[h])) * fg.abs(s),
    "choice by a scalar": lambda s, b, h, q, k: fg.tanh(s * fg.where(width > 3, 2, 0)),
    "bias alone": lambda s, b, h, q, k: bias[h, near(q, k)],
    "large": lambda s, b, h, q, k: sum(
        fg.tanh(s * cap[h] + i) * fg.sigmoid(s - i) * bias[h, i % 9] for i in range(12)
    ),
}
WEIGHTS: dict[str, Callable[..., Any]] = {
    "none": lambda s, b, h, q, k: s * fg.sigmoid(s * cap[h]),
    "sum": lambda s, b, h, q, k: fg.sigmoid(s + bias[h, near(q, k)]),
    "rows": lambda s, b, h, q, k: fg.maximum(s, 0) ** 2,
}


def specs() -> dict[str, AttentionSpec]:
    found = {name: AttentionSpec(score_mod=mod) for name, mod in SCORES.items()}
    for name, mod in WEIGHTS.items():
        by = row if name == "rows" else name
        score = SCORES["softcap"]
        found[f"weight, {name}"] = AttentionSpec(score_mod=score, weight_mod=mod, normalize=by)
    return found


@pytest.mark.parametrize("name", specs())
def test_tangents_are_derivatives_along_the_tangents_of_the_score_and_of_learned_tensors(
    name: str,
) -> None:
    spec = specs()[name]
    of, tangents = analyse_tangents(spec), tangent_tensors(spec)
    make = torch.Generator().manual_seed(3)
    shapes = {"bias": (2, 9), "cap": (2,), "row": (2, 11)}
    q, k = torch.arange(11)[:, None], torch.arange(13)[None]
    values = {B: torch.tensor(0), H: torch.tensor(1), Q: q, K: k, width.expr: torch.tensor(5)}
    moving = {SCORE: (torch.randn(11, 13, generator=make).double(), SCORE_TANGENT)}
    for tensor in spec.tensors:
        made = 1 + 0.3 * torch.randn(shapes[tensor.name], generator=make).double()
        moving[tensor.symbol] = made, tangents[tensor.name].symbol
    ways = {
        x: torch.randn(value.shape, generator=make).double() for x, (value, _) in moving.items()
    }
    values |= {symbol: value for symbol, (value, _) in moving.items()}
    values |= {tangent: ways[symbol] for symbol, (_, tangent) in moving.items()}

    def at(step: float, expr: Any) -> torch.Tensor:
        moved = {symbol: value + step * ways[symbol] for symbol, (value, _) in moving.items()}
        given = {**values, **moved}
        program = compiled((expr,), torch.float64)
        bound = program.bind(given)
        return bound(q, k, given[SCORE], given[SCORE_TANGENT])[0]

    pairs = [(of.score, of.tangent), (of.slope, of.slope_tangent)]
    pairs += [(by, tangent) for _, by, tangent in of.learned]
    for expr, tangent in pairs:
        found = at(0.0, tangent)
        wanted = (at(1e-6, expr) - at(-1e-6, expr)) / 2e-6
        torch.testing.assert_close(found + 0 * wanted, wanted + 0 * found, rtol=1e-6, atol=1e-7)
    learned = analyse(spec).score.learned
    assert [(element, by) for element, by, _ in of.learned] == list(learned)


def test_a_tangent_that_is_absent_is_part_of_no_expression() -> None:
    spec = AttentionSpec(score_mod=SCORES["learned softcap and bias"])
    none = analyse_tangents(spec, directions_of(spec, score=False, names=frozenset()))
    assert none.tangent == none.slope_tangent == 0
    only = analyse_tangents(spec, directions_of(spec, score=False, names=frozenset({"bias"})))
    assert {str(symbol) for symbol in only.tangent.free_symbols} >= {"bias_tangent"}
    assert SCORE_TANGENT not in only.tangent.free_symbols
    assert "cap_tangent" not in {str(symbol) for symbol in only.tangent.free_symbols}


def test_the_tangent_of_a_tensor_has_a_name_that_no_capture_has() -> None:
    other = fg.Tensor("cap_tangent", ("heads",))
    spec = AttentionSpec(score_mod=lambda s, b, h, q, k: s * cap[h] + other[h])
    assert tangent_tensors(spec)["cap"].name == "cap_tangent_"
