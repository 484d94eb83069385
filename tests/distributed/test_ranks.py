"""Context parallelism on processes of a gloo group, against one call on the whole sequence."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import returned_by, run_ranks, run_ranks_once
from tests.support.tiers import slow

CASES = "tests.support.distributed_cases"
REFUSED = "tests.support.mesh_cases:what_is_refused"
WORLDS = [2, slow(4), slow(8)]

# Two ranks execute all of them in one group of processes, whose imports take seconds. More ranks
# have a group for each tuple, which takes a minute of CPU time for all that are compared.
COMPARED = (
    "gathers_and_rings",
    "rows_and_numbers_are_those_of_the_whole",
    "heads_are_exchanged",
    "weights_are_added_up",
    "any_list_of_chunks",
    "the_same_elements_are_dropped",
    "the_whole_is_seen",
    "some_heads_of_a_whole",
    "positions_begin_later",
    "sums_have_a_fixed_order",
    "layouts_are_given",
    "packed_sequences",
    "halves_are_rounded_once",
    "documents_are_sharded",
    "gathered_chunks_are_equal_bits",
    "the_example_learns",
)
OTHERS = (
    *("sent_chunks", "ranks_that_disagree", "different_specs", "wrong_calls"),
    *("peak_of_a_ring", "peak_of_a_gather", "a_failing_step", "derivatives_beyond_the_first"),
)
LAST = f"{CASES}:a_rank_that_ends"  # after which the group is one rank short
OF_TWO = (*(f"{CASES}:{x}" for x in (*COMPARED, *OTHERS, "a_compiled_call")), REFUSED, LAST)

Returned = Callable[[int, str], list[Any]]


@pytest.fixture
def returned(folder_of_run: Path, of_two: Callable[[str], list[Any]]) -> Returned:
    """What each rank of a group returned for a case; fails with the traceback of a rank."""

    def of(world: int, case: str) -> list[Any]:
        name = case if ":" in case else f"{CASES}:{case}"
        if world == 2:
            return of_two(name)
        group = COMPARED if case in COMPARED else OTHERS
        ranks = run_ranks_once(folder_of_run, world, [f"{CASES}:{each}" for each in group])
        return returned_by(ranks, name)

    return of


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", COMPARED)
def test_the_ranks_compute_what_one_call_computes(
    returned: Returned, case: str, world: int
) -> None:
    returned(world, case)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_spec_agrees_with_one_call(world: int) -> None:
    case = f"{CASES}:every_spec"
    assert min(returned_by(run_ranks(world, [case]), case)) > 30


@pytest.mark.parametrize("world", WORLDS)
def test_a_window_ends_the_ring_early(returned: Returned, world: int) -> None:
    """A window of 40 reaches the chunk of 64 positions before: keys travel one step."""
    chunk = 2 * (2 * 2 * 64 * 16) * 4  # K and V: batch, heads, rows, head dim, bytes
    for rank, sent in enumerate(returned(world, "sent_chunks")):
        assert len(sent) == world
        reached = rank < world - 1
        assert [count for _, count in sent] == [chunk if reached else 0] + [0] * (world - 1)


@pytest.mark.parametrize("world", WORLDS)
def test_the_memory_of_a_ring_does_not_grow_with_the_ranks(returned: Returned, world: int) -> None:
    """Beside its own, a rank holds the keys of three ranks: computed, travelling and arriving."""
    assert max(returned(world, "peak_of_a_ring")) <= 3


@pytest.mark.parametrize("world", WORLDS)
def test_a_gather_holds_the_keys_that_its_queries_reach(returned: Returned, world: int) -> None:
    """A window of 40 reaches the two chunks of 32 before each of a rank's two, if there are."""
    chunks = [(rank, 2 * world - 1 - rank) for rank in range(world)]
    for own, held in zip(chunks, returned(world, "peak_of_a_gather"), strict=True):
        reached = {n - back for n in own for back in (1, 2) if n >= back} - set(own)
        assert held == len(reached) / 2


def test_dtensors_and_meshes_of_two_dimensions_are_refused(returned: Returned) -> None:
    for messages in returned(2, REFUSED):
        first, second, third, mesh = messages
        assert "argument q of flashgen.distributed.attention" in first
        assert "placements (Shard(dim=2),) of the mesh ('cp',)" in first
        assert "q.to_local()" in first
        assert "v.to_local()" in second
        assert "of the mesh (2,)" in second
        assert "table.to_local()" in third
        assert "a mesh has one dimension here" in mesh
        assert 'mesh["cp"]' in mesh


def test_ranks_that_disagree_are_refused_before_anything_is_computed(returned: Returned) -> None:
    for first, _, _ in returned(2, "ranks_that_disagree"):
        message = str(first)
        assert "the ranks call with different arguments" in message
        assert "rank 0: rows of q and k 64, 64, heads 0 of 4, q (1, 4, divided, 16)" in message
        assert "rank 1: rows of q and k 48, 48, heads 0 of 2, q (1, 2, divided, 16)" in message


def test_ranks_with_unequal_rows_are_told_the_chunks_with_which_they_can_call(
    returned: Returned,
) -> None:
    for _, rows, advised in returned(2, "ranks_that_disagree"):
        assert rows.what == "the ranks call with different arguments: rows of q and k"
        assert rows.where == "argument shard of flashgen.distributed.attention"
        assert rows.way_out == "shard=[[range(0, 64)], [range(64, 112)]]"
        assert advised is None


@pytest.mark.parametrize("world", WORLDS)
def test_no_rank_waits_for_one_that_refuses_its_arguments(returned: Returned, world: int) -> None:
    """Every rank has an error of its own in each call, and the group can be used afterwards."""
    for rank, messages in enumerate(returned(world, "wrong_calls")):
        assert not messages.pop("warm")
        assert not messages.pop("good")
        assert ("has no such group" in messages.pop("member")) == (rank > 0)
        for name, message in messages.items():
            assert message.startswith(("InputError", "PlanError")), (
                f"rank {rank}, {name}: {message}"
            )
            assert len(message.splitlines()) >= 4
        others = "another rank has refused its arguments"
        alone = ("scale", "dtype", "stride", "list", "name", "length")
        for name in ("uneven", *(f"one {what}" for what in alone)):
            refused = rank > 0 if name == "uneven" else rank == world - 1
            assert (others in messages[name]) == (not refused), f"rank {rank}, {name}"
        assert "different arguments: deterministic" in messages["one switch"]
        assert "needs a gradient" in messages["one gradient"]
        contents = {"one layout": "layout", "one end": "cu_seqlens_q", "one document": "ids"}
        for name, argument in contents.items():  # they decide which keys travel
            assert f"different arguments: {argument}" in messages[name]


def test_an_error_of_all_ranks_in_a_step_leaves_no_transfer_behind(returned: Returned) -> None:
    for messages in returned(2, "a_failing_step"):
        assert [message.splitlines()[0] for message in messages] == ["no kernel"] * 2


def test_ranks_with_different_specs_are_told_what_differs(returned: Returned) -> None:
    for messages in returned(2, "different_specs"):
        mask, score, scale, layout = messages
        assert "the ranks have different specs: mask_mod\n" in mask
        assert "rank 0: mask_mod k <= q" in mask
        assert "rank 1: mask_mod (k <= q) & (q - k < 5)" in mask
        assert "different specs: score_mod, tensors" in score
        assert "bias[h]" in score
        assert "different specs: scale, dropout" in scale
        assert "scale 1.0, dropout False" in scale
        assert "different specs: block_sparse" in layout


def test_torch_compile_breaks_once_at_a_call(returned: Returned) -> None:
    for same, graphs, reasons, error in returned(2, "a_compiled_call"):
        assert same
        assert graphs == 2
        assert len(reasons) == 1
        for text in (reasons[0], error):
            assert "flashgen.distributed.attention exchanges tensors" in text


def test_forward_mode_and_second_derivatives_are_refused_by_every_method(
    returned: Returned,
) -> None:
    for messages in returned(2, "derivatives_beyond_the_first"):
        assert len(messages) == 6
        assert all("first derivatives in reverse mode alone" in each for each in messages)


def test_no_rank_outlives_a_test_that_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Started(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            started.append(self)
            if len(started) == 1:  # as pytest-timeout does
                pytest.fail("Timeout")
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Started)
    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        run_ranks(2, ["time:sleep"])
    with pytest.raises(ProcessLookupError):
        os.killpg(started[0].pid, 0)


def test_a_rank_that_ends_is_named_to_the_others(returned: Returned) -> None:
    (message,) = returned(2, LAST)
    assert "a transfer of rank 0 of 2 failed" in message
    assert "rank 1" in message
    assert "of the ring" in message
