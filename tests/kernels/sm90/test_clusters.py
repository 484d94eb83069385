"""Clusters of two blocks, which copy the keys of both, in the forward kernel of wide heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flashgen as fg
from flashgen.calls.ops import ForwardRun
from flashgen.kernels.planner import Tile, is_unpaired, plan
from flashgen.shared.errors import PlanError
from flashgen.tools.profile.kernel_profile import Profile
from flashgen.tools.profile.run import profile_forward
from tests.support.examples import COVERING, spec_path
from tests.support.judged import Call, check_gates, equal, example
from tests.support.planted import planted
from tests.support.shapes import Case
from tests.support.tiers import slow

HOW = {"arch": "sm_90a"}
ORDERS = (None, 5)
SHARED = fg.AttentionSpec(
    lambda b, h, q, k: q >= k, head_dim=576, head_dim_v=512, shared_kv=True, dtype="bfloat16"
)


def tile_of(spec: fg.AttentionSpec, cluster: int) -> Tile:
    return replace(plan(spec, "sm_90a").tile, cluster=cluster)


def forward(call: Call, cluster: int, order: int | None = None) -> ForwardRun:
    tiles = {"forward": tile_of(call.spec, cluster)}
    run = call.judged_forward(tiles=tiles, order_seed=order)
    assert run.report.kernel is not None
    assert run.report.kernel.plan.cluster == cluster
    check_gates(run.report.kernel)
    return run


def has_the_bits_of_one_block(call: Call) -> None:
    alone = forward(call, 1)
    for order in ORDERS:
        assert equal(forward(call, 2, order), alone)


def wide(name: str, sizes: tuple[int, ...], dims: tuple[int, int] = (384, 384)) -> Call:
    """Sizes: queries, keys, batch entries, query heads, key heads."""
    case = Case(*sizes, "bfloat16", *dims)
    return example(spec_path(name), case, COVERING.get(name, 0.0), **HOW)


PAIRS = {
    "an odd number of tiles": (130, 140, 1, 1, 1),
    "an even number of tiles": (120, 170, 2, 2, 2),
    "two heads of a key head": (70, 100, 1, 4, 2),
    "three heads of a key head": (150, 100, 1, 6, 2),
    "one query": (1, 90, 1, 2, 2),
}


@pytest.mark.parametrize(
    "sizes", [next(iter(PAIRS.values())), *map(slow, list(PAIRS.values())[1:])]
)
def test_a_cluster_has_the_bits_of_single_blocks(sizes: tuple[int, ...]) -> None:
    has_the_bits_of_one_block(wide("causal", sizes))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(448, 448), (512, 512), (576, 512)])
def test_a_cluster_of_each_head_dim_has_the_bits_of_single_blocks(dims: tuple[int, int]) -> None:
    has_the_bits_of_one_block(wide("causal", (90, 130, 1, 2, 1), dims))
    has_the_bits_of_one_block(wide("full", (130, 100, 1, 2, 2), dims))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sliding_window", "softcap", "sink", "relative_bias", "sigmoid"])
def test_clusters_of_other_specs_have_the_bits_of_single_blocks(name: str) -> None:
    has_the_bits_of_one_block(wide(name, (150, 150, 1, 2, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "heads"), [(1, 128), (3, 64), (70, 1)])
def test_clusters_read_values_inside_keys(queries: int, heads: int) -> None:
    q, k, _ = Case(queries, 150, 1, heads, 1, "bfloat16", 576, 512).tensors(1)
    has_the_bits_of_one_block(Call(SHARED, (q, k, k[..., :512]), {"q_offset": 100}, **HOW))


# ---- what is read -------------------------------------------------------------------------------


def profiles(call: Call, cluster: int) -> Profile:
    tiles = {"forward": tile_of(call.spec, cluster)}
    (found,) = profile_forward(call.spec, *call.qkv, **call.numbers, **HOW, tiles=tiles)[1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(128, 128, 1, 1, 1), (128, 128, 1, 4, 2)])
def test_a_cluster_reads_half_of_the_keys_and_values(sizes: tuple[int, ...]) -> None:
    call = wide("full", sizes)
    one, two = ({each.name: each for each in profiles(call, n).tensors} for n in (1, 2))
    rows = plan(call.spec, "sm_90a", tile=tile_of(call.spec, 1)).block_q
    assert rows == 64
    for name in ("k", "v"):
        assert 2 * two[name].issued.counted == one[name].issued.counted
        assert 2 * two[name].sectors == one[name].sectors
    assert two["q"].issued.counted == one["q"].issued.counted


@pytest.mark.parametrize("name", ["causal", slow("sliding_window"), slow("full"), slow("sink")])
def test_what_a_cluster_reads_is_predicted(name: str) -> None:
    for sizes in list(PAIRS.values())[:4] if name == "causal" else [(150, 170, 1, 2, 2)]:
        for tensor in profiles(wide(name, sizes), 2).tensors:
            assert tensor.issued.counted == tensor.issued.predicted, (sizes, tensor.name)


# ---- planted bugs -------------------------------------------------------------------------------

BUGS = {
    "a block exits before the last arrival of the other": (
        "the other one.\n  cluster_sync();",
        "the other one.",
    ),
    "a barrier is used before the other block has made it": (
        '::: "memory");\n  }\n  cluster_sync();',
        '::: "memory");\n  }\n  __syncthreads();',
    ),
    "a block releases its own buffer alone": (
        "cluster.shared::cluster.b64 _, [other]",
        "cluster.shared::cta.b64 _, [%0]",
    ),
    "a block copies for itself alone": ("short(3)", "short(1 << cluster_rank())"),
    "a block copies for the other alone": ("short(3)", "short(2 >> cluster_rank())"),
    "both blocks copy the same half": ("const int rank = cluster_rank();", "const int rank = 0;"),
    "blocks walk the tiles of their own queries": ("BLOCK_Q : 2 * BLOCK_Q", "BLOCK_Q : BLOCK_Q"),
}
FAST = "a block releases its own buffer alone"


@pytest.mark.parametrize("bug", [FAST, *(slow(bug) for bug in BUGS if bug != FAST)])
def test_bugs_of_clusters_are_caught(bug: str) -> None:
    call = wide("causal", (190, 300, 1, 1, 1))
    tiles = {"forward": tile_of(call.spec, 2)}

    def in_three_orders() -> None:
        for order in (None, 1, 2):
            call.judged_forward(tiles=tiles, order_seed=order)

    with planted("forward", *BUGS[bug]), pytest.raises((AssertionError, fg.EmulatorError)):
        in_three_orders()


# ---- the plan -----------------------------------------------------------------------------------


def test_a_cluster_is_chosen_where_it_saves_enough() -> None:
    spec = fg.load(spec_path("causal")).replace(dtype="bfloat16")
    found = {}
    for dims in ((256, 256), (320, 320), (384, 384), (448, 448), (512, 512), (576, 512)):
        chosen = plan(spec.replace(head_dim=dims[0], head_dim_v=dims[1]), "sm_90a")
        found[dims] = chosen.cluster
        if chosen.cluster > 1:
            alone = plan(
                spec.replace(head_dim=dims[0], head_dim_v=dims[1]),
                "sm_90a",
                tile=replace(chosen.tile, cluster=1),
            )
            assert chosen.cost < 0.95 * alone.cost
            assert chosen.quantities["l2"] == alone.quantities["l2"] / 2
    assert found == {
        (256, 256): 1,
        (320, 320): 1,
        (384, 384): 2,
        (448, 448): 2,
        (512, 512): 2,
        (576, 512): 1,
    }
    assert plan(SHARED, "sm_90a").cluster == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"packed": True}, "two sequences"),
        ({"paged": True}, "split keys or pages"),
        ({"mask_mod": lambda b, h, q, k: q >= k + h}, "depends on the head"),
    ],
)
def test_the_plan_says_why_blocks_form_no_cluster(changes: dict[str, object], why: str) -> None:
    spec = fg.AttentionSpec(
        **{"mask_mod": lambda b, h, q, k: q >= k, "head_dim": 512, "dtype": "bfloat16"} | changes
    )
    alone = plan(spec, "sm_90a")
    assert alone.cluster == 1
    (note,) = (note for note in alone.notes if note.startswith("no cluster"))
    assert why in note
    with pytest.raises(PlanError, match="cannot have the given tile"):
        plan(spec, "sm_90a", tile=replace(alone.tile, cluster=2))


def test_launches_consist_of_whole_clusters() -> None:
    spec = fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=512, dtype="bfloat16")
    found = plan(spec, "sm_90a")
    assert found.grid(2, 4, 4, 190, 300) == (4, 4, 2)  # an odd number of tiles of a head
    assert found.grid(2, 4, 2, 190, 300) == (6, 2, 2)  # two heads of a key head
    assert found.grid(2, 4, 4, 190, 300, head_bits=1) == (8, 2, 2)
    assert found.blocks_of(10_000).count == 10_000
    with pytest.raises(PlanError, match="one work tile each"):
        found.blocks_of(10_000, requested=132)


def test_few_tiles_of_queries_form_no_clusters() -> None:
    spec = fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=512, dtype="bfloat16")
    found = plan(spec, "sm_90a")
    alone = {queries for queries in range(64, 1000, 64) if is_unpaired(found, 1, queries)}
    assert alone == {64, 192}
    assert not is_unpaired(found, 1, 64, group=2)  # two heads are a pair
    assert plan(spec, "sm_90a", few_rows=64) == found
    assert plan(spec, "sm_90a", unpaired=True).cluster == 1
    call = wide("causal", (40, 90, 1, 2, 2))
    run = call.judged_forward()
    assert run.report.kernel is not None
    assert run.report.kernel.plan.cluster == 1
    tiles = {"forward": tile_of(call.spec, 2)}
    assert equal(run, call.judged_forward(tiles=tiles))
