"""The kernels of benchmarks/overrides are those that are emitted, but for their clusters."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import BackwardRun, Report
from ptx_emulator.errors import LaunchArguments
from tests.support.examples import spec_path
from tests.support.judged import Call
from tests.support.planted import caught
from tests.support.shapes import Case
from tests.support.tiers import one_in

FOLDER = Path(__file__).parents[2] / "benchmarks" / "overrides"
ARCH = "sm_90a"
BYTES_OF_A_STEP = 80 * 128 * 4  # of dQ, float32
MOST_SHARED = 232_448  # of a block, with the static part
SPECS = ("causal", "full")


def override(name: str) -> Path:
    return FOLDER / f"{name}_backward_fused_bf16_d128_{ARCH}.cu"


@functools.cache
def call(name: str, seq_q: int, seq_k: int, heads_q: int = 1, heads_kv: int = 1) -> Call:
    case = Case(seq_q, seq_k, 1, heads_q, heads_kv, "bfloat16", 128)
    spec = fg.load(spec_path(name)).replace(dtype="bfloat16", head_dim=128)
    return Call(spec, case.tensors(), arch=ARCH)


def fused(run: BackwardRun) -> Report:
    (found,) = (each for each in run.reports if each.kernel.facts.kernel == "fused")
    return found


def added(run: BackwardRun) -> int:
    """Bytes that the fused kernel adds to the sums of dQ: it writes those of dK and dV besides."""
    written = fused(run).counters.global_write_bytes
    return written - run.dk.nbytes - run.dv.nbytes


def steps(of: Call, keys: int) -> int:
    """Tiles of 80 queries that ranges of so many keys reach, over all query heads."""
    (_, heads, seq_q, _), seq_k = of.qkv[0].shape, of.qkv[1].shape[2]
    reached = [k if of.spec.name == "causal" else 0 for k in range(0, seq_k, keys)]
    return heads * sum(-(-seq_q // 80) - first // 80 for first in reached if first < seq_q)


@pytest.mark.parametrize("name", SPECS)
def test_their_base_is_the_file_that_is_emitted_now(name: str) -> None:
    """A kernel that has changed since is none to measure them beside: they are edited anew."""
    emitted = fg.emit(call(name, 1, 1).spec, arch=ARCH).backward
    (base,) = (each for each in emitted if each.filename == override(name).name)
    digest = hashlib.sha256(base.text.encode()).hexdigest()[:32]
    assert f"\n// base      sha256 {digest} of that file\n" in override(name).read_text()


CASES = [
    ("full", 100, 256), ("causal", 256, 256), ("causal", 300, 250, 2, 1), ("causal", 500, 500),
    ("causal", 500, 500, 4, 2), ("causal", 1024, 1024), ("causal", 100, 500),
    ("full", 300, 250, 2, 1), ("full", 230, 500),
]  # fmt: skip


@pytest.mark.parametrize("case", one_in(len(CASES), ((each,) for each in CASES)), ids=str)
def test_they_give_the_gradients_of_the_emitted_kernel_with_fewer_bytes(
    case: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = call(*case)
    own = of.backward()
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(override(case[0])))
    run = of.judged_backward()
    assert torch.equal(run.dk, own.dk)
    assert torch.equal(run.dv, own.dv)
    assert added(own) == steps(of, 128) * BYTES_OF_A_STEP
    assert added(run) == steps(of, 256) * BYTES_OF_A_STEP
    build = fused(run).kernel
    resources = build.binary.resources
    assert build.binary.warnings == (f"compiled from FLASHGEN_OVERRIDE={override(case[0])}",)
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    assert build.plan.smem_bytes + resources.static_smem_bytes <= MOST_SHARED


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", SPECS)
def test_they_run_in_every_order(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(override(name)))
    call(name, 300, 250, 2, 1).judged_backward(order_seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_a_launch_of_half_a_cluster_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(override(name)))
    with pytest.raises(LaunchArguments, match="whole clusters"):
        call(name, 300, 300).backward()


@pytest.mark.slow
def test_an_odd_number_of_tiles_in_an_even_grid_traps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads alternate: clusters would be whole, but not of one head."""
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(override("causal")))
    with caught("trap"):
        call("causal", 300, 300, 2, 2).backward()


ANNOUNCE = "barrier_announce(inbox_full[warp], DQ_HALF);"
BUGS = {
    "more bytes announced than arrive in the inbox":
        (ANNOUNCE, ANNOUNCE.replace("HALF", "HALF + 16"), "Deadlock"),
    "one store of a warp is not announced":
        (ANNOUNCE, ANNOUNCE.replace("HALF", "HALF - 512"), "Race"),
    "one store of a lane is not announced":
        (ANNOUNCE, ANNOUNCE.replace("HALF", "HALF - 16"), "ends within an st.async"),
    "the inbox is overwritten before it is read":
        ("    barrier_wait(outbox_empty[warp], exchange ^ 1);\n", "", "Race"),
    "the inbox is read before it is written":
        ("    barrier_wait(inbox_full[warp], exchange);\n", "", "Race"),
    "a block exits before the last read of its partner":
        ("  cluster_wait();  // until", "  //", "may exit before"),
    "barriers are used before the other block has initialised them":
        ("  cluster_arrive();\n  cluster_wait();\n", "  __syncthreads();\n", "initialisation"),
    "Q is overwritten before the other block has read it":
        ("barrier_init(q_empty[i], CLUSTER * 4", "barrier_init(q_empty[i], 4", "two phases ahead"),
    "dO is overwritten before the other block has read it":
        ("barrier_init(do_empty[i], CLUSTER * ", "barrier_init(do_empty[i], ", "two phases ahead"),
    "the other block never learns that Q is read":
        ("if (lane < CLUSTER) barrier_arrive_in(lane, q_",
         "if (lane == 0) barrier_arrive_in(cluster_rank(), q_", "Deadlock"),
    "each block walks its own tiles": ("p.k_offset + k_pair;", "p.k_offset + k_start;", "Deadlock"),
    "the sum is added to the other block's queries":
        ("cluster_rank() * (DQ_HALF / 4)", "(1 - cluster_rank()) * (DQ_HALF / 4)", "dq"),
    "a block keeps the half that it sends":
        ("    if (rank == 0) add_half<0>", "    if (rank != 0) add_half<0>", "dq"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, kind = BUGS[bug]
    text = override("causal").read_text()
    assert text.count(old) == 1
    path = tmp_path / override("causal").name
    path.write_text(text.replace(old, new))
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(path))
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "off")
    of = call("causal", 300, 250)
    if kind == "dq":
        with pytest.raises(AssertionError, match="dq"):
            of.judged_backward()
        return
    with caught(kind) as error:
        of.backward()
    assert "fused" in error.value.where
