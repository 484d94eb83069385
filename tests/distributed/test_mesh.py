"""Context parallelism on a dimension of a DeviceMesh, beside FSDP2 and tensor parallel heads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiers import slow

CASES = "tests.support.mesh_cases"

COMPARED = (
    "fsdp_over_cp",
    "fsdp_over_dp_alone",
    "tensor_parallel_heads",
    "buffers_of_torch",
)
TOGETHER = (*COMPARED, "what_is_refused", "learned_gradients_once")

_done: dict[int, list[dict[str, tuple[Any, str]]]] = {}


def returned(world: int, case: str) -> list[Any]:
    """What each rank returned; fails with the traceback of a rank."""
    if world not in _done:
        _done[world] = run_ranks(world, [f"{CASES}:{name}" for name in TOGETHER])
    results = [rank[f"{CASES}:{case}"] for rank in _done[world]]
    for number, (_, error) in enumerate(results):
        assert not error, f"rank {number}: {error}"
    return [value for value, _ in results]


@pytest.mark.parametrize("world", [2, slow(4)])
@pytest.mark.parametrize("case", COMPARED)
def test_the_ranks_have_the_losses_and_gradients_of_one_process(case: str, world: int) -> None:
    assert max(map(max, returned(world, case))) <= 1e-5


def test_learned_tensors_have_the_gradients_that_their_ranks_make() -> None:
    assert max(returned(2, "learned_gradients_once")) <= 1e-5


def test_dtensors_and_meshes_of_two_dimensions_are_refused() -> None:
    for messages in returned(2, "what_is_refused"):
        first, second, third, mesh = messages
        assert "argument q of flashgen.distributed.attention" in first
        assert "placements (Shard(dim=2),) of the mesh ('cp',)" in first
        assert "q.to_local()" in first
        assert "v.to_local()" in second
        assert "table.to_local()" in third
        assert "a mesh has one dimension here" in mesh
        assert 'mesh["cp"]' in mesh
