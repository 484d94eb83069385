"""The example of queries that choose their keys: NSA and DSA beside eager attention."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch

from tests.support.paths import ROOT
from tests.support.processes import run_python

FOLDER = ROOT / "examples"
EXAMPLE = "chosen_keys"


@pytest.mark.parametrize("name", ["NSA", "DSA"])
def test_losses_and_first_gradients_are_those_of_eager_attention(
    example: ModuleType, name: str
) -> None:
    found = example.compare(name, 3)
    assert found.loss_difference <= example.BOUND / 10
    assert found.gradient_difference <= example.BOUND / 10
    assert found.other_choices < 0.01
    assert found.losses == sorted(found.losses, reverse=True)
    assert (found.layer_losses[0] > 0) == (name == "DSA")


def test_a_query_sees_the_first_block_its_own_and_those_of_most_mass(example: ModuleType) -> None:
    torch.manual_seed(0)
    queries, blocks = 64, 8
    mass = torch.rand(2, example.HEADS, queries, blocks)
    chosen = example.chosen_blocks(mass)
    assert chosen.shape == (2, example.KV_HEADS, queries, example.BLOCKS)
    of_group = mass.unflatten(1, (example.KV_HEADS, -1)).sum(2)
    for query in (0, 9, 30, 63):
        own = query // example.BLOCK
        between = range(1, own)
        for entry, head in ((0, 0), (1, 1)):
            row = of_group[entry, head, query]
            best = sorted(between, key=lambda block, row=row: -row[block])
            wanted = {0, own, *best[: example.BLOCKS - 2]}
            assert set(chosen[entry, head, query].tolist()) - {-1} == wanted


def test_the_indexer_learns_the_weights_of_the_chosen_keys(example: ModuleType) -> None:
    torch.manual_seed(0)
    index = torch.randn(1, 3, 20)
    keys = torch.tensor([[[4, -1], [3, 17], [9, 2]]], dtype=torch.int32)
    mass = torch.zeros(1, 2, 3, 20)
    for query, row in enumerate(keys[0].tolist()):
        kept = [key for key in row if key >= 0]
        mass[0, :, query, kept] = index[0, query, kept].softmax(0)
    torch.testing.assert_close(example.indexer_loss(index, mass, keys), torch.zeros(()))
    other = example.indexer_loss(index + torch.arange(20), mass, keys)
    assert other > 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_passes_as_a_user_runs_it() -> None:
    done = run_python(FOLDER / "chosen_keys.py")
    assert re.search(r"allowed differences 1e-04: pass", done.stdout), done.stdout
    rows = re.findall(r"^(NSA|DSA) +(\S+) +(\S+)", done.stdout, re.M)
    assert [name for name, *_ in rows] == ["NSA", "DSA"]
    assert all(float(last) < float(first) - 1 for _, first, last in rows)
