"""Few query rows with split keys or pages: a tile of few warps, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import ForwardRun, run_forward
from flashgen.kernels.pipeline import built
from flashgen.kernels.planner import api, few_rows_of, plan
from flashgen.kernels.planner.requests import PlanRequest
from flashgen.shared.call import LaunchOptions
from flashgen.spec.language.signature import split
from tests.support.examples import SPEC_IDS, SPECS, spec_path
from tests.support.judged import check_few_spills, check_gates, judge_forward
from tests.support.paged_calls import Paged, Sequences
from tests.support.planted import caught, planted
from tests.support.shapes import Case
from tests.support.tiers import slow

ARCHS = ("sm_80", "sm_90a")
CAUSAL = fg.load(spec_path("causal"))
SPLIT = {"sm_80": 240, "sm_90a": 208}  # of a few tiles of keys each


def how(arch: str) -> dict[str, Any]:
    return {"backend": "emulator", "arch": arch, "split_size": SPLIT[arch]}


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_the_tile_of_one_warpgroup_has_the_sums_of_the_wide_one(head_dim: int) -> None:
    spec = split(CAUSAL.replace(head_dim=head_dim, head_dim_v=head_dim))
    for heads in (1, 3, 4, 64):
        wide, narrow = (plan(spec, "sm_90a", heads_per_tile=heads, few_rows=f) for f in (0, 64))
        assert (wide.block_q, narrow.block_q, narrow.warps) == (128, 64, 4)
        assert narrow.block_k == wide.block_k
        assert narrow.fma_columns == wide.fma_columns
        assert narrow.cost * narrow.block_q < wide.cost * wide.block_q
        assert not narrow.ping_pong


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_tiles_of_16_to_64_rows_have_the_keys_of_the_wide_one(head_dim: int, dtype: str) -> None:
    spec = split(CAUSAL.replace(head_dim=head_dim, head_dim_v=head_dim, dtype=dtype))
    wide = plan(spec, "sm_80", heads_per_tile=4)
    rows = []
    for few in (16, 32, 64):
        narrow = plan(spec, "sm_80", heads_per_tile=4, few_rows=few)
        assert narrow.block_k == wide.block_k
        assert few <= narrow.block_q <= wide.block_q
        assert narrow.cost * narrow.block_q <= wide.cost * wide.block_q
        rows.append(narrow.block_q)
    assert rows[0] < rows[-1]


@pytest.mark.parametrize("head_dim", [8, 16])
def test_small_heads_have_tiles_whose_products_the_launch_has_registers_for(head_dim: int) -> None:
    spec = split(CAUSAL.replace(head_dim=head_dim, head_dim_v=head_dim))
    assert built(PlanRequest(spec, "sm_90a", few_rows=64))[0].binary.resources.clean


def test_exponentials_are_divided_as_in_the_wide_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cheapest tile, as no tile that splits suit better has divided exponentials."""
    monkeypatch.setattr(api, "MOST_OF_PREFILL", 1.0)
    spec = split(fg.load(spec_path("softcap")).replace(head_dim=8, head_dim_v=8))
    uncached = api.plan_forward.__wrapped__
    wide, narrow = (uncached(PlanRequest(spec, "sm_90a", few_rows=few)) for few in (0, 64))
    assert narrow.block_q < wide.block_q
    assert narrow.fma_columns == wide.fma_columns > 0


def test_what_does_not_fit_has_the_wide_tile() -> None:
    hopper, others = (plan(split(CAUSAL), arch) for arch in ("sm_90a", "sm_80"))

    def rows(plan: fg.Plan, heads: int, queries: int) -> int:
        return few_rows_of(split(CAUSAL), plan, heads, queries)

    # A head has the rows of a power of two.
    assert [rows(hopper, *few) for few in ((4, 16), (4, 17), (7, 8), (7, 9))] == [64, 0, 64, 0]
    assert [rows(others, *few) for few in ((4, 4), (4, 5), (7, 2), (3, 9))] == [16, 32, 16, 64]
    assert rows(hopper, 128, 1) == rows(others, 4, 33) == 0
    assert few_rows_of(CAUSAL, plan(CAUSAL, "sm_90a"), 4, 1) == 0
    given = LaunchOptions(tiles={"forward": hopper.tile})
    q, k, v = Case(1, 300, 1, 4, 1).tensors()
    run = run_forward(CAUSAL, q, k, v, q_offset=299, tiles=given.tiles, **how("sm_90a"))
    assert run.plan is not None
    assert run.plan.block_q == 128


def rows_of(run: ForwardRun, block_q: int) -> ForwardRun:
    assert run.plan is not None
    assert run.plan.block_q == block_q
    return run


@pytest.mark.parametrize(
    ("name", "queries", "heads"),
    [
        ("causal", 3, (4, 1)),
        slow("causal", 1, (8, 2)),
        slow("causal", 5, (7, 1)),
        slow("softcap", 1, (8, 2)),
        slow("sink", 3, (8, 2)),
        slow("alibi", 3, (2, 2)),
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_few_rows_have_the_bits_of_a_prefill(
    name: str, queries: int, heads: tuple[int, int], arch: str
) -> None:
    spec = fg.load(spec_path(name)).replace(head_dim=64, head_dim_v=64)
    numbers: dict[str, Any] = {}
    if spec.tensors:
        numbers["tensors"] = {t.name: torch.linspace(-1, 2, heads[0]) for t in spec.tensors}
    q, k, v = Case(300, 300, 1, *heads).tensors(seed=5)
    k[..., 0], q[..., 0] = torch.linspace(0, 40, 300), 0.7  # maxima grow in each tile
    first = 300 - queries
    prefill = rows_of(run_forward(spec, q, k, v, **how(arch), **numbers), 128)
    few = q[:, :, first:], k, v
    found = run_forward(spec, *few, q_offset=first, **how(arch), **numbers)
    rows_of(found, few_rows_of(split(spec), plan(split(spec), arch), heads[0] // heads[1], queries))
    assert torch.equal(found.out, prefill.out[:, :, first:])
    assert torch.equal(found.lse, prefill.lse[:, :, first:])
    judge_forward((found.out, found.lse), spec, *few, q_offset=first, **numbers)
    check_gates(found.report.kernel)


@pytest.mark.parametrize(("arch", "rows"), [("sm_80", 16), ("sm_90a", 64)])
@pytest.mark.parametrize("queries", [1, slow(3)])
def test_pages_change_no_bit_of_few_rows(queries: int, arch: str, rows: int) -> None:
    of = Sequences.of((queries, queries), (300, 77), heads=(4, 1))
    call = Paged(CAUSAL.replace(paged=True), of, how=how(arch))
    run = rows_of(call.judged(), rows)
    for b, (out, lse) in enumerate(call.parts(run)):
        q, k, v = (each[b][None] for each in (of.q, of.k, of.v))
        alone = run_forward(CAUSAL, q, k, v, q_offset=k.shape[2] - queries, **how(arch))
        assert torch.equal(out, rows_of(alone, rows).out)
        assert torch.equal(lse, alone.lse)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("      barrier_wait(k_full[k.index], k.parity);\n", "", "Race"),
        slow("barrier_wait(v_empty[v.index], v.parity ^ 1);", "", ""),
        slow("barrier_init(v_empty[i], CONSUMERS);", "barrier_init(v_empty[i], 2);", "Deadlock"),
    ],
)
def test_a_planted_bug_is_caught(old: str, new: str, kind: str) -> None:
    q, k, v = Case(1, 1200, 1, 1, 1).tensors()
    with planted("forward", old, new), caught(kind):
        run_forward(CAUSAL, q, k, v, q_offset=1199, **how("sm_90a") | {"split_size": 1248})


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(("arch", "rows"), [("sm_80", 16), ("sm_80", 64), ("sm_90a", 64)])
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_tiles_of_few_rows_spill_little(path: Path, arch: str, rows: int, head_dim: int) -> None:
    spec = fg.load(path).replace(head_dim=head_dim, head_dim_v=head_dim)
    if not spec.packed:
        check_few_spills(built(PlanRequest(split(spec), arch, few_rows=rows))[0])
