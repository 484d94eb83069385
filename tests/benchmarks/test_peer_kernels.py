"""What `benchmarks/peer_kernels.py` needs without the packages of FlashAttention-4."""

from __future__ import annotations

import pytest

from benchmarks import peer_kernels


@pytest.mark.parametrize("number", [1, 2, 3, 5, 7, 12, 96, 1000, 2**16 + 1])
def test_the_numbers_of_a_divisor_divide(number: int) -> None:
    (_, factor, first, second), _ = peer_kernels.divisor(number)
    for dividend in (0, 1, number - 1, number, 7 * number + 3, 2**31 - 1):
        high = int(factor) * dividend >> 32
        assert (high + (dividend - high >> int(first))) >> int(second) == dividend // number


def test_without_the_packages_it_says_where_they_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacks() -> None:
        raise ImportError("no module flash_attn")

    monkeypatch.setattr(peer_kernels, "import_package", lacks)
    with pytest.raises(SystemExit, match=r"no module flash_attn; see benchmarks/peers\.py"):
        peer_kernels.main([])
