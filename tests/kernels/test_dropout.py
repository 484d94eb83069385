"""Dropout counts global positions: every kernel drops what one call on the whole would drop."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_backward, run_forward
from flashgen.shared.dropout import keep_mask
from flashgen.shared.paths import PATHS
from tests.support.judged import RNG

BATCH, HEADS = 2, 1
P = 0.5
SPEC = fg.AttentionSpec(head_dim=64, dtype="float16", dropout=True)


def kept_pattern(
    spec: fg.AttentionSpec, deterministic: bool, **how: Any
) -> dict[str, torch.Tensor]:
    """Where each kernel keeps elements of P, seen from outside: every factor but P * Z is 1 or I.

    Q and K are 0, so that P is the same everywhere; n is the head dim.
    """
    n = spec.head_dim
    dtype = getattr(torch, spec.dtype)
    identity = torch.eye(n, dtype=dtype).expand(BATCH, HEADS, n, n)
    zeros = torch.zeros(BATCH, HEADS, n, n, dtype=dtype)
    ones = torch.zeros_like(zeros)
    ones[..., 0] = 1
    options: dict[str, Any] = {"dropout_p": P, "rng": torch.tensor(RNG), **how}
    forward = run_forward(spec, zeros, zeros, identity, **options)
    found = {"forward": forward.out}
    options["deterministic"] = deterministic
    # dV = (P * Z)^T dO with dO = I
    empty = torch.zeros_like(forward.out)
    run = run_backward(spec, zeros, zeros, identity, empty, forward.lse, identity, None, **options)
    found["dv"] = run.dv.transpose(2, 3)
    # dP = dO V^T = 1 and delta = 0, so dS = P * Z; then dK = scale dS^T Q and dQ = scale dS K
    run = run_backward(spec, identity, zeros, ones, empty, forward.lse, ones, None, **options)
    found["dk"] = run.dk.transpose(2, 3)
    run = run_backward(spec, zeros, identity, ones, empty, forward.lse, ones, None, **options)
    found["dq"] = run.dq
    return {name: pattern != 0 for name, pattern in found.items()}


def check(spec: fg.AttentionSpec, q_offset: int, k_offset: int, **how: Any) -> None:
    n = spec.head_dim
    rows, keys = range(q_offset, q_offset + n), range(k_offset, k_offset + n)
    bits = keep_mask(P, *RNG, torch.arange(BATCH * HEADS).numpy(), rows, keys)
    expected = torch.from_numpy(bits).view(BATCH, HEADS, n, n)
    for deterministic in (False, True):
        found = kept_pattern(spec, deterministic, q_offset=q_offset, k_offset=k_offset, **how)
        for name, pattern in found.items():
            assert torch.equal(pattern, expected), f"{name}, deterministic {deterministic}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "offsets"),
    [
        ("sm_80", (48, -32)),
        *itertools.product(PATHS, ((0, 16), (-16, 0), (2**28 - 64, 80))),
        ("sm_90a", (-48, 2**20)),
    ],
)
def test_kernels_drop_the_elements_at_global_positions(arch: str, offsets: tuple[int, int]) -> None:
    check(SPEC, *offsets, backend="emulator", arch=arch)


@pytest.mark.parametrize("offsets", [(0, 0), (48, -32), (-(2**28), 2**28 - 64)])
def test_the_tiled_path_drops_the_elements_at_global_positions(offsets: tuple[int, int]) -> None:
    check(SPEC, *offsets, backend="tiled")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_kernel_drops_the_elements_that_the_definition_drops(
    dtype: str, head_dim: int
) -> None:
    """Head dims and dtypes have tiles of their own, so this is the same mask with other tiles."""
    check(
        SPEC.replace(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim), 0, 0, backend="emulator"
    )


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [40, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arch", PATHS)
def test_tiles_of_any_size_begin_at_any_block(arch: str, dtype: str, head_dim: int) -> None:
    spec = SPEC.replace(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)
    check(spec, 16 * 7, -16 * 5, backend="emulator", arch=arch)
