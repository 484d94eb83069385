"""The predicted gain of products of 8 bits: the table of the documentation, and what it says."""

from __future__ import annotations

import pytest

from benchmarks import fp8_products
from benchmarks.fp8_products import Products
from tests.support.paths import ROOT


def test_the_table_is_that_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    fp8_products.main()
    assert capsys.readouterr().out in (ROOT / "docs/planner.md").read_text()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_promoted_products_gain_less_than_is_asked_of_them(head_dim: int) -> None:
    now, then, _ = fp8_products.costs(head_dim, Products(promotes=True, by_token=False))
    assert now / then < 1.3
