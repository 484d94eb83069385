"""The emitted backward kernels meet the error rule, executed by the emulator with all its checkers.

test_every_spec.py has every spec once in `make test`. Here every spec at every head dim, with a
quarter of the lengths and the other factors in turn, is `slow`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from tests.support.examples import SPEC_IDS, SPECS, spec_path
from tests.support.judged import example, plain
from tests.support.shapes import (
    DTYPES,
    HEAD_DIMS,
    Case,
    quarter_of_cases,
)

ROWS = 256
MOST_SCORES = 120_000  # with those of 16 x 16 tiles that lie outside, which take the same time
OFFSETS = [(96, 0), (0, 48), (-48, -64)]
CAUSAL = spec_path("causal")


def check_gradients(
    path: Path, case: Case, dropout_p: float = 0.0, deterministic: bool = False, **offsets: int
) -> None:
    """Run one problem and hold its gradients against the oracle."""
    call = example(path, case, dropout_p, offsets)
    run = call.judged_backward(deterministic=deterministic)
    assert run.dq.dtype == run.dk.dtype == run.dv.dtype == call.qkv[0].dtype


def turns(number: int) -> tuple[float, bool]:
    """Dropout and determinism, so that four kinds in a row meet all their combinations."""
    return (0.0, 0.17)[number % 2], bool(number // 2 % 2)


def with_rows(case: Case) -> Case:
    """A float32 case with a batch that gives it rows and keys enough, while that is affordable.

    The errors of a row are correlated: the RMS of a few rows depends on chance. The errors of the
    16-bit kernels are far below what is allowed.
    """
    if case.dtype != "float32":
        return case
    rows = case.heads_kv * min(case.seq_q, case.seq_k)
    whole_tiles = 256 * math.ceil(case.seq_q / 16) * math.ceil(case.seq_k / 16)
    affordable = MOST_SCORES // (case.heads_q * whole_tiles)
    return replace(case, batch=max(case.batch, min(math.ceil(ROWS / rows), affordable)))


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 128), (128, 8), (24, 72)])
def test_values_may_be_longer_or_shorter_than_keys(
    dtype: str, head_dim: int, head_dim_v: int, deterministic: bool
) -> None:
    case = Case(70, 113, 1, 2, 1, dtype, head_dim, head_dim_v)
    check_gradients(CAUSAL, case, 0.1, deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_offsets_shift_the_positions_that_mods_see(path: Path) -> None:
    q_offset, k_offset = OFFSETS[SPECS.index(path) % len(OFFSETS)]
    fixed = SPECS.index(path) % 2 == 0
    check_gradients(path, Case(113, 103), 0.1, fixed, q_offset=q_offset, k_offset=k_offset)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fully_masked_rows_and_keys_get_exactly_zero_from_buffers_of_nan(
    dtype: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_of_nan(plain: Any) -> Any:
        def make(*args: Any, **options: Any) -> torch.Tensor:
            made = plain(*args, **options)
            return made.fill_(math.nan) if made.is_floating_point() else made

        return make

    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(place, name, full_of_nan(getattr(place, name)))
    # The first 30 of 50 queries come before every key; the last keys come after every query.
    case = Case(50, 60, 1, 2, 1, dtype, 64)
    call = example(CAUSAL, case, offsets={"k_offset": 30})
    forward = call.forward()
    run = call.backward(forward, deterministic=deterministic)
    assert (forward.out[:, :, :30] == 0).all()
    assert (forward.lse[:, :, :30] == -math.inf).all()
    assert (run.dq[:, :, :30] == 0).all()
    assert (run.dk[:, :, 20:] == 0).all()
    assert (run.dv[:, :, 20:] == 0).all()
    for gradient in (run.dq, run.dk, run.dv):
        assert gradient.isfinite().all()
        assert (gradient != 0).any()


@pytest.mark.slow
def test_a_score_with_an_infinite_slope_outside_the_mask_does_no_harm() -> None:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + fg.log(score * score * (q - k + 1))  # undefined for k > q

    spec = fg.AttentionSpec(mask_mod=mask_mod, score_mod=score_mod, head_dim=64, dtype="float32")
    call = plain(spec, 40, 60)
    for deterministic in (False, True):
        call.judged_backward(call.forward(), deterministic=deterministic)


def gradients_in_order(order_seed: int, deterministic: bool) -> tuple[torch.Tensor, ...]:
    call = example(CAUSAL, Case(200, 200, 1, 2, 1, "float16", 16), 0.1, check_memory=False)
    run = call.backward(deterministic=deterministic, order_seed=order_seed)
    return run.dq, run.dk, run.dv


@pytest.mark.slow
@pytest.mark.parametrize("orders", [20])
def test_deterministic_gradients_are_the_same_bits_in_many_orders_of_blocks(orders: int) -> None:
    first = gradients_in_order(0, True)
    for seed in range(1, orders):
        again = gradients_in_order(seed, True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), seed


@pytest.mark.slow
def test_atomics_differ_between_orders_by_rounding_only_and_only_in_dq() -> None:
    first = gradients_in_order(0, False)
    for seed in (1, 2, 3):
        again = gradients_in_order(seed, False)
        torch.testing.assert_close(first[0], again[0], atol=2e-3, rtol=1e-3)
        assert torch.equal(first[1], again[1])
        assert torch.equal(first[2], again[2])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_gradients_meet_the_error_rule_at_every_head_dim(path: Path, head_dim: int) -> None:
    """A quarter of the lengths; all factors take turns, so that specs together meet all pairs."""
    turn = SPECS.index(path) + HEAD_DIMS.index(head_dim)
    for number, case in quarter_of_cases(turn, head_dim, 200_000):
        check_gradients(path, with_rows(case), *turns(number))
