"""Calls whose queries choose their keys compute what was listed, padded to tiles."""

from __future__ import annotations

import pytest

from benchmarks.chosen_keys import ARCHS, CHOICES, counted, lines
from tests.support.tiers import slow


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        (choice.name, arch) if (choice.name, arch) == ("nsa", "sm_90a") else slow(choice.name, arch)
        for choice in CHOICES
        for arch in ARCHS
        if choice.name != "dsa"
    ],
)
def test_computed_scores_are_the_listed_ones_padded_to_tiles(name: str, arch: str) -> None:
    choice = next(each for each in CHOICES if each.name == name)
    listed, padded, computed, excess = counted(choice, arch)
    assert listed <= padded == computed
    if choice.block_k >= 16:  # rows of single keys lie apart
        assert excess == 0


def test_the_tables_have_a_line_for_each_call_and_path() -> None:
    choices = tuple(each for each in CHOICES if each.name == "nsa_groups_of_4")
    found = list(lines(("sm_90a",), choices))
    assert sum("nsa_groups_of_4" in line for line in found) == 2
