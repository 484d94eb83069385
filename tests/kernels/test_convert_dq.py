"""The kernel that converts dQ: it scales and rounds each sum, and writes it to its place in dQ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.call import LaunchOptions
from flashgen.ops import check
from flashgen.pipeline import Build, build_backward
from flashgen.runtime.bind_arguments import bind, elements_of_sums
from tests.support.judged import check_gates
from tests.support.tiers import slow

Tensor = torch.Tensor
Place = Callable[..., tuple[int, int]]
SCALE = 0.3


@functools.cache
def kernel(head_dim: int, dtype: str, arch: str, *, packed: bool = False) -> Build:
    spec = fg.AttentionSpec(head_dim=head_dim, dtype=dtype, packed=packed, name="x")
    builds = build_backward(spec, arch)
    (built,) = (each for each in builds if each.plan.kernel == "convert_dq")
    check_gates(built)
    return built


def order_of(build: Build) -> tuple[tuple[int, ...], Place]:
    """The shape of a tile of sums, and the row and column of the element at an index in it.

    mma.sync: fragments of 16 rows and 8 columns. wgmma, which has dQ^T: strips of 16 columns, with
    the queries of a warpgroup side by side.
    """
    assert build.plan.sums_tile is not None
    rows, columns = build.plan.sums_tile
    if build.plan.path == "sm_80":

        def place(r: int, c: int, e: int, a: int, t: int) -> tuple[int, int]:
            return 16 * r + 8 * (e // 2) + a, 8 * c + 2 * t + e % 2

        return (rows // 16, columns // 8, 4, 8, 4), place
    halves = 2 if -(-build.plan.head_dim // 64) % 2 else 1
    together = rows // halves

    def place_in_strip(r: int, c: int, n: int, a: int, t: int, i: int, e: int) -> tuple[int, int]:
        return together * r + 8 * n + 2 * t + e, 16 * c + 8 * i + a

    return (halves, columns // 16, together // 8, 8, 4, 2, 2), place_in_strip


def sums_of(wanted: Tensor, build: Build) -> Tensor:
    """Sums of dQ [batch, heads, seq, dim]; rows and columns outside it are infinite."""
    batch, heads, seq, dim = wanted.shape
    shape, place = order_of(build)
    index = torch.cartesian_prod(*map(torch.arange, shape))
    at = torch.tensor([place(*each) for each in index.tolist()])
    rows, columns = build.plan.sums_tile or (0, 0)
    tiles = -(-seq // rows)
    padded = torch.full((batch, heads, tiles * rows, columns), torch.inf)
    padded[:, :, :seq, :dim] = wanted
    return padded.view(batch, heads, tiles, rows, columns)[..., at[:, 0], at[:, 1]]


def run(build: Build, dq: Tensor, sums: Tensor, **more: Any) -> Any:
    """Executes the kernel, which writes dq; the counters."""
    spec = fg.AttentionSpec(head_dim=dq.shape[3], dtype=build.plan.dtype, name="x")
    operands = (torch.empty(shape, dtype=dq.dtype) for shape in [dq.shape] * 3)
    call = check(spec, *operands, scale=SCALE)
    assert sums.numel() == elements_of_sums(build.plan, call)
    tensors = {"dq": dq, "dq_sum": sums}
    return bind(build, call, tensors).emulate(tensors, LaunchOptions(**more))


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "seq"),
    [
        ("sm_80", "float16", 64, 200),
        ("sm_80", "bfloat16", 40, 37),
        slow("sm_80", "float16", 256, 70),
        ("sm_80", "float32", 32, 50),
        slow("sm_80", "float32", 128, 40),
        ("sm_90a", "float16", 64, 200),
        ("sm_90a", "bfloat16", 40, 37),
        slow("sm_90a", "float16", 128, 170),
        slow("sm_90a", "bfloat16", 8, 130),
        slow("sm_90a", "float32", 24, 50),
    ],
)
def test_every_sum_is_scaled_rounded_and_written_to_its_place(
    arch: str, dtype: str, head_dim: int, seq: int, rows_first: bool
) -> None:
    build = kernel(head_dim, dtype, arch)
    wanted = torch.randn(2, 3, seq, head_dim, generator=torch.Generator().manual_seed(0))
    dq = torch.full_like(wanted, torch.nan, dtype=getattr(torch, dtype))
    if rows_first:
        dq = dq.transpose(1, 2).contiguous().transpose(1, 2)
    run(build, dq, sums_of(wanted, build))
    assert torch.equal(dq, (wanted * torch.tensor(SCALE)).to(dq.dtype))
