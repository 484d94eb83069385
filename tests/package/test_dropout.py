"""The bits of dropout: Philox's known answers, a mask without seams, and no bias or pattern."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.shared.dropout import LEVELS, keep_mask, keep_scale, kept_levels, philox
from flashgen.shared.errors import InputError

PROBABILITIES = (0.01, 0.1, 0.17, 0.5)
SEED, OFFSET = -0x123456789ABCDEF, 0x1_0000_0007
PAIRS = np.array([0, 1, 5, 2**31, 2**32 - 1])
WHOLE = keep_mask(0.3, SEED, OFFSET, PAIRS, range(0, 150), range(0, 170))
FAR = 2**31 - 40
FAR_ROWS = keep_mask(0.3, SEED, OFFSET, PAIRS[:2], range(FAR, FAR + 40), range(0, 40))
FAR_KEYS = keep_mask(0.3, SEED, OFFSET, PAIRS[:2], range(0, 40), range(FAR, FAR + 40))


def mask(p=0.5, seed=1, offset=0, pairs=1, rows=256, keys=256) -> np.ndarray:
    return keep_mask(p, seed, offset, np.arange(pairs), range(rows), range(keys))


def word(number: int) -> np.ndarray:
    return np.array(number, dtype=np.uint64)


def philox_in_integers(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-7 as the paper's figure has it, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def kept_by_definition(p: float, pair: int, row: int, key: int) -> bool:
    """One element, from the sentences of flashgen/shared/dropout.py."""
    block_row, row_inside = divmod(row, 16)
    block_key, key_inside = divmod(key, 16)
    counter = [block_row * 8 + row_inside % 8, block_key * 4 + key_inside % 8 // 2, pair, OFFSET]
    seed = SEED % 2**64
    words = philox_in_integers([c % 2**32 for c in counter], [seed % 2**32, seed >> 32])
    bits = words[2 * (row_inside // 8) + key_inside // 8] >> 16 * (key_inside % 2) & 0xFFFF
    return bits < round((1 - p) * 65536)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        # Random123's kat_vectors for philox4x32 with 7 rounds.
        ([0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ],
)
def test_philox_gives_the_known_answers(counter, key, answer):
    expected = [int(text, 16) for text in answer.split()]
    assert philox(tuple(map(word, counter)), tuple(key)).tolist() == expected
    assert philox_in_integers(counter, key) == expected


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_philox_in_arrays_is_philox_in_integers(numbers):
    counter, key = numbers[:4], numbers[4:]
    found = philox(tuple(map(word, counter)), (key[0], key[1]))
    assert found.dtype == np.uint32
    assert found.tolist() == philox_in_integers(counter, key)


@given(st.sampled_from(range(5)), st.integers(0, 149), st.integers(0, 169))
def test_every_element_has_the_half_word_that_the_definition_gives_it(pair, row, key):
    assert WHOLE[pair, row, key] == kept_by_definition(0.3, int(PAIRS[pair]), row, key)


def test_positions_up_to_2_to_the_31_have_the_bits_of_the_definition():
    for row, key in [(0, 0), (7, 33), (39, 39)]:
        assert FAR_ROWS[1, row, key] == kept_by_definition(0.3, 1, FAR + row, key)
        assert FAR_KEYS[1, row, key] == kept_by_definition(0.3, 1, row, FAR + key)


@st.composite
def parts(draw):
    def some(most: int) -> range:
        first = draw(st.integers(0, most))
        return range(first, draw(st.integers(first, most)))

    return draw(st.lists(st.sampled_from(range(5)), max_size=4)), some(150), some(170)


@given(parts())
def test_the_mask_is_the_same_whatever_part_of_it_is_asked_for(part):
    pairs, rows, keys = part
    found = keep_mask(0.3, SEED, OFFSET, PAIRS[pairs], rows, keys)
    expected = WHOLE[pairs, rows.start : rows.stop, keys.start : keys.stop]
    assert found.dtype == bool
    assert found.shape == (len(pairs), len(rows), len(keys))
    assert (found == expected).all()


@given(st.floats(0, 0.9999), st.floats(0, 0.9999))
def test_a_higher_probability_drops_the_same_elements_and_more(one, other):
    low, high = sorted((one, other))
    kept_low, kept_high = mask(low, rows=32, keys=32), mask(high, rows=32, keys=32)
    assert not (kept_high & ~kept_low).any()


@pytest.mark.parametrize("p", [*PROBABILITIES, 2.0**-16, 1 - 2.0**-16])
def test_the_dropped_fraction_is_within_4_sigma_of_p(p):
    kept = mask(p, seed=42, offset=7, pairs=4, rows=1024, keys=1024)
    exact = 1 - kept_levels(p) / LEVELS
    assert abs(exact - p) <= 0.5 / LEVELS
    sigma = math.sqrt(exact * (1 - exact) / kept.size)
    assert abs((~kept).mean() - exact) < 4 * sigma
    assert abs((~kept).mean() - p) < 4 * sigma


@pytest.mark.parametrize("p", PROBABILITIES)
def test_each_place_of_a_block_drops_as_often_as_the_others(p):
    # Each element of a 16 x 16 block is other bits of Philox's output: 128 * 128 samples of each.
    kept = mask(p, seed=3, pairs=1, rows=2048, keys=2048)
    places = (~kept[0]).reshape(128, 16, 128, 16).mean(axis=(0, 2))
    exact = 1 - kept_levels(p) / LEVELS
    sigma = math.sqrt(exact * (1 - exact) / 128**2)
    # Chance of a normal number beyond 5 sigma, 256 times: 1.5e-4.
    assert np.abs(places - exact).max() < 5 * sigma
    assert places.std() > sigma / 2


def agreement_sigmas(one: np.ndarray, other: np.ndarray) -> float:
    """How far two masks of p = 1/2 are from agreeing in half of their elements, in sigmas.

    With fair, independent bits, agreements are binomial with probability 1/2.
    """
    return abs(float((one == other).mean()) - 0.5) / (0.5 / math.sqrt(one.size))


@pytest.mark.parametrize("step", [1, 2, 3, 7, 8, 9, 15, 16, 17, 32, 64, 128])
def test_neighbours_are_not_correlated(step):
    kept = mask(0.5, seed=11, offset=3, pairs=256, rows=160, keys=160)
    assert agreement_sigmas(kept[:, step:], kept[:, :-step]) < 4.5
    assert agreement_sigmas(kept[:, :, step:], kept[:, :, :-step]) < 4.5
    assert agreement_sigmas(kept[:, step:, step:], kept[:, :-step, :-step]) < 4.5
    assert agreement_sigmas(kept[:, step:, :-step], kept[:, :-step, step:]) < 4.5
    assert agreement_sigmas(kept[step:], kept[:-step]) < 4.5


def test_a_transposed_mask_is_another_mask():
    kept = mask(0.5, seed=5, pairs=64)
    off_diagonal = ~np.eye(256, dtype=bool)
    flipped = kept.transpose(0, 2, 1)
    # Every agreement off the diagonal is counted twice: twice the variance.
    sigmas = agreement_sigmas(kept[:, off_diagonal], flipped[:, off_diagonal])
    assert sigmas < 4.5 * math.sqrt(2)


def test_pairs_seeds_and_offsets_all_have_masks_of_their_own():
    pairs = mask(0.5, pairs=64, rows=32, keys=32)
    seeds = [mask(0.5, seed=s, rows=32, keys=32) for s in (0, 2, -1, 2**31, 2**32, 2**63 - 1)]
    offsets = [mask(0.5, offset=o, rows=32, keys=32) for o in (1, 2, 2**31, 2**32 - 1)]
    masks = np.concatenate([pairs, *seeds, *offsets])
    for place, one in enumerate(masks):
        for other in masks[:place]:
            # 1024 fair bits: 6 sigmas, 2775 comparisons, chance 5e-6.
            assert agreement_sigmas(one, other) < 6


def test_only_the_low_32_bits_of_the_offset_count_and_64_of_the_seed():
    assert (mask(offset=5) == mask(offset=5 + 2**32)).all()
    assert (mask(offset=-1) == mask(offset=2**32 - 1)).all()
    assert (mask(seed=-1) == mask(seed=2**64 - 1)).all()
    assert (mask(seed=1) != mask(seed=1 + 2**32)).any()


@given(st.floats(0, 1 - 2.0**-16))
def test_the_scale_undoes_the_kept_fraction_exactly(p):
    levels = kept_levels(p)
    assert 1 <= levels <= LEVELS
    kept = Fraction(levels, LEVELS)
    rounding = Fraction(1, 2**53)  # of 1 - p in float64
    assert abs(1 - Fraction(p) - kept) <= Fraction(1, 2 * LEVELS) + rounding
    # The only ratio with so small a denominator that float64 rounds to this scale.
    assert Fraction(keep_scale(p)).limit_denominator(LEVELS) * kept == 1
    assert abs(Fraction(keep_scale(p)) * kept - 1) <= rounding


def test_the_levels_of_known_probabilities():
    assert [kept_levels(p) for p in (0, 0.0, 0.5, 0.25, 0.1, 0.01)] == [
        65536,
        65536,
        32768,
        49152,
        58982,
        64881,
    ]
    assert (keep_scale(0.0), keep_scale(0.5), keep_scale(0.75)) == (1.0, 2.0, 4.0)
    assert mask(0.0).all()


@pytest.mark.parametrize(
    "p", [-0.1, 1.0, 1, 1.5, math.nan, math.inf, -math.inf, 1 - 2.0**-20, "0.1", None, True]
)
def test_what_is_no_probability_of_dropping_is_refused(p):
    for function in (kept_levels, keep_scale, mask):
        with pytest.raises(InputError, match="not a probability of dropping") as caught:
            function(p)
        assert repr(p) in caught.value.numbers
        assert caught.value.where == "argument dropout_p"
