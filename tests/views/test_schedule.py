"""The predicted schedule: each slot runs one work tile at a time, and the last ends it."""

from __future__ import annotations

import itertools
import re

import pytest

import flashgen as fg
from flashgen.kernels.planner.duration import HeadSteps, duration_of, makespan, placed
from flashgen.kernels.planner.traffic import LaunchSizes, Walk
from flashgen.tools.views import plots
from tests.support.profiles import loaded

# 5 tiles of growing length for each of 7 heads, 2 of them interleaved; then heads of equal tiles.
PARTS = (HeadSteps([1.5, 2.5, 3.5, 4.5, 5.5], 7, 2), HeadSteps([2.0, 2.0], 3))


@pytest.mark.parametrize("slots", [1, 4, 13, 500])
def test_every_work_tile_runs_once_and_the_last_end_is_the_makespan(slots: int) -> None:
    found = list(placed(PARTS, slots))
    wanted = [
        (head, tile)
        for first, part in zip((0, 7), PARTS, strict=True)
        for head in range(first, first + part.times)
        for tile in range(len(part.lengths))
    ]
    assert sorted((head, tile) for *_, tile, head in found) == sorted(wanted)
    assert max(end for _, _, end, *_ in found) == makespan(PARTS, slots)
    by_slot = sorted(found)
    for one, two in itertools.pairwise(by_slot):
        assert one[0] != two[0] or one[2] == two[1]
    starts = [start for _, start, *_ in found]
    assert starts == sorted(starts)


@pytest.mark.parametrize("heads", [2, 64])
def test_the_schedule_of_a_launch_ends_with_its_makespan_and_is_cut_by_sms(heads, monkeypatch):
    monkeypatch.setattr(plots, "MOST_TILES", 100)
    plan = fg.plan(loaded("full"))
    duration = duration_of(plan, [Walk(LaunchSizes(1, heads, heads, 2048, 2048))])
    plot = plots.schedule_plot(duration)
    values = {line.name: line.substituted for line in duration.lines}
    assert f"{plot.makespan:.4g}" in values["quantisation"]
    assert plot.total == heads * -(-2048 // plan.block_q)
    found = [re.fullmatch(r"SM (\d+), .*: (\d+) steps, .*", tile.text) for tile in plot.tiles]
    shown = {int(match[1]) for match in found if match}
    whole = plot.total == len(plot.tiles)
    assert whole == (heads == 2)
    assert len(plot.tiles) <= 100
    assert whole or shown == set(range(len(shown)))
    assert {int(match[2]) for match in found if match} == {-(-2048 // plan.block_k)}
    assert max(tile.x + tile.width for tile in plot.tiles) <= 640 - 16 + 1
