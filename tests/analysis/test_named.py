"""The analysis of common masks: exact classes of tiles and closed-form bounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.spec.analysis import analyse
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.intervals import WalkedAxis
from flashgen.spec.analysis.mask import analyse_mask
from flashgen.spec.language.spec_file import load
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO, SEQ_K, SEQ_Q, H, K, Q
from flashgen.spec.language.tracing import trace_mask
from tests.support.paths import ROOT
from tests.support.tiers import slow
from tests.support.tile_class import classify

SPECS = ROOT / "specs"

NAMED: dict[str, list[dict[str, int]]] = {
    "full": [{}],
    "causal": [{}],
    "causal_offset": [{"shift": -5}, {"shift": 0}, {"shift": 9}],
    "sliding_window": [{"window": w} for w in (1, 2, 7, 40)],
    "prefix_lm": [{"prefix": p} for p in (-1, 0, 5, 13, 50)],
    "softcap": [{}],
    "alibi": [{}],
    "block_causal": [{}],
    "dilated_window": [
        {"window": w, "dilation": d} for w, d in [(0, 1), (6, 1), (7, 3), (2, 5), (30, 4)]
    ],
    "strided": [{"stride": s} for s in (1, 2, 5, 9)],
    "symmetric_window": [{"window": w} for w in (0, 3, 40)],
    "longformer": [{"window": w, "global_tokens": g} for w, g in [(2, 0), (3, 4), (0, 40)]],
    "block_diagonal": [{"chunk": c} for c in (1, 5, 40)],
    "empty_rows": [{}],
    "squared": [{}],
    "distance_decay": [{}],
    "power": [{}],
    "relu_squared": [{}],
    "sigmoid": [{}],
}
# Masks of two coordinates, whose tiles are bounded soundly but not exactly, and those that read
# tensors: random data classifies them in tests/cpu/test_walk.py.
BOUNDED = {"natten_2d", "block_diffusion"}

SIZE_Q, SIZE_K = 26, 33


def dense(mask: Any, env: dict[Any, Any], q: range, k: range) -> np.ndarray:
    values = {**env, Q: np.array(q)[:, None], K: np.array(k)[None, :]}
    return np.broadcast_to(evaluate(mask, values), (len(q), len(k)))


def environment(spec: fg.AttentionSpec, scalars: dict[str, int]) -> dict[Any, Any]:
    by_name = {scalar.name: scalar.expr for scalar in spec.scalars}
    assert set(by_name) == set(scalars)
    return {**{by_name[n]: v for n, v in scalars.items()}, SEQ_Q: SIZE_Q, SEQ_K: SIZE_K}


def cases() -> list[Any]:
    return [
        pytest.param(name, scalars, id="-".join([name, *map(str, scalars.values())]))
        for name, choices in NAMED.items()
        for scalars in choices
    ]


def test_every_spec_file_is_listed_here() -> None:
    capturing = {file.stem for file in SPECS.glob("*.py") if load(file).read_tensors}
    assert {file.stem for file in SPECS.glob("*.py")} == set(NAMED) | BOUNDED | capturing


@pytest.mark.parametrize(("name", "scalars"), cases())
@pytest.mark.parametrize("block", [slow((1, 1)), (4, 6), (8, 3), (5, 16)], ids=str)
def test_every_tile_of_a_named_mask_is_classified_exactly(
    name: str, scalars: dict[str, int], block: tuple[int, int]
) -> None:
    spec = load(SPECS / f"{name}.py")
    analysis, env = analyse(spec), environment(spec, scalars)
    # Chunks of 100 only show in positions that go beyond them.
    q0, k0 = (90, 80) if name == "block_causal" else (0, 0)
    for q, k in itertools.product(range(0, SIZE_Q, block[0]), range(0, SIZE_K, block[1])):
        rows = range(q0 + q, q0 + min(q + block[0], SIZE_Q))
        columns = range(k0 + k, k0 + min(k + block[1], SIZE_K))
        truth = dense(spec.mask, env, rows, columns)
        expected = "full" if truth.all() else "mixed" if truth.any() else "empty"
        found = classify(analysis.mask, env, (rows[0], rows[-1]), (columns[0], columns[-1]))
        assert found == expected, (rows, columns)


@pytest.mark.parametrize(("name", "scalars"), cases())
@pytest.mark.parametrize("walk", [WalkedAxis(K), WalkedAxis(Q)], ids=["keys", "queries"])
def test_the_reach_of_a_named_mask_is_its_hull(
    name: str, scalars: dict[str, int], walk: WalkedAxis
) -> None:
    spec = load(SPECS / f"{name}.py")
    found = analyse_mask(spec.mask, walk)
    env = environment(spec, scalars)
    walked = range(-60, 320)
    lo_symbol, hi_symbol = (K_LO, K_HI) if walk.symbol == Q else (Q_LO, Q_HI)
    for first, size in itertools.product((0, 7, 95, 130), (1, 5, 16)):
        fixed = range(first, first + size)
        truth = dense(spec.mask, env, *((walked, fixed) if walk.symbol == Q else (fixed, walked)))
        line = truth.any(axis=1 if walk.symbol == Q else 0)
        corners = {**env, lo_symbol: fixed[0], hi_symbol: fixed[-1]}
        lo = -60 if found.reach.lo is None else evaluate(found.reach.lo, corners)
        hi = 320 if found.reach.hi is None else evaluate(found.reach.hi, corners)
        inside = np.array([lo <= x < hi for x in walked])
        assert not (line & ~inside).any()
        if found.reach_exact:
            assert (line == inside).all()
        elif line.any() and name != "dilated_window":
            # Not every position is reached, but the bounds themselves are.
            true = [x for x, reached in zip(walked, line, strict=True) if reached]
            assert found.reach.lo is None or true[0] == max(lo, -60)
            assert found.reach.hi is None or true[-1] == min(hi, 320) - 1


@pytest.mark.parametrize(
    ("name", "lo", "hi", "exact"),
    [
        ("full", "None", "None", True),
        ("causal", "None", "q_hi + 1", True),
        ("causal_offset", "None", "q_hi + seq_k - seq_q + shift + 1", True),
        ("sliding_window", "q_lo - window + 1", "q_hi + 1", True),
        ("prefix_lm", "None", "Maximum(prefix, q_hi + 1)", True),
        ("block_causal", "None", "100*FloorDiv(q_hi, 100) + 100", True),
        ("dilated_window", "q_lo - window", "q_hi + window + 1", False),
        ("strided", "None", "q_hi + 1", False),
    ],
)
def test_reach_is_the_closed_form_that_a_person_would_write(
    name: str, lo: str, hi: str, exact: bool
) -> None:
    mask = analyse(load(SPECS / f"{name}.py")).mask
    assert (str(mask.reach.lo), str(mask.reach.hi), mask.reach_exact) == (lo, hi, exact)


def test_causal_has_one_band_of_mixed_tiles() -> None:
    mask = analyse(load(SPECS / "causal.py")).mask
    kinds = [
        [classify(mask, {}, (q, q + 7), (k, k + 7)) for k in range(0, 32, 8)]
        for q in range(0, 32, 8)
    ]
    for i, row in enumerate(kinds):
        assert row == ["full"] * i + ["mixed"] + ["empty"] * (3 - i)


def test_full_mask_has_no_mixed_tile_and_no_bound() -> None:
    mask = analyse(load(SPECS / "full.py")).mask
    assert mask.always
    assert (mask.reach.lo, mask.reach.hi) == (None, None)
    assert classify(mask, {}, (0, 63), (0, 63)) == "full"


def test_full_tiles_of_a_window_have_both_bounds() -> None:
    mask = analyse(load(SPECS / "sliding_window.py")).mask
    assert mask.full is not None
    assert (str(mask.full.lo), str(mask.full.hi)) == ("q_hi - window + 1", "q_lo + 1")
    assert mask.full_exact


@pytest.mark.parametrize(
    ("name", "scalars", "size"),
    [
        ("natten_2d", {"width": 5, "height": 6, "radius": 2}, 5),
        ("block_diffusion", {"clean": 12, "block": 3}, 3),
    ],
)
def test_empty_tiles_of_masks_of_two_coordinates_are_found(
    name: str, scalars: dict[str, int], size: int
) -> None:
    spec = load(SPECS / f"{name}.py")
    mask, env = analyse(spec).mask, environment(spec, scalars)
    for q, k in itertools.product(range(0, 25 - size, size), repeat=2):
        truth = dense(spec.mask, env, range(q, q + size), range(k, k + size))
        kind = classify(mask, env, (q, q + size - 1), (k, k + size - 1))
        assert (kind == "empty") == (not truth.any()), (q, k)
        assert (kind == "full") <= bool(truth.all())


SHIFT = fg.Scalar("shift", "int32")


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: fg.popcount((q // 8) ^ (k // 8)) <= 1,
        lambda b, h, q, k: fg.popcount(q ^ k) <= 2,
        lambda b, h, q, k: q & k == 0,
        lambda b, h, q, k: (q | k) & 0x28 != 0x28,
        lambda b, h, q, k: q & 0x30 == k & 0x30,
        lambda b, h, q, k: (~q & k) < 8,
        lambda b, h, q, k: q >> SHIFT == k >> SHIFT,
        lambda b, h, q, k: q << h >= k,
        lambda b, h, q, k: q >> (h + 4) > k >> (h + 4),
        lambda b, h, q, k: abs(q // 8 - k // 8) + abs(q % 8 - k % 8) <= 2,
        lambda b, h, q, k: abs(q // 8 - k // 8) + abs(q % 8 - k % 8) == 2,
    ],
)
def test_empty_tiles_of_masks_of_bits_and_of_sums_of_distances_are_found(
    mask_mod: Callable[..., Any],
) -> None:
    """Every empty one of 8 x 8 tiles of 8 x 8 scores."""
    expr = trace_mask(mask_mod).expr
    mask, env = analyse_mask(expr), {H: 0, SHIFT.expr: 4}
    found = 0
    for q, k in itertools.product(range(0, 64, 8), repeat=2):
        truth = dense(expr, env, range(q, q + 8), range(k, k + 8))
        kind = classify(mask, env, (q, q + 7), (k, k + 7))
        assert (kind == "empty") == (not truth.any()), (q, k)
        assert (kind == "full") <= bool(truth.all())
        found += kind == "empty"
    assert found > 0


def test_block_diagonal_reach_is_proved_exact() -> None:
    mask = analyse_mask(trace_mask(lambda b, h, q, k: q // 5 == k // 5).expr)
    assert str(mask.reach.lo) == "5*FloorDiv(q_lo, 5)"
    assert str(mask.reach.hi) == "5*FloorDiv(q_hi, 5) + 5"
    assert mask.reach_exact


ON = fg.Scalar("on", "bool")


@pytest.mark.parametrize(
    ("mask_mod", "lo", "hi"),
    [
        (lambda b, h, q, k: ON | (k <= q), "None", f"Select(on, {2**30}, q_hi + 1)"),
        (lambda b, h, q, k: k <= fg.where(ON, q + 9, q), "None", "Select(on, q_hi + 9, q_hi) + 1"),
        (
            lambda b, h, q, k: fg.where(h < 4, (k <= q) & (q - k < 9), k <= q),
            f"Select(h >= 4, -{2**30}, q_lo - 8)",
            "q_hi + 1",
        ),
    ],
)
def test_a_condition_that_all_scores_of_a_head_share_leaves_bounds_exact(
    mask_mod: Callable[..., Any], lo: str, hi: str
) -> None:
    mask = analyse_mask(trace_mask(mask_mod).expr)
    assert (str(mask.reach.lo), str(mask.reach.hi)) == (lo, hi)
    assert (mask.reach_exact, mask.full_exact) == (True, True)
    assert mask.row is not None


def test_rows_that_are_masked_out_end_at_once() -> None:
    mask = analyse_mask(trace_mask(lambda b, h, q, k: q < fg.seq_q // 2).expr)
    assert mask.row is not None
    env = {SEQ_Q: 10}
    assert evaluate(mask.row.hi, {**env, Q: 5}) < 0 < evaluate(mask.row.hi, {**env, Q: 4})
