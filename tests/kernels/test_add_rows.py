"""Rows that are added to float32 sums, by the emitted kernel and by torch."""

from __future__ import annotations

import pytest
import torch

from flashgen.calls.runtime.add_rows import Order, add_rows
from flashgen.calls.runtime.backends import target_of
from flashgen.kernels.pipeline import build_add_rows
from flashgen.shared.call import LaunchOptions
from flashgen.shared.paths import PATHS
from tests.support.judged import check_gates, normal
from tests.support.planted import planted

Tensor = torch.Tensor
BLOCKS, ADDED = 7, 40


def added(
    dtype: torch.dtype, arch: str, block_k: int = 3, columns: int = 72
) -> tuple[Tensor, Tensor]:
    """Sums by the kernel, and by torch, which adds one row after the other.

    Some blocks of rows belong to no sum, and the first block of sums has no rows.
    """
    places = torch.randint(1, BLOCKS + 1, (ADDED,), generator=torch.Generator().manual_seed(3))
    rows = normal((ADDED * block_k, columns + 8), dtype, 4)[:, :columns]
    total = normal((BLOCKS, block_k, columns), torch.float32, 5)
    expected = total.clone()
    for place, block in zip(places.tolist(), rows.view(ADDED, block_k, columns), strict=True):
        if place < BLOCKS:
            expected[place] += block.float()
    target = target_of("emulator", arch, total.device)
    add_rows(total, rows, Order.by_sums(places, BLOCKS), target, LaunchOptions())
    return total, expected


@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_have_the_bits_of_one_row_after_the_other(dtype: torch.dtype, arch: str) -> None:
    for block_k, columns in ((3, 72), (1, 512), (16, 8)):
        found, expected = added(dtype, arch, block_k, columns)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_kernel_spills_nothing(dtype: str, arch: str) -> None:
    build = build_add_rows(dtype, arch)
    check_gates(build)
    assert max(map(len, build.source.text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("p.starts[block + 1];", "p.starts[block + 1] - 1;"),  # a list that misses an entry
        ("p.order[n] * p.block_k", "n * p.block_k"),
        ("const int block = key / p.block_k;", "const int block = key / p.block_k / 2 * 2;"),
    ],
)
def test_planted_bugs_are_found(old: str, new: str) -> None:
    with planted("add_rows", old, new):
        found, expected = added(torch.bfloat16, "sm_80")
    assert not torch.equal(found, expected)
