"""Instructions of sm_90 besides wgmma: stmatrix, elect, setmaxnreg, clusters of one block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.shared.errors import EmulatorError
from ptx_emulator import launch
from ptx_emulator.errors import (
    BarrierDivergence,
    DeadlockError,
    LaunchArguments,
    OutOfBounds,
    RaceError,
    UnknownInstruction,
)
from ptx_emulator.machine.register_pool import registers_at_entry
from tests.ptx_emulator.test_conformance import HEADER, run_ptx
from tests.support.nvrtc_helper import compile_ptx

Array = np.ndarray[Any, Any]
SEEDS = [None, 1, 2]


# ---------------------------------------------------------------------------------- stmatrix


def stmatrix_text(count: int, trans: str) -> str:
    """Lane l stores its registers to the row that ``at[l]`` names; shared memory is copied out."""
    items = ", ".join(f"%r{i}" for i in range(count))
    loads = "".join(f"ld.global.b32 %r{i}, [%pi + {4 * i}];" for i in range(count))
    copies = "".join(
        f"ld.shared.b32 %x, [%b + {128 * i}]; st.global.b32 [%po + {128 * i}], %x;"
        for i in range(8)
    )
    return f""".visible .entry k(.param .u64 pa, .param .u64 pi, .param .u64 po) {{
        .reg .b64 %pa, %pi, %po; .reg .b32 %t, %a, %b, %x, %r<4>; .shared .align 128 .b8 s[1024];
        ld.param.u64 %pa, [pa]; ld.param.u64 %pi, [pi]; ld.param.u64 %po, [po];
        mov.u32 %t, %tid.x; mov.u32 %b, s; mad.lo.u32 %b, %t, 4, %b; mov.b32 %x, 0;
        {"".join(f"st.shared.b32 [%b + {128 * i}], %x;" for i in range(8))}
        mad.wide.u32 %pa, %t, 4, %pa; mad.wide.u32 %pi, %t, {4 * count}, %pi;
        mad.wide.u32 %po, %t, 4, %po; {loads} ld.global.b32 %a, [%pa];
        bar.sync 0;
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%a], {{{items}}};
        bar.sync 0; {copies} ret; }}"""


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_puts_each_half_where_its_lane_and_register_say(count: int, trans: str) -> None:
    """Without .trans lane l holds elements 2 (l mod 4) and the next of row l / 4 of each matrix."""
    rng = np.random.default_rng(count)
    words = rng.integers(0, 1 << 32, (32, count), dtype=np.uint64).astype(np.uint32)
    rows = rng.permutation(64)[:32]
    out = np.zeros(256, np.uint32)
    run_ptx(stmatrix_text(count, trans), "k", 1, 32, (16 * rows).astype(np.uint32), words, out)
    want = np.zeros((64, 8), np.uint16)
    halves = words.view(np.uint16).reshape(32, count, 2)
    for lane in range(32):
        for matrix in range(count):
            for half in range(2):
                row, column = lane // 4, 2 * (lane % 4) + half
                if trans:
                    row, column = column, row
                want[rows[8 * matrix + row], column] = halves[lane, matrix, half]
    assert (out.view(np.uint16).reshape(64, 8) == want).all()


def test_stmatrix_counts_its_bytes_and_conflicts() -> None:
    for stride, wavefronts in ((16, 4), (32, 8)):
        rows = (stride * np.arange(32)).astype(np.uint32)
        words, out = np.zeros((32, 4), np.uint32), np.zeros(256, np.uint32)
        counters = run_ptx(stmatrix_text(4, ""), "k", 1, 32, rows, words, out, profile=True)
        totals = dict(counters.by_instruction())
        (mine,) = (t for text, t in totals.items() if text.startswith("stmatrix"))
        assert (mine.shared_bytes, mine.wavefronts, mine.wavefronts_least) == (512, wavefronts, 4)


def test_stmatrix_outside_shared_memory_is_refused() -> None:
    rows = np.full(32, 1024, np.uint32)
    with pytest.raises(OutOfBounds, match="shared"):
        run_ptx(
            stmatrix_text(1, ""), "k", 1, 32, rows, np.zeros(32, np.uint32), np.zeros(256, "u4")
        )


def test_stmatrix_takes_part_in_races() -> None:
    text = stmatrix_text(1, "").replace("bar.sync 0; ld.shared", "ld.shared")
    rows = (16 * np.arange(64)).astype(np.uint32) % 512
    words, out = np.zeros(64, np.uint32), np.zeros(512, np.uint32)
    with pytest.raises(RaceError):
        run_ptx(text, "k", 1, 64, rows, words, out)


# ----------------------------------------------------------------------------- CUDA material

CUDA = r"""
typedef unsigned u;
#define T threadIdx.x
#define KERNEL(threads, name) \
  extern "C" __global__ void __launch_bounds__(threads) name(const int* in, int* out)
#define DEC(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(n))
#define INC(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(n))
#define BARRIER(text, id, n) asm volatile("barrier." text " %0, %1;" :: "n"(id), "n"(n) : "memory")

KERNEL(128, elected) {
  for (int group = 0; group < 4; ++group)
    if (in[2 * T] == group) {
      u chosen;
      asm volatile("{ .reg .pred p; elect.sync _|p, %1; selp.b32 %0, 1, 0, p; }"
                   : "=r"(chosen) : "r"(in[2 * T + 1]));
      out[T] = chosen;
    }
}
KERNEL(384, exchanged) {
  if (T < 128) { DEC(24); out[T] = in[T]; }
  else if (T < 256) { INC(240); out[T] = 2 * in[T]; }
  else { INC(240); out[T] = 3 * in[T]; }
}
KERNEL(384, too_greedy) {
  if (T < 128) DEC(24); else INC(248);                              // GREEDY
  out[T] = 1;
}
KERNEL(384, wrong_direction) {
  DEC(176);                                                         // DIRECTION
  out[T] = 1;
}
KERNEL(384, part_of_a_group) {
  if (T < 96) DEC(24);                                              // PART
  __syncthreads();
  out[T] = 1;
}
extern "C" __global__ void without_bounds(const int* in, int* out) { INC(240); out[T] = 1; }
KERNEL(256, producer_and_consumer) {
  __shared__ int s[128];
  for (int i = 0; i < 3; ++i) {
    if (T < 128) {
      if (i) BARRIER("cta.sync", 2, 256);
      s[T] = in[T] + i;
      BARRIER("cta.arrive", 1, 256);
    } else {
      BARRIER("sync.aligned", 1, 256);
      out[128 * i + T - 128] = s[255 - T];
      if (i < 2) BARRIER("arrive", 2, 256);
    }
  }
}
KERNEL(64, lone_cluster) {
  __shared__ int s[64];
  u rank, count, mapped, here = (u)__cvta_generic_to_shared(s + T), of;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(here), "r"(in[0]));
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(of) : "r"(mapped));
  for (int i = 0; i < 2; ++i) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(mapped), "r"(T + 100 * i) : "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    out[64 * i + T] = s[63 - T] + 1000 * (count + rank + of);
    asm volatile("fence.acq_rel.cluster;\nbarrier.cluster.arrive.relaxed;\n"
                 "barrier.cluster.wait;" ::: "memory");
  }
}
KERNEL(64, arrives_only) {
  __shared__ int s[64];
  s[T] = T;
  asm volatile("barrier.cluster.arrive;" ::: "memory");
  out[T] = s[63 - T];
  asm volatile("barrier.cluster.wait;" ::: "memory");
}
KERNEL(64, arrives_twice) {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.arrive;" ::: "memory");
  out[T] = 1;
}
KERNEL(64, one_warp_never_arrives) {
  if (T < 32) {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
  } else asm volatile("bar.sync 1, 64;" ::: "memory");
  out[T] = 1;
}
KERNEL(64, leaves_early) {
  if (T < 32) return;
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
  out[T] = 1;
}
KERNEL(32, dependent) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  out[T] = in[T];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __nanosleep(20);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) pair(const int* in, int* out) { out[T] = 1; }
extern "C" __global__ void __cluster_dims__(1, 1, 1) alone(const int* in, int* out) { out[T] = 1; }
"""


def start(kernel: str, threads: int, values: Array, seed: int | None = None) -> Array:
    out = np.zeros(384, np.int32)
    launch(compile_ptx(CUDA, "sm_90a"), kernel, 1, threads, [values, out], order_seed=seed)
    return out


def line(mark: str) -> str:
    lines = CUDA.splitlines()
    return f"test.cu:{next(i for i, text in enumerate(lines) if text.endswith('// ' + mark)) + 1}:"


VALUES = np.arange(384, dtype=np.int32) + 5


def test_elect_chooses_the_lowest_member() -> None:
    """Groups of lanes that execute it apart from each other, with the mask of their group."""
    lanes = np.arange(128) % 32
    groups = np.where(np.arange(128) < 64, lanes // 8, lanes % 3)
    members = (groups[:, None] == groups.reshape(4, 32)[np.arange(128) // 32]) << np.arange(32)
    masks = members.sum(axis=1).astype(np.uint32)
    out = start("elected", 128, np.stack([groups, masks.view(np.int32)], axis=1).astype(np.int32))
    lowest = (masks & -masks.astype(np.int64)) == 1 << lanes
    assert (out[:128] == lowest).all()
    assert out.sum() == 4 + 4 + 3 + 3


# --------------------------------------------------------------------------------- setmaxnreg


@pytest.mark.parametrize("seed", SEEDS)
def test_registers_go_from_the_producer_to_the_consumers(seed: int | None) -> None:
    out = start("exchanged", 384, VALUES, seed)
    assert (out == VALUES * np.repeat([1, 2, 3], 128)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_more_registers_than_the_block_has_is_a_deadlock(seed: int | None) -> None:
    with pytest.raises(DeadlockError, match="248 per thread requested") as caught:
        start("too_greedy", 384, VALUES, seed)
    assert line("GREEDY") in str(caught.value)


def test_giving_back_more_than_there_is_is_refused() -> None:
    with pytest.raises(EmulatorError, match=r"setmaxnreg.dec raises") as caught:
        start("wrong_direction", 384, VALUES)
    assert line("DIRECTION") in str(caught.value)
    assert "168" in caught.value.numbers


@pytest.mark.parametrize("seed", SEEDS)
def test_setmaxnreg_by_a_part_of_a_warpgroup_is_named(seed: int | None) -> None:
    with pytest.raises(BarrierDivergence, match="warpgroup") as caught:
        start("part_of_a_group", 384, VALUES, seed)
    assert line("PART") in str(caught.value)


def test_without_launch_bounds_setmaxnreg_is_accepted() -> None:
    assert start("without_bounds", 128, VALUES).sum() == 128


@pytest.mark.parametrize(
    ("directives", "registers"),
    [
        (".maxntid 384", 168),
        (".maxntid 384\n.minnctapersm 1", 168),
        (".maxntid 256", 255),
        (".maxntid 128\n.minnctapersm 4", 128),
        (".reqntid 128, 4, 1", 128),
        (".maxntid 384\n.maxnreg 96", 96),
        ("", 0),
    ],
)
def test_registers_at_entry_follow_from_the_launch_bounds(directives: str, registers: int) -> None:
    from ptx_emulator import load

    text = f"{HEADER}.visible .entry k()\n{directives}\n{{ ret; }}"
    assert registers_at_entry(load(text, "k")) == registers


@pytest.mark.parametrize(
    ("threads", "decrease", "increase", "registers"),
    [(384, 40, 232, 168), (256, 24, 240, 240), (256, 24, 256, 255), (384, 24, 160, 160)],
)
def test_registers_at_entry_are_those_of_the_assembler(
    threads: int, decrease: int, increase: int, registers: int
) -> None:
    """At most the largest setmaxnreg: a block of 256 threads starts with 240 registers, not 256."""
    from flashgen.kernels.compile import compile
    from ptx_emulator import load

    source = f"""extern "C" __global__ void __launch_bounds__({threads}, 1) k(float* x) {{
      if (threadIdx.x >= 128) {{ DEC({decrease}); x[threadIdx.x] = 1; }}
      else {{ INC({increase}); x[threadIdx.x] = 2; }}
    }}"""
    macros = "\n".join(
        text for text in CUDA.splitlines() if text[:11] in ("#define DEC", "#define INC")
    )
    binary = compile(f"{macros}\n{source}", filename="k.cu", kernel="k", arch="sm_90a")
    assert binary.resources.registers == registers
    assert registers_at_entry(load(binary.ptx, "k")) == registers
    x = np.zeros(threads, np.float32)
    if threads == 256:  # 128 threads may hold what the other 128 return
        launch(binary.ptx, "k", 1, threads, [x])
        assert (x == np.repeat([2, 1], 128)).all()


# ----------------------------------------------------------------------------------- barriers


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_by_their_other_name_count_threads(seed: int | None) -> None:
    out = start("producer_and_consumer", 256, VALUES, seed).reshape(3, 128)
    for turn in range(3):
        assert (out[turn] == VALUES[127::-1] + turn).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster_of_one_block_meets_itself(seed: int | None) -> None:
    out = start("lone_cluster", 64, np.zeros(1, np.int32), seed)
    for turn in range(2):
        assert (out[64 * turn : 64 * turn + 64] == np.arange(64)[::-1] + 100 * turn + 1000).all()


def test_another_rank_of_the_cluster_is_refused() -> None:
    with pytest.raises(EmulatorError, match="another block of the cluster"):
        start("lone_cluster", 64, np.ones(1, np.int32))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kernel", "error", "words"),
    [
        ("arrives_only", RaceError, "not ordered"),
        ("arrives_twice", EmulatorError, "arrives twice"),
        ("one_warp_never_arrives", DeadlockError, "warps 1 have not arrived"),
    ],
)
def test_misuse_of_the_cluster_barrier_is_named(
    kernel: str, error: type[EmulatorError], words: str, seed: int | None
) -> None:
    with pytest.raises(error) as caught:
        start(kernel, 64, VALUES, seed)
    assert words in str(caught.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_that_have_left_do_not_hold_up_the_cluster(seed: int | None) -> None:
    assert start("leaves_early", 64, VALUES, seed).sum() == 32


def test_a_grid_has_whole_clusters() -> None:
    assert start("alone", 32, VALUES).sum() == 32
    with pytest.raises(LaunchArguments, match="whole clusters"):
        start("pair", 32, VALUES)


def test_dependent_launches_are_accepted() -> None:
    assert (start("dependent", 32, VALUES)[:32] == VALUES[:32]).all()


# ----------------------------------------------------------------------------------- refusals

FOUR = "{%f0, %f1, %f2, %f3}"
KNOWN = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {FOUR}, %a, %a, %p, 1, 1, 0, 0"


@pytest.mark.parametrize("instruction", [
    KNOWN.replace(".m64n8k16", ".m64n12k16"), KNOWN.replace(".m64n8k16", ".m64n264k16"),
    KNOWN.replace("m64n8k16", "m64n8k8"), KNOWN.replace("f16.f16", "f16.bf16"),
    KNOWN.replace("f16.f16", "s8.s8"), KNOWN.replace(".f32.f16", ".f64.f16"),
    KNOWN.replace("mma_async", "mma_async.sp"), KNOWN.replace("1, 1, 0, 0", "1, 2, 0, 0"),
    KNOWN.replace("1, 1, 0, 0", "1, 1, 0"), KNOWN.replace(FOUR, "{%f0, %f1}"),
    KNOWN.replace(FOUR, "{%f0, %f0, %f1, %f2}"),
    KNOWN.replace("m64n8k16.f32.f16.f16", "m64n8k8.f32.tf32.tf32"),
    "wgmma.wait_group.sync.aligned 64", "wgmma.fence", "setmaxnreg.inc.sync.aligned.u32 20",
    "setmaxnreg.inc.sync.aligned.u32 28", "setmaxnreg.dec.sync.aligned.u32 264",
    "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r0], {%r0}", "griddepcontrol.other",
])  # fmt: skip
def test_what_is_not_emulated_is_refused_by_name(instruction: str) -> None:
    text = f""".visible .entry k() {{ .reg .f32 %f<4>; .reg .b32 %r<2>; .reg .b64 %a; .reg .pred %p;
        mov.b64 %a, 0; mov.b32 %r0, 0; setp.eq.u32 %p, %r0, 0; {instruction}; ret; }}"""
    opcode = instruction.split()[0]
    with pytest.raises(UnknownInstruction) as caught:
        run_ptx(text, "k", 1, 128)
    assert opcode in caught.value.what
