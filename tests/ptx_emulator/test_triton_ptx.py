"""PTX from another compiler: kernels compiled by Triton for sm_80 give the results of their source.

The files in data/triton are the unmodified output of Triton; data/triton/build.py creates them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptx_emulator import launch
from tests.support.tiers import slow

Array = np.ndarray[Any, Any]
FOLDER = Path(__file__).parent / "triton"
LAUNCHES = json.loads((FOLDER / "launches.json").read_text())
SEEDS = [None, 1]
KINDS = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
}


def start(
    name: str, grid: tuple[int, ...], *args: object, seed: int | None = None, **options: Any
) -> Any:
    facts = LAUNCHES[name]
    assert len(args) == len(facts["arguments"])
    ptx, given = (FOLDER / f"{name}.ptx").read_text(), [*args, *[None] * facts["hidden_pointers"]]
    shape = (*grid, 1, 1)[:3], facts["threads"]
    options |= {"shared_bytes": facts["shared_bytes"], "order_seed": seed}
    return launch(ptx, facts["kernel"], *shape, given, **options)


def tiles(size: int, name: str, block: str) -> int:
    return -(-size // LAUNCHES[name]["constants"][block])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "n"),
    [("vector_add", 1), ("vector_add", 2500), ("vector_add_wide", 1024), ("vector_add_wide", 2064)],
)
def test_vector_add_with_a_ragged_end(name: str, n: int, seed: int | None) -> None:
    x, y = np.random.default_rng(n).normal(size=(2, n)).astype(np.float32)
    out = np.zeros(n, np.float32)
    start(name, (tiles(n, name, "BLOCK"),), x, y, out, np.int32(n), seed=seed)
    assert (out == x + y).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("softmax", 1),
        ("softmax", 77),
        ("softmax", 1000),
        ("softmax_bf16", 300),
        ("softmax_bf16", 512),
    ],
)
def test_softmax_of_rows(name: str, columns: int, seed: int | None) -> None:
    kind = KINDS[LAUNCHES[name]["arguments"]["x"][1:]]
    stride = columns + -columns % 16 if name == "softmax_bf16" else columns + 3
    x = np.random.default_rng(columns).normal(scale=3, size=(4, stride)).astype(kind)
    out = np.zeros_like(x)
    start(name, (4,), x, out, np.int32(columns), np.int32(stride), seed=seed)
    weights = np.exp(x[:, :columns].astype(np.float64))
    want = weights / weights.sum(axis=1, keepdims=True)
    tolerance = 2.0**-8 if kind != np.float32 else 4e-6
    assert np.abs(out[:, :columns].astype(np.float64) / want - 1).max() < tolerance
    assert (out[:, columns:] == 0).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(64, 64, 64), (100, 70, 112), (33, 9, 16)])
@pytest.mark.parametrize("name", ["matmul_fp16", "matmul_tf32"])
def test_matmul_of_any_size(name: str, shape: tuple[int, int, int], seed: int | None) -> None:
    (m, n, k), kind = shape, KINDS[LAUNCHES[name]["arguments"]["a"][1:]]
    rng, pad = np.random.default_rng(m), n + -n % 16
    a, b = (rng.normal(size=size).astype(kind) for size in ((m, k), (k, pad)))
    c = np.zeros((m, pad), np.float32)
    sizes = [np.int32(v) for v in (m, n, k, k, pad, pad)]
    start(name, (tiles(m, name, "BLOCK_M"), tiles(n, name, "BLOCK_N")), a, b, c, *sizes, seed=seed)
    x, y = a.astype(np.float64), b[:, :n].astype(np.float64)
    bound = np.abs(x) @ np.abs(y) * (2.0**-18 if kind == np.float16 else 2.0**-9)
    assert (np.abs(c[:, :n] - x @ y) <= bound).all()
    assert (c[:, n:] == 0).all()


def flash(name: str, heads: int, n: int, **how: Any) -> list[Array]:
    """q, k, v, out and lse of causal attention."""
    depth, kind = LAUNCHES[name]["constants"]["D"], KINDS[LAUNCHES[name]["arguments"]["q"][1:]]
    q, k, v = np.random.default_rng(n).normal(size=(3, heads, n, depth)).astype(kind)
    out, lse = np.zeros((heads, n, depth), kind), np.zeros((heads, n), np.float32)
    args = (*(t.copy() for t in (q, k, v)), out, lse, np.int32(n), np.float32(depth**-0.5))
    start(name, (tiles(n, name, "BLOCK_Q"), heads), *args, **how)
    return [q, k, v, out, lse]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [1, 64, 150])
@pytest.mark.parametrize("name", ["flash_fp16", "flash_bf16"])
def test_causal_flash_attention(name: str, n: int, seed: int | None) -> None:
    q, k, v, out, lse = (t.astype(np.float64) for t in flash(name, 2, n, seed=seed))
    products = q @ k.transpose(0, 2, 1) * q.shape[2] ** -0.5
    weights = np.exp(np.where(np.tri(n, dtype=bool), products, -np.inf))
    total = weights.sum(axis=2, keepdims=True)
    step = 2.0**-8 if name == "flash_fp16" else 2.0**-5
    assert np.abs(out - weights / total @ v).max() < step
    assert np.abs(lse - np.log(total[:, :, 0])).max() < 1e-4


def test_checkers_and_another_launch_do_not_change_the_bits() -> None:
    first, again, unchecked = (flash("flash_fp16", 2, 150, check=check) for check in (1, 1, 0))
    for other in (again, unchecked):
        assert first[3].tobytes() == other[3].tobytes()
        assert first[4].tobytes() == other[4].tobytes()


def seconds(heads: int, n: int) -> float:
    """Of the process, without checkers and with rounded sums."""
    begin = time.process_time()
    flash("flash_fp16", heads, n, check=False, sums="rounded")
    return time.process_time() - begin


def test_time_grows_with_the_tiles_and_not_faster() -> None:
    few = min(seconds(8, 256) for _ in range(3))
    assert any(seconds(32, 256) < 2.5 * 4 * few for _ in range(3))


@pytest.mark.parametrize(("heads", "n", "limit"), [(1, 256, 0.1), slow(16, 1024, 1.0)])
def test_speed_targets_are_met_within_a_factor_for_busy_machines(
    heads: int, n: int, limit: float
) -> None:
    assert any(seconds(heads, n) < 2 * limit for _ in range(3))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("columns", [1, 100, 256])
def test_scan_and_argmax(columns: int, seed: int | None) -> None:
    x = np.random.default_rng(columns).integers(-99, 99, (3, columns)).astype(np.int32)
    out = np.zeros((3, columns + 1), np.int32)
    start("running_sums", (3,), x, out, np.int32(columns), seed=seed)
    assert (out[:, :columns] == x.cumsum(axis=1)).all()
    assert (out[:, columns] == x.argmax(axis=1)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_under_contention(seed: int | None) -> None:
    x = np.random.default_rng(1).integers(0, 14, 700).astype(np.int32)
    out = np.zeros(17, np.int32)
    start("histogram", (3,), x, out, np.int32(700), seed=seed)
    assert (out[:16] == np.bincount(x, minlength=16)).all()
    assert out[16] == x.max()
