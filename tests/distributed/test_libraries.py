"""Context parallelism beside FSDP2, tensor parallel heads and models of transformers; models of
transformers that are divided by other libraries.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import returned_by, run_ranks

pytestmark = pytest.mark.slow

MESH, MODELS = "tests.support.mesh_cases", "tests.support.parallel_models"
SHARDED = "tests.support.sharded_models"

# Executed by one group of processes for each number of ranks: their imports take seconds.
COMPARED = (
    f"{MESH}:fsdp_over_cp",
    f"{MESH}:fsdp_over_dp_alone",
    f"{MESH}:ddp",
    f"{MESH}:tensor_parallel_heads",
    f"{MESH}:buffers_of_torch",
    f"{MODELS}:a_causal_model",
    f"{MODELS}:windows_and_sinks",
    f"{MODELS}:packed_sequences",
)
OTHERS = (f"{MESH}:learned_gradients_once", f"{MODELS}:what_is_refused")
MORE_MODELS = (
    f"{MODELS}:windows_and_softcaps",
    f"{MODELS}:packed_sequences_in_two_chunks",
    f"{MODELS}:fsdp_and_sinks",
    f"{MODELS}:dropped",
)
OF_TWO_RANKS = (f"{MODELS}:heads_exchanged", f"{MODELS}:compiled")
GROUPS = {
    (2, False): (*COMPARED, *OTHERS),
    (4, False): COMPARED,
    (2, True): (*MORE_MODELS, *OF_TWO_RANKS),
    (4, True): MORE_MODELS,
}

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
    "context of torch": "exchanges keys for scaled_dot_product_attention alone",
    "rope": "rope_type 'dynamic'",
    "encoder": "a decoder would attend to a part of its encoder",
    "state": "linear_attention; known: full_attention",
    "images": "block_sequence_ids (2, 64)",
    "packed": "the model's mask does not keep packed sequences apart",
    "chunks": "left_padding (2,)",
    "chunks without padding": "nothing is refused",
}

_done: dict[tuple[int, bool], list[dict[str, tuple[Any, str]]]] = {}


def returned(world: int, case: str) -> list[Any]:
    """What each rank returned; fails with the traceback of a rank."""
    group = world, case in (*MORE_MODELS, *OF_TWO_RANKS)
    if group not in _done:
        _done[group] = run_ranks(world, GROUPS[group])
    return returned_by(_done[group], case)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", COMPARED)
def test_the_ranks_have_the_losses_and_gradients_of_one_process(case: str, world: int) -> None:
    assert max(returned(world, case)) <= (1e-5 if case.startswith(MESH) else 1e-4)


@pytest.mark.parametrize(
    ("case", "world"),
    [*((case, world) for world in (2, 4) for case in MORE_MODELS), (OF_TWO_RANKS[0], 2)],
)
def test_other_models_have_the_losses_and_gradients_of_one_process(case: str, world: int) -> None:
    assert max(returned(world, case)) <= 1e-4


@pytest.mark.parametrize(
    ("world", "cases"), [(2, ("tensor_parallel", "fsdp", "generated")), (4, ("both",))]
)
def test_models_with_sharded_parameters_compute_what_one_process_does(
    world: int, cases: tuple[str, ...]
) -> None:
    names = [f"{SHARDED}:{case}" for case in cases]
    ranks = run_ranks(world, names)
    for name in names:
        assert max(returned_by(ranks, name)) <= 1e-5


def test_compiled_models_compute_the_same() -> None:
    for one, parts, compiled in returned(2, f"{MODELS}:compiled"):
        assert parts == pytest.approx(one, rel=1e-5)
        assert compiled == pytest.approx(one, rel=1e-5)


def test_learned_tensors_have_the_gradients_that_their_ranks_make() -> None:
    assert max(returned(2, f"{MESH}:learned_gradients_once")) <= 1e-5


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_part_of_a_sequence_cannot_be_computed_with_is_refused(what: str) -> None:
    for messages in returned(2, f"{MODELS}:what_is_refused"):
        assert messages.keys() == REFUSED.keys()
        assert REFUSED[what] in messages[what]
        if what != "chunks without padding":
            assert len(messages[what].splitlines()) == 4
