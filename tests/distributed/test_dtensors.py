"""DTensors as operands, on processes of a gloo group, against one call on the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.ranks import returned_by, run_ranks

CASES = "tests.support.dtensor_cases"
COMPARED = (
    "divided_by_heads",
    "divided_by_batch",
    "parts_of_wholes",
    "paged_caches",
    "chosen_keys",
    "statistics",
    "torch_functions",
    "compiled_by_name",
)
OF_TWO = tuple(f"{CASES}:{case}" for case in (*COMPARED, "refused"))
REFUSED = {
    "sequence": "flashgen.distributed.attention(op, q.to_local()",
    "compiled sequence": "placements (Shard(dim=2),) of the mesh (2,)",
    "keys": "argument k",
    "sum": "placements (Partial(sum),)",
    "axes": "a call of DTensors is divided along the batch or the heads",
    "captured": "bias.redistribute(placements=(Shard(dim=0),))",
    "whole captured": "each rank reads the whole of bias: spec heads_both computes with h",
    "captured by dropout": "bias: dropout counts batch entries and heads as in the whole",
    "few key heads": "each head of k and v 2 times before they are sharded",
    "odd heads": "a mesh of ranks that divide the heads",
    "plain captured": "bias=distribute_tensor(bias, q.device_mesh",
    "plain operand": "v is an ordinary tensor beside DTensors",
    "plain queries": "q=distribute_tensor(q, ids.device_mesh, [Replicate()] * ids.device_mesh",
    "compiled plain queries": "q is an ordinary tensor beside DTensors",
    "no rng": "rng=distribute_tensor(torch.randint(2**63 - 1, (2,), device=q.device)",
    "own rng": "rng is an ordinary tensor beside DTensors",
    "entry": "the spec computes with b, the number of an entry",
    "lists": "cannot compute some heads of a whole whose queries choose their keys",
    "packed": "packed sequences are one batch entry",
    "dropped entries": "dropout would need the number of the first batch entry of a rank",
}


Returned = Callable[[str], list[Any]]


@pytest.fixture
def returned(of_two: Returned) -> Returned:
    return lambda case: of_two(f"{CASES}:{case}")


@pytest.mark.parametrize("case", COMPARED)
def test_the_ranks_compute_what_one_call_computes(case: str, returned: Returned) -> None:
    returned(case)


@pytest.mark.parametrize("what", REFUSED)
def test_what_ranks_cannot_compute_by_themselves_is_refused(what: str, returned: Returned) -> None:
    for messages in returned("refused"):
        assert REFUSED[what] in messages[what]
        assert len(messages[what].splitlines()) == 4


@pytest.mark.slow
def test_a_mesh_of_two_dimensions_divides_batch_and_heads() -> None:
    case = f"{CASES}:divided_by_two_dimensions"
    returned_by(run_ranks(4, [case]), case)


@functools.cache
def slow_group() -> list[dict[str, tuple[Any, str]]]:
    return run_ranks(2, [f"{CASES}:programs_of_the_rank", f"{CASES}:emulated"])


@pytest.mark.slow
def test_a_program_of_a_rank_is_not_cached_for_others() -> None:
    assert returned_by(slow_group(), f"{CASES}:programs_of_the_rank") == [0, 0]


@pytest.mark.slow
def test_kernels_of_both_code_paths_compute_the_parts() -> None:
    returned_by(slow_group(), f"{CASES}:emulated")
