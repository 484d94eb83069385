"""Bugs planted in the emitted backward kernels are caught by the emulator's checkers, and named.

Each test changes the text of a kernel, as a template could be broken by mistake; unchanged, it runs
in every order.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen import emulator
from flashgen.codegen import Source
from flashgen.compile import compile
from flashgen.runtime.bound_kernel import span
from tests.support.paths import ROOT
from tests.support.tiers import slow

SPEC = fg.load(ROOT / "specs/causal.py")
HEADS_Q, HEADS_KV, SEQ = 2, 1, 150  # ragged tiles on both sides

SYNC = "    __syncthreads();\n"
WAIT = "    copy_wait_all();\n"


@functools.cache
def kernel(role: str, head_dim: int = 64) -> Source:
    spec = SPEC.replace(head_dim=head_dim)
    for deterministic in (False, True):
        for source in fg.emit(spec, deterministic=deterministic).backward:
            if source.role == role:
                return source
    raise AssertionError(f"no kernel {role} at head dim {head_dim}")


def tensors_of(source: Source) -> dict[str, torch.Tensor]:
    """Random operands and uninitialised results by the names of their fields."""
    generator = torch.Generator().manual_seed(0)
    dim = source.plan.head_dim
    made = {
        name: torch.randn(1, heads, SEQ, dim, generator=generator).half()
        for name, heads in (("q", HEADS_Q), ("k", HEADS_KV), ("v", HEADS_KV))
    }
    made |= {
        name: torch.randn(1, HEADS_Q, SEQ, dim, generator=generator).half() for name in ("o", "do")
    }
    made |= {f"d{name}": torch.empty_like(made[name]) for name in "qkv"}
    made["rows"] = torch.rand(1, HEADS_Q, SEQ, 2, generator=generator) + 8
    made["lse"] = torch.rand(1, HEADS_Q, SEQ, generator=generator)
    groups = -(-SEQ // source.plan.block_q) * source.plan.block_q // 16
    made["dq_sum"] = torch.zeros(1, HEADS_Q, groups, dim // 8, 4, 32)
    return made


def run(text: str, source: Source, order_seed: int | None = None) -> torch.Tensor:
    """Compile the text of the kernel, run it, and return what it wrote."""
    binary = compile(text, filename=source.filename, kernel=source.name, arch="sm_80")
    tensors = tensors_of(source)
    numbers: dict[str, Any] = {
        "batch": 1,
        "heads_q": HEADS_Q,
        "heads_kv": HEADS_KV,
        "seq_q": SEQ,
        "seq_k": SEQ,
        "q_offset": 0,
        "k_offset": 0,
        "scale": 0.125,
        "head_bits": 0,
    }
    for name, tensor in tensors.items():
        for axis, stride in zip("bhn", tensor.stride()[:3], strict=False):
            numbers[f"{name}_stride_{axis}"] = stride
    kinds = {"int64": np.int64, "int32": np.int32, "float32": np.float32}
    values = [
        (span(tensors[p.name]) if p.name in tensors else None)
        if p.ctype == "pointer"
        else kinds[p.ctype](numbers[p.name])
        for p in source.params
    ]
    emulator.launch(
        binary.ptx,
        source.name,
        source.plan.grid(1, HEADS_Q, HEADS_KV, SEQ, SEQ),
        (source.plan.threads, 1, 1),
        [tuple(values)],
        shared_bytes=source.plan.smem_bytes,
        order_seed=order_seed,
        step_limit=5_000,
    )
    return tensors[{"dq": "dq", "delta": "rows"}.get(source.role, "dk")]


def planted(source: Source, after: str, old: str, new: str) -> str:
    """The kernel with the first ``old`` behind the text ``after`` replaced."""
    start = source.text.index(after)
    place = source.text.index(old, start)
    return source.text[:place] + new + source.text[place + len(old) :]


def caught(source: Source, text: str, kind: str, seed: int | None = None) -> fg.EmulatorError:
    with pytest.raises(fg.EmulatorError) as error:
        run(text, source, seed)
    assert type(error.value).__name__ == kind, str(error.value)
    assert source.name in error.value.where
    assert error.value.numbers
    assert error.value.way_out
    return error.value


WALKING = ("fused", "dkdv", "dq")


@pytest.mark.parametrize("role", ["delta", *WALKING])
def test_the_kernels_without_a_planted_bug_run_in_every_order(role: str) -> None:
    source = kernel(role)
    first = run(source.text, source)
    for seed in (1, 2):
        assert torch.equal(run(source.text, source, seed), first)


@pytest.mark.parametrize("seed", [None, slow(1)])
@pytest.mark.parametrize("step", ["// 5a.", "very warp is done with dO"])
@pytest.mark.parametrize("role", ["fused", "dkdv"])
def test_a_removed_barrier_of_the_main_loop_is_a_race(
    role: str, step: str, seed: int | None
) -> None:
    source = kernel(role)
    error = caught(source, planted(source, step, SYNC, ""), "RaceError", seed)
    assert f"{source.filename}:" in error.where
    assert f"{source.filename}:" in error.numbers


@pytest.mark.parametrize("role", WALKING)
def test_a_missing_wait_for_copies_is_seen(role: str) -> None:
    source = kernel(role)
    error = caught(source, planted(source, "// 5a.", WAIT, ""), "RaceError")
    assert "cp.async" in str(error)


def test_scores_that_warps_exchange_without_a_barrier_are_a_race() -> None:
    source = kernel("dkdv", 256)
    assert source.plan.column_warps > 1
    caught(source, planted(source, "// 5e.", SYNC, ""), "RaceError")


def test_gradients_stored_without_a_barrier_behind_their_staging_are_a_race() -> None:
    source = kernel("fused")
    caught(source, planted(source, "// 7.", "  __syncthreads();\n", ""), "RaceError")


def test_a_gradient_row_past_the_end_is_out_of_bounds() -> None:
    source = kernel("fused")
    text = planted(source, "void store_rows(", "row < valid_rows", "row <= valid_rows")
    caught(source, text, "OutOfBounds")


def test_a_row_of_lse_past_the_end_is_out_of_bounds() -> None:
    source = kernel("fused")
    text = planted(source, "void load_rows(", "i < valid ? 8", "i <= valid ? 8")
    caught(source, text, "OutOfBounds")


def test_a_sum_of_dq_past_the_end_is_out_of_bounds() -> None:
    source = kernel("fused")
    caught(source, planted(source, "// 5i.", "+ lane;", "+ lane + 100000;"), "OutOfBounds")


@pytest.mark.slow
def test_a_loop_over_query_tiles_that_never_ends_meets_the_step_limit() -> None:
    source = kernel("fused")
    caught(source, planted(source, "// 5. Main loop", "    ++next_tile;\n", ""), "StepLimit")
