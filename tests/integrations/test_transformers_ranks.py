"""Models of transformers whose sequences lie on several ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiers import slow

CASES = "tests.support.parallel_models"

FAST = ("a_causal_model", "windows_and_sinks", "packed_sequences")
SLOW = (
    "windows_and_softcaps",
    "packed_sequences_in_two_chunks",
    "heads_exchanged",
    "fsdp_and_sinks",
    "dropped",
    "compiled",
)
COMPARED = [(2, case) for case in FAST] + [
    slow(world, case)
    for world in (2, 4)
    for case in (*FAST, *SLOW)
    if case != "compiled" and (world, case) not in [(2, each) for each in FAST]
    if (world, case) != (4, "heads_exchanged")  # of two key heads
]

REFUSED = {
    "method": "'rings'; available: all_gather, ring, all_to_all",
    "shard": "'tail'; available: contiguous, head_tail",
    "length": "try      128 positions, the last ones padding",
    "batches": "the ranks of a group have different batches",
    "names": "argument pixel_values",
    "shape": "(2, 127); input_ids have (2, 128)",
    "no mask": "no attention_mask",
    "whole": "attention_mask (2, 128); the rank owns 64 positions",
    "cache": "1 queries and 64 keys of 64 positions",
    "tensor": "a layer has no mask of all positions",
    "none": "a layer has no mask of all positions",
    "bias": "argument position_bias of the attention function",
    "added": "argument attention_mask of the attention function",
    "rope": "rope_type 'dynamic'",
    "encoder": "a decoder would attend to a part of its encoder",
    "state": "linear_attention; known: full_attention",
    "images": "block_sequence_ids (2, 64)",
    "chunks": "left_padding (2,)",
    "chunks without padding": "nothing is refused",
}

_done: dict[Any, list[dict[str, tuple[Any, str]]]] = {}


def returned(world: int, case: str) -> list[Any]:
    """What each rank returned; fails with the traceback of a rank."""
    together = (*FAST, "what_is_refused") if case in (*FAST, "what_is_refused") else SLOW
    if (world, together) not in _done:
        cases = [f"{CASES}:{name}" for name in together if (world, name) != (4, "heads_exchanged")]
        _done[world, together] = run_ranks(world, cases, 240)
    results = [rank[f"{CASES}:{case}"] for rank in _done[world, together]]
    for number, (_, error) in enumerate(results):
        assert not error, f"rank {number}: {error}"
    return [value for value, _ in results]


@pytest.mark.parametrize(("world", "case"), COMPARED)
def test_the_ranks_have_the_loss_and_the_gradients_of_one_process(world: int, case: str) -> None:
    assert max(returned(world, case)) <= 1e-4


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_part_cannot_be_computed_with_is_refused(what: str) -> None:
    for messages in returned(2, "what_is_refused"):
        assert messages.keys() == REFUSED.keys()
        assert REFUSED[what] in messages[what]
        if what != "chunks without padding":
            assert len(messages[what].splitlines()) == 4


@pytest.mark.slow
def test_compiled_models_compute_the_same() -> None:
    for one, parts, compiled in returned(2, "compiled"):
        assert parts == pytest.approx(one, rel=1e-5)
        assert compiled == pytest.approx(one, rel=1e-5)
