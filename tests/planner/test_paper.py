"""``policy="paper"``: Algorithm 1's block sizes, and each step from them to what can run."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.shared.arch import facts, known_archs
from tests.support.plan_problems import DTYPES, plan_of

KIB = 1024

# By hand: M elements, d -> Bc = ceil(M / 4d), Br = min(Bc, d).
BY_HAND = [
    (83_456, 64, 326, 64),
    (83_456, 128, 163, 128),
    (83_456, 256, 82, 82),
    (24_576, 64, 96, 64),
    (24_576, 40, 154, 40),
    (25_000, 96, 66, 66),
    (8_192, 128, 16, 16),
]


@pytest.mark.parametrize(("elements", "head_dim", "bc", "br"), BY_HAND)
def test_block_sizes_are_the_paper_s(elements, head_dim, bc, br):
    text = str(plan_of(head_dim, sram=2 * elements, policy="paper"))
    assert f"M = {2 * elements:,} B = {elements:,} elements of 2 B" in text
    assert f"Bc = ceil(M/4d) = ceil({elements}/(4*{head_dim})) = {bc}" in text
    assert f"Br = min(Bc, d) = {br}" in " ".join(text.split())


def test_the_paper_counts_elements_so_float32_has_half_as_many():
    text = str(plan_of(64, "float32", policy="paper"))
    assert "M = 166,912 B = 41,728 elements of 4 B" in text
    assert "= 163; Br = min(Bc, d) = 64" in text


def test_block_sizes_that_the_kernel_supports_are_unchanged():
    exact = plan_of(64, sram=2 * 4 * 64 * 64, policy="paper")  # Bc = 64, Br = 64
    assert (exact.block_q, exact.block_k) == (64, 64)
    assert not [note for note in exact.notes if "->" in note]


def test_every_rounding_and_clamping_is_explained():
    rounded = plan_of(40, sram=2 * 16_000, policy="paper")  # Bc = 100, Br = 40
    assert rounded.block_q == 32
    assert rounded.block_k == 96
    notes = "\n".join(rounded.notes)
    assert "Br 40 -> block_q 32: 16 or 32 rows for each of 1, 2, 4 or 8 warps" in notes
    assert "Bc 100 -> block_k 96: a step has a multiple of 16 keys" in notes
    clamped = plan_of(64, policy="paper")  # Bc = 326
    assert clamped.block_k == 128
    assert "Bc 326 -> block_k 128: the main loop is unrolled over at most 128 keys" in "\n".join(
        clamped.notes
    )


def test_a_tile_that_does_not_fit_is_shrunk_and_the_reason_given():
    shrunk = plan_of(256, "float32", "sm_90", policy="paper", head_dim_v=8)
    notes = [note for note in shrunk.notes if note.startswith("paper  block_q")]
    for note in notes:
        assert f"-> {shrunk.block_q}, {shrunk.block_k}: " in note
    assert shrunk.smem_bytes <= facts("sm_90").smem_per_block
    tight = plan_of(8, sram=1_100, policy="paper")
    assert tight.block_q == 16
    assert "Br 8 -> block_q 16: an mma has 16 rows" in "\n".join(tight.notes)


def test_the_paper_s_tile_is_never_better_than_the_derived_one():
    for head_dim in (32, 64, 128, 256):
        for dtype in DTYPES:
            derived, paper = plan_of(head_dim, dtype), plan_of(head_dim, dtype, policy="paper")
            assert derived.cost <= paper.cost
            assert paper.policy == "paper"
            assert derived.policy == "derived"


def test_it_is_feasible_wherever_any_tile_is():
    for arch in known_archs():
        for dtype in DTYPES:
            for head_dim in range(8, 257, 8):
                each = plan_of(head_dim, dtype, arch, policy="paper")
                assert each.smem_bytes <= facts(arch).smem_per_block
                assert each.registers_needed <= each.registers
    with pytest.raises(fg.PlanError, match="no tile fits"):
        plan_of(64, policy="paper", sram=1_000)
    for sram in range(6_144, 30 * KIB, 1_024):
        assert plan_of(64, policy="paper", sram=sram).smem_bytes <= sram
