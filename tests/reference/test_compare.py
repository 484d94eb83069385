"""The error rule, on results made to break each part of it."""

from __future__ import annotations

import math

import pytest
import torch

from flashgen.reference import compare
from flashgen.shared.errors import InputError


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)


EXACT = normal(2, 3, 50, 8)
NOISE = normal(2, 3, 50, 8).flip(0) * 1e-2


def test_the_ordinary_computation_itself_passes():
    verdict = compare(EXACT + NOISE, EXACT, EXACT + NOISE)
    assert verdict.ok
    assert bool(verdict)
    assert verdict.max_error == pytest.approx(float(NOISE.abs().max()))
    assert verdict.max_allowed == pytest.approx(2 * float(NOISE.abs().max()) + 1e-5)
    assert verdict.rms_allowed == pytest.approx(1.2 * float(NOISE.square().mean().sqrt()))


def test_one_element_beyond_twice_the_error_fails():
    out = EXACT + NOISE
    out[0, 0, 0, 0] = EXACT[0, 0, 0, 0] + 2.01 * NOISE.abs().max() + 1e-5
    verdict = compare(out, EXACT, EXACT + NOISE)
    assert not verdict.ok
    assert verdict.max_error > verdict.max_allowed
    assert verdict.rms_error < verdict.rms_allowed
    assert "FAIL" in str(verdict)
    assert compare(out, EXACT, EXACT + NOISE, factor=3).ok


def test_a_larger_error_everywhere_fails_by_its_rms():
    verdict = compare(EXACT + 1.3 * NOISE, EXACT, EXACT + NOISE)
    assert not verdict.ok
    assert verdict.max_error < verdict.max_allowed


def test_nan_fails():
    out = EXACT + NOISE
    out[1, 2, 3, 4] = math.nan
    verdict = compare(out, EXACT, EXACT + NOISE)
    assert not verdict.ok
    assert verdict.nans == 1
    assert "1 NaN" in str(verdict)


def test_minus_infinity_must_be_where_the_oracle_has_it():
    exact = EXACT.clone()
    exact[:, :, :3] = -math.inf
    good = exact + NOISE
    assert compare(good, exact, good).ok
    for row, value in ((0, 0.0), (0, math.inf), (7, -math.inf)):
        out = good.clone()
        out[0, 0, row] = value
        verdict = compare(out, exact, good)
        assert not verdict.ok
        assert verdict.infinities == 8
        assert "8 infinities" in str(verdict)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_exact_yardstick_allows_rounding_once_and_no_more(dtype):
    eps = torch.finfo(dtype).eps
    once = compare(EXACT.to(dtype), EXACT, EXACT)
    assert 0 < once.rms_error <= once.rms_allowed
    beyond = compare((EXACT * (1 + 2 * eps)).to(dtype), EXACT, EXACT)
    assert beyond.rms_error > beyond.rms_allowed


def test_nothing_to_compare_is_not_an_error():
    empty = EXACT[:, :, :0]
    assert compare(empty, empty, empty).ok


def test_shapes_that_differ_are_refused_and_not_broadcast():
    with pytest.raises(InputError, match="one shape") as caught:
        compare(EXACT[:1], EXACT, EXACT)
    assert "(1, 3, 50, 8)" in caught.value.numbers
