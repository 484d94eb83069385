"""The predicted schedule: each slot runs one work tile at a time, and the last ends it."""

from __future__ import annotations

import itertools

import pytest

import flashgen as fg
from flashgen.planner.duration import HeadSteps, duration_of, makespan, placed
from flashgen.planner.traffic import LaunchSizes
from flashgen.views import schedule
from flashgen.views.plots import schedule_plot
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
    monkeypatch.setattr(schedule, "MOST_TILES", 100)
    plan = fg.plan(loaded("full"))
    duration = duration_of(plan, [(LaunchSizes(1, heads, heads, 2048, 2048), None)])
    found = schedule.schedule_of(duration)
    values = {line.name: line.substituted for line in duration.lines}
    assert f"{found.makespan:.4g}" in values["quantisation"]
    assert found.total == heads * -(-2048 // plan.block_q)
    shown = {each.slot % found.sms for each in found.work_tiles}
    whole = found.total == len(found.work_tiles)
    assert whole == (heads == 2)
    assert len(found.work_tiles) <= 100
    assert whole or shown == set(range(len(shown)))
    steps = {round(each.steps) for each in found.work_tiles}
    assert steps == {-(-2048 // plan.block_k)}
    plot = schedule_plot(found)
    assert len(plot.tiles) == len(found.work_tiles)
    assert max(tile.x + tile.width for tile in plot.tiles) <= 640 - 16 + 1
