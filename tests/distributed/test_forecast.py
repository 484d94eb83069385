"""What each rank of a distributed call is predicted to hold, send and compute."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashgen as fg
from flashgen import InputError
from flashgen.distributed import forecast
from tests.support.commands import flashgen
from tests.support.paths import ROOT

CAUSAL = fg.load(ROOT / "specs" / "causal.py")
WINDOW = fg.load(ROOT / "specs" / "sliding_window.py")
SIZES = (1, 8, 2, 16384)
ROW = 2 * (64 + 64) * 2  # bytes of K and V of one position: heads_kv, head dims, float16


def test_a_causal_ring_in_two_chunks_is_even_and_sends_what_others_need() -> None:
    found = forecast(CAUSAL, 8, SIZES)
    assert found.largest_over_mean == pytest.approx(1.0, abs=0.01)
    assert sum(rank.share for rank in found.ranks) == pytest.approx(1)
    # Every rank needs nearly all keys: those of each rank travel 7 steps, but for the last chunk.
    sent = sum(rank.sent for rank in found.ranks)
    assert 0.5 * 7 * SIZES[3] * ROW < sent <= 7 * SIZES[3] * ROW


def test_contiguous_parts_of_a_causal_mask_are_uneven() -> None:
    found = forecast(CAUSAL, 8, SIZES, shard="contiguous")
    assert found.largest_over_mean == pytest.approx(15 / 8, rel=0.02)
    assert found.seconds > forecast(CAUSAL, 8, SIZES).seconds


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_a_window_sends_the_chunk_before_it_alone(method: str) -> None:
    options = {"shard": "contiguous", "captures": {"window": 100}, "method": method}
    found = forecast(WINDOW, 8, SIZES, **options)  # type: ignore[arg-type]
    chunk = SIZES[3] // 8 * ROW
    assert [rank.sent for rank in found.ranks] == [chunk] * 7 + [0]


def test_a_slow_link_is_what_a_ring_waits_for() -> None:
    fast, slow = (forecast(CAUSAL, 8, SIZES, link=rate) for rate in (1e12, 1e8))
    assert fast.seconds == max(rank.compute for rank in fast.ranks)
    assert slow.seconds == max(rank.transfer for rank in slow.ranks)


@pytest.mark.slow
def test_a_thousand_ranks_and_ten_million_positions() -> None:
    found = forecast(CAUSAL, 1024, (1, 32, 8, 10 * 1024 * 1024))
    assert len(found.ranks) == 1024
    assert found.largest_over_mean < 1.3
    assert "1024 ranks" in str(found)
    assert len(str(found).splitlines()) < 20


def test_a_sequence_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(InputError, match="equal length"):
        forecast(CAUSAL, 7, SIZES)


def test_the_command_prints_assumptions_and_a_table_and_draws_the_tiles(tmp_path: Path) -> None:
    file = tmp_path / "map.png"
    spec = "specs/sliding_window.py"
    done = flashgen("plan", spec, "--world", "4", "--shape", "1,4,4096", "--map", str(file))
    assert "sliding_window, 1 x 4/4 heads x 4,096 positions on 4 ranks, ring" in done.stdout
    assert "without latency or contention" in done.stdout
    assert "largest share" in done.stdout
    assert file.read_bytes().startswith(b"\x89PNG")
    balanced = flashgen("plan", spec, "--world", "4", "--shape", "1,4,4096", "--shard", "balance")
    assert "given chunks" in balanced.stdout


def test_ranks_without_a_shape_are_refused() -> None:
    done = flashgen("plan", "specs/causal.py", "--world", "4")
    assert done.exit_code == 2
    assert "--world has no effect without --shape" in done.stderr


def test_a_method_or_sharding_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="no such method"):
        forecast(CAUSAL, 4, SIZES, method="rings")
    with pytest.raises(InputError, match=r"argument shard of flashgen\.distributed\.forecast"):
        forecast(CAUSAL, 4, SIZES, shard="zigzag")
    options = "--world", "4", "--shape", "1,4,4096", "--method", "ulysses"
    done = flashgen("plan", "specs/causal.py", *options)
    assert done.exit_code == 2
    assert "option --method" in done.stderr
    assert "'ulysses'; available: all_gather, ring, all_to_all" in done.stderr
    assert not done.stdout
