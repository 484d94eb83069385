"""The kernel that converts dQ: it scales and rounds each sum, and writes it to its place in dQ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import BackwardRun, check
from flashgen.calls.runtime import bind_arguments
from flashgen.calls.runtime.bind_arguments import bind, elements_of_sums
from flashgen.kernels.pipeline import Build, build_backward
from flashgen.shared.call import LaunchOptions
from flashgen.shared.paths import PATHS
from tests.support.judged import Call, check_gates
from tests.support.planted import caught, planted
from tests.support.shapes import Case
from tests.support.tiers import one_in, slow

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
        slow("sm_80", "float16", 64, 200),
        slow("sm_80", "bfloat16", 40, 37),
        slow("sm_80", "float16", 256, 70),
        slow("sm_80", "float32", 32, 50),
        slow("sm_80", "float32", 64, 40),
        slow("sm_90a", "float16", 64, 200),
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


@functools.cache
def of_causal(arch: str, *, packed: bool = False) -> Call:
    """A backward call with several tiles of queries, the last of which is partial."""
    spec = fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=64, packed=packed, name="causal")
    tensors = {}
    if packed:
        ends = torch.tensor([0, 150, 200, 330], dtype=torch.int32)
        tensors = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    qkv = Case(330, 330, 1, 2, 1, "float16", 64).tensors()
    return Call(spec, qkv, {"tensors": tensors}, arch=arch)


@functools.cache
def without_a_bug(arch: str, *, packed: bool) -> BackwardRun:
    return of_causal(arch, packed=packed).judged_backward()


BUGS = [
    ("convert_dq", "// 3.", "  __syncthreads();\n", "", "RaceError"),
    ("convert_dq", "void store_rows(", "row < valid_rows", "row <= valid_rows", "OutOfBounds"),
    ("delta", "zeros_end = ", "min(", "1 + max(", "OutOfBounds"),
]


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
@pytest.mark.parametrize(("kernel", "after", "old", "new", "kind"), one_in(3, BUGS))
def test_a_planted_bug_is_found(
    arch: str, kernel: str, after: str, old: str, new: str, kind: str
) -> None:
    with planted(kernel, old, new, after), caught(kind) as error:
        of_causal(arch).backward()
    assert kernel in error.value.where


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("arch", PATHS)
def test_every_sum_begins_at_what_the_delta_kernel_writes(arch: str, packed: bool) -> None:
    """Every sum begins at the zero that delta writes. The scale is 1/8."""
    call = of_causal(arch, packed=packed)
    clean = without_a_bug(arch, packed=packed)
    bug = "{0.0f, 0.0f, 0.0f, 0.0f}", "{1e3f, 1e3f, 1e3f, 1e3f}"
    with planted("delta", *bug, "// This block's part"):
        wrong = call.backward()
    torch.testing.assert_close(wrong.dq.float(), clean.dq.float() + 1e3 / 8, rtol=2e-3, atol=0.1)
    assert torch.equal(wrong.dk, clean.dk)
    assert torch.equal(wrong.dv, clean.dv)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_grids_of_several_launches_write_the_same_bits(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beyond 65,535 heads or batch entries, which are the limit of a launch."""
    call = of_causal("sm_80", packed=packed)
    whole = without_a_bug("sm_80", packed=packed)
    monkeypatch.setattr(bind_arguments, "MOST_ALONG_Y_AND_Z", 1)
    parts = call.backward()
    assert torch.equal(parts.dq, whole.dq)
