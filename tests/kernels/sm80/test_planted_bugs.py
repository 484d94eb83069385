"""Bugs planted in the kernels of the sm_80 path are caught by the emulator's checkers, and named.

Every mutation is a change that a person could make by mistake; unchanged, the kernels run in every
order of warps and blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import flashgen as fg
from tests.support.examples import spec_path
from tests.support.judged import Call
from tests.support.planted import caught, planted
from tests.support.shapes import Case
from tests.support.tiers import one_in, slow

pytestmark = pytest.mark.usefixtures("rounded_sums")

CAUSAL = fg.load(spec_path("causal"))
BACKWARD = ("fused", "dkdv", "dq")
SEEDS = [None, slow(1), slow(2)]

SYNC = "    __syncthreads();\n"
OUTER_SYNC = "  __syncthreads();\n"
WAIT = "    copy_wait_all();\n"
DONE_WITH_DO = "very warp is done with dO"


@functools.cache
def call(head_dim: int = 16, head_dim_v: int = 16, heads_kv: int = 1, length: int = 150) -> Call:
    """Two tiles of queries and of keys at the least, the last of both ragged."""
    spec = CAUSAL.replace(head_dim=head_dim, head_dim_v=head_dim_v)
    return Call(
        spec, Case(length, length, 1, 2, heads_kv, "float16", head_dim, head_dim_v).tensors()
    )


def run(kernel: str, of: Call, seed: int | None = None) -> tuple[torch.Tensor, ...]:
    """The results of the pass that has this kernel."""
    if kernel == "forward":
        forward = of.forward(order_seed=seed)
        return forward.out, forward.lse
    backward = of.backward(deterministic=kernel in ("dkdv", "dq"), order_seed=seed)
    return backward.dq, backward.dk, backward.dv


def check(
    kernel: str, bug: tuple[str, str, str], kind: str, of: Call | None = None, seed: Any = None
) -> fg.EmulatorError:
    """A bug is what it stands behind, what is replaced, and by what."""
    after, old, new = bug
    one_head_per_tile = call(heads_kv=2) if kernel == "forward" else call()
    with planted(kernel, old, new, after), caught(kind) as error:
        run(kernel, of or one_head_per_tile, seed)
    found: fg.EmulatorError = error.value
    assert kernel in found.where
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "fused", "dkdv"])
def test_the_kernels_without_a_planted_bug_run_in_every_order(kernel: str) -> None:
    """The pass that has "dkdv" has "dq" too."""
    first = run(kernel, call())
    for seed in (1, 2):
        # The sums of dQ of the fused kernel are added in the order of the blocks.
        same = map(torch.equal, run(kernel, call(), seed), first)
        assert list(same)[kernel == "fused" :] == [True] * (len(first) - (kernel == "fused"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kernel", "step"),
    [
        *one_in(2, (("forward", step) for step in ("// 5a.", "// 5c."))),
        *one_in(
            3,
            ((kernel, step) for kernel in ("fused", "dkdv") for step in ("// 5a.", DONE_WITH_DO)),
        ),
    ],
)
def test_a_removed_barrier_is_a_race_named_at_both_lines(
    kernel: str, step: str, seed: int | None
) -> None:
    error = check(kernel, (step, SYNC, ""), "RaceError", seed=seed)
    assert "_sm_80.cu:" in error.where
    assert "_sm_80.cu:" in error.numbers
    if "cp.async is still writing" in str(error):  # in some orders the copy has not arrived
        assert error.way_out.endswith("then pass a barrier")
        return
    if "lanes of one warp" in str(error):  # the barrier also orders the lanes of each warp
        assert "__syncwarp" in error.way_out
        return
    assert "not ordered" in str(error) or "may overtake" in str(error)
    assert error.way_out.startswith("separate the two accesses by a barrier")


@pytest.mark.parametrize(
    ("kernel", "step"),
    one_in(
        2, [("forward", "// 5c."), ("forward", "// 5a."), *((each, "// 5a.") for each in BACKWARD)]
    ),
)
def test_a_missing_wait_for_a_copy_is_seen(kernel: str, step: str) -> None:
    error = check(kernel, (step, WAIT, ""), "RaceError")
    assert "cp.async.cg.shared.global" in str(error)
    assert "still writing" in str(error)
    assert "ldmatrix" in error.where


# Rows of O that are much longer than those of Q are staged over V, which others still read; warps
# exchange scores where each has a part of the columns.
@pytest.mark.parametrize(
    ("kernel", "step", "barrier", "dims"),
    [
        slow("forward", "// 6.", OUTER_SYNC, (8, 64)),
        slow("dkdv", "// 5e.", SYNC, (192, 192, 1, 70)),
        ("fused", "// 7.", OUTER_SYNC, (64, 64)),
    ],
)
def test_a_missing_barrier_where_shared_memory_is_used_anew_is_a_race(
    kernel: str, step: str, barrier: str, dims: tuple[int, ...]
) -> None:
    run(kernel, call(*dims))
    check(kernel, (step, barrier, ""), "RaceError", call(*dims))


@pytest.mark.parametrize(
    ("kernel", "bug"),
    [
        ("forward", ("load_tile(unsigned tile", "r < valid_rows - p", "r <= valid_rows - p")),
        ("forward", ("// 7.", "lane % 4 == 0 && q_row < p.seq_q", "lane % 4 == 0")),
        ("fused", ("void store_rows(", "row < valid_rows", "row <= valid_rows")),
        ("fused", ("void load_rows(", "i < valid ? 8", "i <= valid ? 8")),
        ("fused", ("// 5i.", "+ lane;", "+ lane + 100000;")),
    ],
    ids=["a row of K", "a row of LSE", "a row of a gradient", "a row's LSE", "a sum of dQ"],
)
def test_an_access_past_the_end_is_out_of_bounds(kernel: str, bug: tuple[str, str, str]) -> None:
    check(kernel, bug, "OutOfBounds")


def test_a_store_one_row_past_the_end_is_out_of_bounds_and_named() -> None:
    error = check("forward", ("// 8.", "row < p.seq_q", "row <= p.seq_q"), "OutOfBounds")
    assert "st.global.v4.b32" in error.where
    assert "lane" in error.where
    assert "store outside every buffer" in error.what
    assert "argument" in error.numbers
    # The compiler attributes a statement over two lines to one or the other of them.
    source = fg.emit(call().spec).forward
    lines = source.text.splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "st.global.v4.b32" in text)
    assert any(f"{source.filename}:{n}, inlined at" in error.where for n in (line, line + 1))


def test_a_barrier_inside_a_divergent_branch_is_named() -> None:
    half = ("// 6.", "  copy_wait_all();\n", "  if (lane < 16) __syncthreads();\n")
    error = check("forward", half, "BarrierDivergence")
    assert "bar.sync" in error.where
    assert "a part of a warp" in error.what
    assert "lanes 0-15" in str(error)


def test_a_barrier_for_too_many_threads_is_a_deadlock_that_names_the_waiting_warps() -> None:
    wait = '  if (warp != 3) asm volatile("bar.sync 1, 128;" ::: "memory");\n'
    error = check("forward", ("// 6.", "  copy_wait_all();\n", wait), "DeadlockError")
    assert "waits at barrier 1: 96 of 128 threads have arrived" in error.numbers
    assert "waits at barrier 0: 32 of 128" in error.numbers


@pytest.mark.parametrize("deterministic", [False, slow(True)])
@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_a_window_that_are_read_before_all_lanes_added_to_them_are_a_race_of_lanes(
    deterministic: bool, seed: int | None
) -> None:
    spec = fg.load(spec_path("relative_bias")).replace(head_dim=16)
    tensors = {"table": torch.randn(300, generator=torch.Generator().manual_seed(3))}
    of = Call(spec, Case(150, 150, 1, 2, 1, "float16", 16).tensors(), {"tensors": tensors})
    bug = ("captured", "    __syncwarp();\n", "", "The warp's sums, to global memory")
    with planted(*bug), caught("lanes of one warp write and read the same bytes") as error:
        of.backward(deterministic=deterministic, order_seed=seed)
    assert "ld.shared" in error.value.where
    assert "atom.shared.add" in error.value.numbers
    assert "execute __syncwarp()" in error.value.way_out


def test_a_tile_that_was_not_loaded_is_an_uninitialised_read() -> None:
    never = ("    load_tile<BLOCK_Q>(", "load_tile<BLOCK_Q>(", "if (false) load_tile<BLOCK_Q>(")
    error = check("forward", never, "UninitialisedRead")
    assert "ldmatrix" in error.where
    assert "shared memory is read that was never written" in error.what


@pytest.mark.parametrize(("kernel", "index"), [("forward", "tile"), slow("fused", "next_tile")])
def test_a_loop_that_never_ends_meets_the_step_limit(kernel: str, index: str) -> None:
    check(kernel, ("// 5. Main loop", f"    ++{index};\n", ""), "StepLimit")


def test_a_misaligned_16_byte_access_is_named() -> None:
    place = "16 * (threadIdx.x % G)"
    bug = ("struct CopyPlace", place, place + " + 2")
    check("forward", bug, "Misaligned", call(64, 64))
