"""Blocks that a layout leaves out cost nothing: the emulator counts tensor-core instructions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flashgen.calls.ops import run_backward, run_forward
from flashgen.calls.runtime.reports import Report
from flashgen.kernels.planner import plan
from flashgen.spec.language.spec import AttentionSpec
from tests.support.masks import causal
from tests.support.shapes import Case
from tests.support.sparse_layouts import by_position, random_layout, sparse_spec, touched

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("rounded_sums")

TILE = plan(AttentionSpec(head_dim=16))
DENSITIES = (1 / 8, 1 / 4, 1 / 2, 1)


def products(report: Report) -> int:
    counts = report.counters.opcodes
    return sum(count for name, count in counts.items() if name.startswith("mma."))


def small(block_q: int, block_k: int, *mods: Any, **options: Any) -> AttentionSpec:
    return sparse_spec(block_q, block_k, *mods, head_dim=16, **options)


def small_case(seq_q: int, seq_k: int, heads_q: int = 1) -> Case:
    return Case(seq_q, seq_k, 1, heads_q, 1, head_dim=16)


def forward(spec: AttentionSpec, case: Case, **options: Any) -> Any:
    return run_forward(spec, *case.tensors(), backend="emulator", check_memory=False, **options)


def reports(spec: AttentionSpec, case: Case, **options: Any) -> tuple[Report, ...]:
    """Of the forward kernel, and of dK and dV's and of dQ's."""
    q, k, v = case.tensors()
    run = forward(spec, case, **options)
    back = run_backward(
        *(spec, q, k, v, run.out, run.lse, run.out),
        backend="emulator",
        check_memory=False,
        deterministic=True,
        **options,
    )
    return run.report, *back.reports[1:]


def tiles_of(report: Report) -> tuple[int, int]:
    assert report.kernel is not None
    return report.kernel.plan.block_q, report.kernel.plan.block_k


@pytest.mark.slow
@pytest.mark.parametrize(("block", "density"), list(itertools.product(["tiles", "48"], DENSITIES)))
def test_products_are_those_of_the_tiles_that_touch_a_live_block(
    block: str, density: float
) -> None:
    block_q, block_k = (TILE.block_q, TILE.block_k) if block == "tiles" else (48, 48)
    seq_q, seq_k = 2 * TILE.block_q, 4 * TILE.block_k
    case = small_case(seq_q, seq_k, 2)
    spec = small(block_q, block_k)
    all_live = random_layout(spec, (1, 1), (seq_q, seq_k), 1.0, 0)
    of_tile = [
        products(report)
        // (2 * -(-seq_q // tiles_of(report)[0]) * -(-seq_k // tiles_of(report)[1]))
        for report in reports(spec, case, tensors={"layout": all_live})
    ]
    live = random_layout(spec, (1, 2), (seq_q, seq_k), density, 5)
    kept = by_position(live, block_q, block_k, seq_q, seq_k)
    for report, each in zip(reports(spec, case, tensors={"layout": live}), of_tile, strict=True):
        assert products(report) == each * int(touched(kept, *tiles_of(report)).sum())
    if block == "tiles":
        assert torch.equal(touched(kept, block_q, block_k), live)


def test_tiles_that_neither_layout_nor_mask_keep_are_skipped() -> None:
    """A mask whose bounds are not exact, so that mask and layout are evaluated for each tile."""

    def strided(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & ((q - k < 40) | (k % 400 < 20))

    seq = 8 * TILE.block_k
    case, spec = small_case(seq, seq), small(64, 64, strided)
    live = random_layout(spec, (1, 1), (seq, seq), 0.1, 9)
    q, k = torch.arange(seq)[:, None], torch.arange(seq)
    tile = TILE.block_q, TILE.block_k
    by_mask = touched((q >= k) & ((q - k < 40) | (k % 400 < 20)), *tile)
    by_layout = touched(by_position(live, 64, 64, seq, seq)[0, 0], *tile)
    each = products(forward(AttentionSpec(head_dim=16), case).report) // by_mask.numel()
    run = forward(spec, case, tensors={"layout": live})
    assert tiles_of(run.report) == tile
    both = int((by_mask & by_layout).sum())
    assert products(run.report) == each * both
    assert 0 < both < min(int(by_mask.sum()), int(by_layout.sum()))


def test_full_tiles_of_aligned_blocks_evaluate_no_element() -> None:
    seq_q, seq_k = 3 * TILE.block_q, 4 * TILE.block_k
    spec = small(TILE.block_q, TILE.block_k)
    live = random_layout(spec, (1, 1), (seq_q, seq_k), 0.5, 2)
    run = forward(spec, small_case(seq_q, seq_k), tensors={"layout": live})
    counts = run.report.counters.opcodes
    looks = sum(count for name, count in counts.items() if name.startswith("ld.global.nc.u8"))
    assert looks == TILE.warps * int(live.sum())  # each warp, of each tile: whether it is full


def test_work_grows_with_the_live_tiles_and_not_with_all_tiles() -> None:
    spec = small(64, 64, layout=lambda i, j: i == j)
    work = []
    for seq in (512, 2048):
        run = forward(spec, small_case(seq, seq))
        work.append(sum(run.report.counters.opcodes.values()))
    assert work[1] < 4.4 * work[0]


@pytest.mark.slow
def test_a_layout_with_causal_visits_no_tile_above_the_diagonal() -> None:
    seq = 8 * TILE.block_q
    run = forward(small(64, 64, causal, layout=lambda i, j: j >= i), small_case(seq, seq))
    dense = forward(AttentionSpec(causal, head_dim=16), small_case(seq, seq))
    assert products(run.report) < products(dense.report) / 1.5
