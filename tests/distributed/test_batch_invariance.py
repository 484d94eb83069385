"""Batch-invariant attention under tensor parallelism, on processes of a gloo group."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.support.ranks import returned_by, run_ranks
from tests.support.tiers import slow

CASES = "tests.support.invariant_ranks"
OF_HEADS = ("on_the_cpu", "on_sm_80", "on_sm_90a")


@functools.cache
def group(world: int, cases: tuple[str, ...]) -> list[dict[str, tuple[Any, str]]]:
    return run_ranks(world, [f"{CASES}:{case}" for case in cases])


def returned(world: int, case: str, cases: tuple[str, ...]) -> list[Any]:
    return returned_by(group(world, cases), f"{CASES}:{case}")


@pytest.mark.parametrize("case", ["on_the_cpu", slow("on_sm_80"), slow("on_sm_90a")])
def test_heads_have_the_same_bits_on_1_2_and_4_ranks(case: str) -> None:
    cases = OF_HEADS[:1] if case == OF_HEADS[0] else OF_HEADS[1:]
    ranks = returned(4, case, cases)
    assert [list(found) for found in ranks] == [[1, 2, 4], [2, 4], [4], [4]]
    whole = ranks[0][1]
    for found in ranks:
        for world, results in found.items():
            assert results.keys() == whole.keys()
            for name, x in results.items():
                assert torch.equal(x, whole[name]), (world, name)
    assert torch.equal(whole["decoded"][:, :, 0], whole["trained"][:, :, -1])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_layers_of_a_tensor_parallel_model_have_the_heads_of_the_whole(world: int) -> None:
    pytest.importorskip("transformers")
    assert returned(world, "of_a_model", ("of_a_model",)) == [2] * world
