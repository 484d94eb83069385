"""What results beside the output move through memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.statistic_bytes import main, statistic_bytes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "statistics.md"


def test_each_result_moves_at_most_a_tenth_of_eagers_bytes() -> None:
    found = {each.name: each.share for each in statistic_bytes()}
    assert set(found) == {"lse", "max_scores", "entropy", "key_mass", "block_mass"}
    assert all(share <= 0.1 for share in found.values()), found


def test_the_page_has_the_table_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out in PAGE.read_text()
