"""Bugs planted in an emitted kernel, and the report of the emulator's checkers on each.

Every mutation is a change that a person could make by mistake; the unchanged kernel runs.
"""

from __future__ import annotations

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
SOURCE = fg.emit(SPEC).forward
SEQ = 200  # two query tiles and a ragged last key tile


def run(text: str, *, source: Source = SOURCE, order_seed: int | None = None) -> torch.Tensor:
    """Compile the text of the kernel and run it on random operands."""
    binary = compile(text, filename=source.filename, kernel=source.name, arch="sm_80")
    generator = torch.Generator().manual_seed(0)
    dims = (source.plan.head_dim, source.plan.head_dim, source.plan.head_dim_v)
    q, k, v = (torch.randn(1, 2, SEQ, dim, generator=generator).half() for dim in dims)
    out, lse = torch.empty_like(v), torch.empty(1, 2, SEQ)
    tensors = {"q": q, "k": k, "v": v, "o": out, "lse": lse}
    values: dict[str, Any] = {name: span(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        for axis, stride in zip("bhn", tensor.stride()[:3], strict=True):
            values[f"{name}_stride_{axis}"] = np.int64(stride)
    sizes = {"heads_q": 2, "heads_kv": 2, "seq_q": SEQ, "seq_k": SEQ, "q_offset": 0, "k_offset": 0}
    values |= {name: np.int32(size) for name, size in {**sizes, "head_bits": 0}.items()}
    values["scale"] = np.float32(64**-0.5)
    emulator.launch(
        binary.ptx,
        source.name,
        source.plan.grid(1, 2, 2, SEQ, SEQ),
        (source.plan.threads, 1, 1),
        [tuple(values[param.name] for param in source.params)],
        shared_bytes=source.plan.smem_bytes,
        order_seed=order_seed,
        step_limit=5_000,
    )
    return out


def planted(after: str, old: str, new: str, source: Source = SOURCE) -> str:
    """The kernel with the first ``old`` behind the text ``after`` replaced."""
    start = source.text.index(after)
    place = source.text.index(old, start)
    return source.text[:place] + new + source.text[place + len(old) :]


def line_of(text: str, part: str, after: str = "") -> int:
    return text[: text.index(part, text.index(after))].count("\n") + 1


def caught(
    text: str, kind: str, seed: int | None = None, source: Source = SOURCE
) -> fg.EmulatorError:
    with pytest.raises(fg.EmulatorError) as error:
        run(text, source=source, order_seed=seed)
    assert type(error.value).__name__ == kind, str(error.value)
    assert source.name in error.value.where
    assert error.value.numbers
    assert error.value.way_out
    return error.value


@pytest.mark.parametrize("seed", [None, 1, slow(2)])
def test_the_kernel_without_a_planted_bug_runs_in_every_order(seed: int | None) -> None:
    assert torch.equal(run(SOURCE.text, order_seed=seed), run(SOURCE.text))


SYNC = "    __syncthreads();\n"
WAIT = "    copy_wait_all();\n"


@pytest.mark.parametrize("seed", [None, slow(1), slow(2)])
@pytest.mark.parametrize("step", ["// 5a.", "// 5c."])
def test_a_removed_barrier_is_a_race_named_at_both_lines(step: str, seed: int | None) -> None:
    text = planted(step, SYNC, "")
    error = caught(text, "RaceError", seed)
    assert f"{SOURCE.filename}:" in error.where
    assert f"{SOURCE.filename}:" in error.numbers


@pytest.mark.parametrize("step", ["// 5a.", "// 5c."])
def test_a_missing_wait_for_a_copy_is_seen(step: str) -> None:
    error = caught(planted(step, WAIT, ""), "RaceError")
    assert "cp.async" in str(error)
    assert "ldmatrix" in str(error)


def test_a_missing_barrier_before_the_output_is_staged_is_a_race() -> None:
    # Rows of O that are much longer than those of Q are staged over V, which others still read.
    source = fg.emit(SPEC.replace(head_dim=8, head_dim_v=64)).forward
    run(source.text, source=source)
    caught(planted("// 6.", "  __syncthreads();\n", "", source), "RaceError", source=source)


def test_a_store_one_row_past_the_end_is_out_of_bounds_and_named() -> None:
    text = planted("// 8.", "row < p.seq_q", "row <= p.seq_q")
    error = caught(text, "OutOfBounds")
    assert "st.global.v4.b32" in error.where
    # The compiler attributes a statement over two lines to one or the other of them.
    line = line_of(text, 'asm volatile("st.global.v4.b32')
    places = [f"{SOURCE.filename}:{n}, inlined at" for n in (line, line + 1)]
    assert any(place in error.where for place in places)


def test_a_load_one_row_past_the_end_is_out_of_bounds() -> None:
    text = planted(
        "load_tile(unsigned tile", "r < valid_rows - place.row", "r <= valid_rows - place.row"
    )
    caught(text, "OutOfBounds")


def test_an_lse_without_its_row_test_is_out_of_bounds() -> None:
    caught(planted("// 7.", "lane % 4 == 0 && q_row < p.seq_q", "lane % 4 == 0"), "OutOfBounds")


def test_a_barrier_inside_a_divergent_branch_is_named() -> None:
    text = planted("// 6.", "  copy_wait_all();\n", "  if (lane < 16) __syncthreads();\n")
    error = caught(text, "BarrierDivergence")
    assert "bar.sync" in error.where
    assert "a part of a warp" in error.what


def test_a_barrier_for_too_many_threads_is_a_deadlock_that_names_the_waiting_warps() -> None:
    wait = '  if (warp != 3) asm volatile("bar.sync 1, 128;" ::: "memory");\n'
    error = caught(planted("// 6.", "  copy_wait_all();\n", wait), "DeadlockError")
    assert "waits at barrier 1: 96 of 128 threads have arrived" in error.numbers
    assert "waits at barrier 0: 32 of 128" in error.numbers


def test_a_tile_that_was_not_loaded_is_an_uninitialised_read() -> None:
    start = SOURCE.text.index("    load_tile<BLOCK_Q>(")
    end = SOURCE.text.index("    load_tile<BLOCK_K>(", start)
    error = caught(SOURCE.text[:start] + SOURCE.text[end:], "UninitialisedRead")
    assert "ldmatrix" in error.where


def test_a_loop_that_never_ends_meets_the_step_limit() -> None:
    caught(planted("// 5. Main loop", "    ++tile;\n", ""), "StepLimit")


def test_a_misaligned_16_byte_access_is_named() -> None:
    text = planted("struct CopyPlace", "16 * (threadIdx.x % G)", "16 * (threadIdx.x % G) + 2")
    caught(text, "Misaligned")
