"""The planner ranks tiles as their work does, counted by executing each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import ranking
from tests.support.profiles import loaded


def test_spearman_is_of_ranks_alone() -> None:
    values = [3.0, 1.0, 2.0, 10.0]
    assert ranking.spearman(values, [value**3 for value in values]) == pytest.approx(1)
    assert ranking.spearman(values, [-value for value in values]) == pytest.approx(-1)


def test_equal_values_share_their_rank() -> None:
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: the covariance is 1.5, the variances 1.5 and 2.
    assert ranking.spearman([5, 5, 7], [1, 2, 3]) == pytest.approx(1.5 / math.sqrt(1.5 * 2))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", ranking.HEAD_DIMS)
def test_a_sample_of_tiles_is_ranked_as_its_work(head_dim: int) -> None:
    spec = loaded("causal").replace(head_dim=head_dim)
    rows = ranking.rows_of(spec, 160, every=16)
    assert len(rows) > 12
    assert ranking.agreement(rows, "cost") >= ranking.LEAST


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", ranking.HEAD_DIMS)
def test_every_feasible_tile_is_ranked_as_its_work(head_dim: int) -> None:
    spec = loaded("causal").replace(head_dim=head_dim)
    rows = ranking.rows_of(spec, ranking.N)
    one_each = ranking.best_occupancy(rows)
    assert len(rows) > 100
    assert ranking.agreement(rows, "cost") >= ranking.LEAST
    assert ranking.agreement(one_each, "cost") >= ranking.LEAST
    record = ranking.record_of(rows)
    assert record["best_to_least_counted"] < 1.05


def test_the_record_is_of_these_targets() -> None:
    record = json.loads(Path(ranking.ROOT, "benchmarks/results/ranking.json").read_text())
    assert record["n"] == ranking.N
    for entry in record["specs"].values():
        assert min(entry["spearman"], entry["spearman_best_occupancy"]) >= ranking.LEAST
