"""Clusters of several blocks: ranks, distributed shared memory, remote mbarriers, multicast."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import LaunchArguments, OutOfBounds, TensorMap, launch
from ptx_emulator.errors import DeadlockError, MbarrierMisuse, RaceError
from tests.ptx_emulator.test_conformance import Array
from tests.ptx_emulator.test_conformance_planted import SEEDS, assert_reported, planted
from tests.support.hopper_ptx import PREAMBLE, hopper_ptx

CUDA = r"""
#define ARGS (MAP map, const u* in, u* out)
__device__ __forceinline__ u rank() {
    u r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r;
}
__device__ __forceinline__ u blocks() {
    u r; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r;
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() { cluster_arrive(); cluster_wait(); }
__device__ __forceinline__ u there(const void* p, u rank) {
    u at; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(SM(p)), "r"(rank));
    return at;
}
__device__ __forceinline__ u load_there(u at) {
    u x; asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory"); return x;
}
__device__ __forceinline__ void store_there(u at, u x) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(at), "r"(x) : "memory");
}
__device__ __forceinline__ void arrive_there(u at) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                 :: "r"(at) : "memory");
}
__device__ __forceinline__ void wait_cluster(ull* b, u parity) {
    asm volatile("{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"
                 " P, [%0], %1; @P bra DONE; bra AGAIN; DONE: }"
                 :: "r"(SM(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void store_async(u at, u x, u barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 :: "r"(at), "r"(x), "r"(barrier) : "memory");
}
__device__ __forceinline__ void load_all(void* to, const CUtensorMap* m, int a, int b, ull* full,
                                         unsigned short mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" :: "r"(SM(to)), "l"(m),
                 "r"(a), "r"(b), "r"(SM(full)), "h"(mask) : "memory");
}
__device__ __forceinline__ void copy_there(u to, const void* from, u bytes, u full) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];"
                 :: "r"(to), "r"(SM(from)), "r"(bytes), "r"(full) : "memory");
}
// Each block reads what the next one of its cluster wrote.
KERNEL(reads_its_neighbour) ARGS {
    __shared__ u s[64];
    s[T] = in[blockIdx.x * 64 + T];                                             // BUG
    FIX(cluster_sync();) BUG(__syncthreads();)
    out[blockIdx.x * 64 + T] = load_there(there(s + (63 - T), (rank() + 1) % blocks())); // BUG
    cluster_sync();
}
KERNEL(generic_addresses) ARGS {
    __shared__ u s[64];
    s[T] = in[blockIdx.x * 64 + T];                                             // BUG
    FIX(cluster_sync();)
    u* other;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(s), "r"((rank() + 1) % blocks()));
    out[blockIdx.x * 64 + T] = other[63 - T];                                   // BUG
    cluster_sync();
}
KERNEL(histogram_in_one_block) ARGS {
    __shared__ u s[64];
    s[T] = 0;                                                                   // BUG
    FIX(cluster_sync();)
    u old;
    asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;"                   // BUG
                 : "=r"(old) : "r"(there(s + T, 0)), "r"(in[blockIdx.x * 64 + T]) : "memory");
    cluster_sync();
    if (rank() == 0) out[blockIdx.x * 64 + T] = s[T];
}
KERNEL(exits_while_others_read, OutOfBounds) ARGS {
    __shared__ u s[64];
    s[T] = in[blockIdx.x * 64 + T];
    cluster_sync();
    if (rank() != 0) {
        for (int i = 0; i < 9; ++i) __syncthreads();
        out[blockIdx.x * 64 + T] = load_there(there(s + T, 0));                 // BUG
    }
    FIX(cluster_sync();)
}
KERNEL(overwritten_while_others_read) ARGS {
    __shared__ u s[64];
    s[T] = in[blockIdx.x * 64 + T];
    cluster_sync();
    out[blockIdx.x * 64 + T] = load_there(there(s + T, (rank() + 1) % blocks())); // BUG
    FIX(cluster_sync();)
    s[T] = 0;                                                                   // BUG
    cluster_sync();
}
KERNEL(written_before_a_relaxed_arrival) ARGS {
    __shared__ u s[64];
    cluster_sync();
    store_there(there(s + T, (rank() + 1) % blocks()), in[blockIdx.x * 64 + T]); // BUG
    FIX(asm volatile("fence.acq_rel.cluster;" ::: "memory");)
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    cluster_wait();
    out[blockIdx.x * 64 + T] = s[63 - T];                                       // BUG
    cluster_sync();
}
KERNEL(overwritten_after_a_relaxed_arrival) ARGS {
    __shared__ u s[64];
    s[T] = in[blockIdx.x * 64 + T];
    cluster_sync();
    out[blockIdx.x * 64 + T] = load_there(there(s + T, (rank() + 1) % blocks())); // BUG
    FIX(asm volatile("fence.acq_rel.cluster;" ::: "memory");)
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    cluster_wait();
    s[T] = 0;                                                                   // BUG
    cluster_sync();
}
// The fence of the initialisation releases that, and not the words of s.
KERNEL(initialised_before_a_relaxed_arrival) ARGS {
    __shared__ ull full;
    if (T == 0) { init(&full, 64); FIX(fence_init();) }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    cluster_wait();
    arrive_there(there(&full, (rank() + 1) % blocks()));                        // BUG
    wait_cluster(&full, 0);                                                     // BUG
    out[blockIdx.x * 64 + T] = in[blockIdx.x * 64 + T];
    cluster_sync();
}
KERNEL(written_before_the_fence_of_an_initialisation) ARGS {
    __shared__ u s[64];
    __shared__ ull full;
    s[T] = in[blockIdx.x * 64 + T];                                             // BUG
    if (T == 0) { init(&full, 64); fence_init(); }
    FIX(cluster_arrive();)
    BUG(asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");)
    cluster_wait();
    out[blockIdx.x * 64 + T] = load_there(there(s + 63 - T, (rank() + 1) % blocks())); // BUG
    cluster_sync();
}
// Rank 1 fills rank 0's buffer again and again; mbarriers of both ranks pass it to and fro.
KERNEL(remote_pipeline) ARGS {
    __shared__ u s[64];
    __shared__ ull full, empty;
    if (T == 0) { init(&full, 64); init(&empty, 64); fence_init(); }
    cluster_sync();
    for (int t = 0; t < 4; ++t) {
        if (rank() == 1) {
            if (t) { FIX(wait_cluster(&empty, (t - 1) & 1);) }
            store_there(there(s + T, 0), in[64 * t + T]);                       // BUG
            arrive_there(there(&full, 0));
        } else {
            wait_cluster(&full, t & 1);                                         // BUG
            out[64 * t + T] = s[63 - T];                                        // BUG
            arrive_there(there(&empty, 1));
        }
    }
    cluster_sync();
}
KERNEL(asynchronous_stores, RaceError|UninitialisedRead) ARGS {
    __shared__ u s[64];
    __shared__ ull full;
    if (T == 0) { init(&full, 1); fence_init(); expect(&full, 256); }
    cluster_sync();
    u other = (rank() + 1) % blocks();
    store_async(there(s + T, other), in[blockIdx.x * 64 + T], there(&full, other)); // BUG
    FIX(wait_cluster(&full, 0);)
    out[blockIdx.x * 64 + T] = s[63 - T];                                       // BUG
    BUG(wait_cluster(&full, 0);)
    cluster_sync();
}
KERNEL(asynchronous_stores_counted_elsewhere, MbarrierMisuse, lies in another block) ARGS {
    __shared__ u s[64];
    __shared__ ull full;
    if (T == 0) { init(&full, 1); fence_init(); expect(&full, 256); }
    cluster_sync();
    u other = (rank() + 1) % blocks(), counts = FIX(other) BUG(rank());
    store_async(there(s + T, other), in[blockIdx.x * 64 + T], there(&full, counts)); // BUG
    wait_cluster(&full, 0);
    out[blockIdx.x * 64 + T] = s[63 - T];
    cluster_sync();
}
KERNEL(asynchronous_additions, RaceError) ARGS {
    __shared__ u s[64];
    __shared__ ull full;
    s[T] = 1;                                                                   // BUG
    if (T == 0) { init(&full, 1); fence_init(); expect(&full, 512); }
    cluster_sync();
    u other = (rank() + 1) % blocks();
    for (int i = 0; i < 2; ++i)
        asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
                     ".add.u32 [%0], %1, [%2];" :: "r"(there(s + T, other)),    // BUG
                     "r"(in[blockIdx.x * 64 + T]), "r"(there(&full, other)) : "memory");
    FIX(wait_cluster(&full, 0);)
    out[blockIdx.x * 64 + T] = s[63 - T];                                       // BUG
    BUG(wait_cluster(&full, 0);)
    cluster_sync();
}
// Each block copies its numbers to the shared memory of the next one.
#define COPY_TO_NEXT \
    __shared__ __align__(128) u mine[64], s[64]; \
    __shared__ ull full; \
    const u next = (rank() + 1) % blocks(); \
    if (T == 0) { init(&full, 1); fence_init(); expect(&full, 256); }
#define COPY copy_there(there(s, next), mine, 256, there(&full, next))
KERNEL(copied_and_not_waited_for) ARGS {
    COPY_TO_NEXT;
    mine[T] = in[blockIdx.x * 64 + T];
    fence_async();
    cluster_sync();
    if (T == 0) COPY;                                                           // BUG
    FIX(wait_cluster(&full, 0);)
    out[blockIdx.x * 64 + T] = s[63 - T];                                       // BUG
    BUG(wait_cluster(&full, 0);)
    cluster_sync();
}
KERNEL(copied_without_a_proxy_fence, RaceError, proxy fence) ARGS {
    COPY_TO_NEXT;
    mine[T] = in[blockIdx.x * 64 + T];                                          // BUG
    FIX(fence_async();)
    cluster_sync();
    if (T == 0) COPY;                                                           // BUG
    wait_cluster(&full, 0);
    out[blockIdx.x * 64 + T] = s[63 - T];
    cluster_sync();
}
KERNEL(overwritten_while_a_copy_reads, RaceError, overtake an asynchronous read) ARGS {
    COPY_TO_NEXT;
    mine[T] = in[blockIdx.x * 64 + T];
    fence_async();
    cluster_sync();
    if (T == 0) COPY;
    wait_cluster(&full, 0);
    FIX(cluster_sync();)
    mine[T] = 0;                                                                // BUG
    out[blockIdx.x * 64 + T] = s[63 - T];
    cluster_sync();
}
KERNEL(exits_while_a_copy_reads, RaceError, out of shared memory) ARGS {
    COPY_TO_NEXT;
    mine[T] = in[blockIdx.x * 64 + T];
    fence_async();
    cluster_sync();
    if (T == 0) COPY;                                                           // BUG
    wait_cluster(&full, 0);
    out[blockIdx.x * 64 + T] = s[63 - T];
    FIX(cluster_sync();)
}
KERNEL(copied_and_counted_elsewhere, LaunchArguments, in another block) ARGS {
    COPY_TO_NEXT;
    mine[T] = in[blockIdx.x * 64 + T];
    fence_async();
    cluster_sync();
    if (T == 0) FIX(COPY) BUG(copy_there(there(s, next), mine, 256, SM(&full))); // BUG
    wait_cluster(&full, 0);
    out[blockIdx.x * 64 + T] = s[63 - T];
    cluster_sync();
}
// One block loads a tile for all, or each block its part of it.
KERNEL(multicast, RaceError|UninitialisedRead) ARGS {
    __shared__ __align__(128) u s[8 * 32];
    __shared__ ull full;
    if (T == 0) { init(&full, 1); fence_init(); }
    cluster_sync();
    if (T == 0) {
        expect(&full, 1024);                                                    // BUG
        load_all(s + 8 * 32 / blocks() * rank(), &map, 0,                       // BUG
                 8 * (blockIdx.x / blocks()) + 8 / blocks() * rank(), &full, (1 << blocks()) - 1);
    }
    FIX(wait_cluster(&full, 0);)
    for (int i = T; i < 8 * 32; i += 64) out[blockIdx.x * 256 + i] = s[i];      // BUG
    BUG(wait_cluster(&full, 0);)
    cluster_sync();
}
KERNEL(multicast_before_the_other_is_ready, EmulatorError) ARGS {
    __shared__ __align__(128) u s[8 * 32];
    __shared__ ull full;
    if (T == 0) { init(&full, 1); fence_init(); expect(&full, 1024); }          // BUG
    FIX(cluster_sync();) BUG(__syncthreads();)
    if (T == 0 && rank() == 0)
        load_all(s, &map, 0, 0, &full, (1 << blocks()) - 1);                    // BUG
    wait_cluster(&full, 0);
    for (int i = T; i < 8 * 32; i += 64) out[blockIdx.x * 256 + i] = s[i];
    cluster_sync();
}
KERNEL(exits_while_a_multicast_comes, RaceError|OutOfBounds) ARGS {
    __shared__ __align__(128) u s[8 * 32];
    __shared__ ull full;
    if (T == 0) { init(&full, 1); fence_init(); expect(&full, 1024); }
    cluster_sync();
    if (T == 0 && rank() == 0)
        load_all(s, &map, 0, 16, &full, (1 << blocks()) - 1);                   // BUG
    BUG(if (rank()) return;)
    wait_cluster(&full, 0);
    for (int i = T; i < 8 * 32; i += 64) out[blockIdx.x * 256 + i] = s[i];
}
KERNEL(multicast_over_what_others_read, EmulatorError) ARGS {
    __shared__ __align__(128) u s[8 * 32];
    __shared__ ull full;
    if (T == 0) { init(&full, 1); fence_init(); }
    cluster_sync();
    for (int t = 0; t < 3; ++t) {
        if (T == 0) expect(&full, 1024);
        FIX(cluster_sync();) BUG(__syncthreads();)
        if (T == 0 && rank() == 0)
            load_all(s, &map, 0, 8 * t, &full, (1 << blocks()) - 1);            // BUG
        wait_cluster(&full, t & 1);                                             // BUG
        for (int i = T; i < 8 * 32; i += 64) out[blockIdx.x * 256 + i] = s[i];  // BUG
    }
    cluster_sync();
}
"""
VALUES = np.arange(1, 64 * 32 + 1, dtype=np.uint32).reshape(64, 32)
KERNELS = planted(CUDA)


def run(kernel: str, fixed: bool, seed: int | None, size: int = 2) -> Array:
    grid = 2 if kernel == "remote_pipeline" else 4
    out = np.zeros(grid * 256, np.uint32)
    args = [TensorMap(VALUES, (32, 8 // size if kernel == "multicast" else 8)), VALUES, out]
    launch(hopper_ptx(CUDA, fixed), kernel, grid, 64, args, order_seed=seed, cluster=size)
    return out


def wanted(kernel: str, size: int, grid: int) -> Array:
    """The first numbers of the output."""
    rows = VALUES.reshape(-1, 64)[:grid]
    block = np.arange(grid)
    neighbour = block // size * size + (block + 1) % size
    reversed_rows = ("reads_its_neighbour", "generic_addresses")
    if kernel in (*reversed_rows, "written_before_the_fence_of_an_initialisation"):
        return rows[neighbour, ::-1]
    if kernel in ("overwritten_while_others_read", "overwritten_after_a_relaxed_arrival"):
        return rows[neighbour]
    if kernel == "initialised_before_a_relaxed_arrival":
        return rows
    if kernel == "histogram_in_one_block":
        sums = rows.reshape(-1, size, 64).sum(axis=1, dtype=np.uint32)
        return np.where(block[:, None] % size == 0, sums[block // size], 0)
    if kernel == "exits_while_others_read":
        return np.where(block[:, None] % size, rows[block // size * size], 0)
    if kernel == "remote_pipeline":
        return rows[:4, ::-1]
    if kernel == "asynchronous_additions":
        return 1 + 2 * rows[block // size * size + (block - 1) % size, ::-1]
    of_the_one_before = ("asynchronous_stores", "written_before_a_relaxed", "copied", "a_copy")
    if any(words in kernel for words in of_the_one_before):
        return rows[block // size * size + (block - 1) % size, ::-1]
    tiles = VALUES.reshape(-1, 256)
    if kernel == "multicast":
        return tiles[block // size]
    return np.repeat(tiles[[0 if "ready" in kernel else 2]], grid, axis=0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_correct_twin_runs(kernel: str, size: int) -> None:
    if kernel == "remote_pipeline" and size != 2:
        return
    for seed in SEEDS:
        want = wanted(kernel, size, 4).reshape(-1)
        assert (run(kernel, True, seed, size)[: len(want)] == want).all(), seed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_planted_bug_is_named(kernel: str, seed: int | None) -> None:
    assert_reported(PREAMBLE + CUDA, kernel, lambda: run(kernel, False, seed))


OF_LANES = """
KERNEL(lanes)(u* out, u used) {
    __shared__ u s[64];
    s[T] = rank();
    cluster_sync();
    u at = there(s + T, T);  // compilers put it before the branch
    if (T < used) out[blockIdx.x * 64 + T] = load_there(at);
    cluster_sync();
}
"""


def test_lanes_may_have_addresses_of_blocks_that_there_are_not_and_may_not_use_them() -> None:
    ptx = hopper_ptx(CUDA[: CUDA.index("// Each block reads")] + OF_LANES)
    out = np.full((2, 64), 9, np.uint32)
    launch(ptx, "lanes", 2, 64, [out, np.uint32(2)], cluster=2)
    assert (out[:, :2] == [0, 1]).all()
    assert (out[:, 2:] == 9).all()
    with pytest.raises(OutOfBounds, match="which has no block of this rank") as error:
        launch(ptx, "lanes", 2, 64, [out, np.uint32(3)], cluster=2)
    assert "rank 2; the cluster has 2 blocks" in str(error.value)


REGISTERS = """.version 8.0\n.target sm_90a\n.address_size 64
.visible .entry k(.param .u64 p) DIRECTIVE { .reg .b64 %p; .reg .b32 %t, %x<16>;
    ld.param.u64 %p, [p]; mov.u32 %x0, %ctaid.x; mov.u32 %x1, %ctaid.y; mov.u32 %x2, %nctaid.x;
    mad.lo.u32 %t, %x1, %x2, %x0; mov.u32 %x3, %cluster_ctarank; mov.u32 %x4, %cluster_nctarank;
    mov.u32 %x5, %cluster_ctaid.x; mov.u32 %x6, %cluster_ctaid.y; mov.u32 %x7, %clusterid.x;
    mov.u32 %x8, %clusterid.y; mov.u32 %x9, %nclusterid.x; mov.u32 %x10, %cluster_nctaid.y;
    mad.wide.u32 %p, %t, 32, %p;
    st.global.v4.u32 [%p], {%x3, %x4, %x5, %x6}; st.global.v4.u32 [%p+16], {%x7, %x8, %x9, %x10};
    ret; }"""


@pytest.mark.parametrize("how", ["launch", "kernel"])
def test_a_cluster_is_a_launch_attribute_or_a_directive(how: str) -> None:
    out = np.zeros((4, 6, 8), np.uint32)
    given = {"cluster": (3, 2)} if how == "launch" else {}
    text = REGISTERS.replace("DIRECTIVE", ".reqnctapercluster 3, 2" if how == "kernel" else "")
    launch(text, "k", (6, 4), 1, [out], **given)
    for y in range(4):
        for x in range(6):
            rank = x % 3 + 3 * (y % 2)
            assert out[y, x].tolist() == [rank, 6, x % 3, y % 2, x // 3, y // 2, 2, 2]


@pytest.mark.parametrize(("grid", "cluster", "directive", "what"), [
    ((6, 4), (4, 1), "", "whole clusters"), ((32, 1), (32, 1), "", "too large"),
    ((6, 4), (2, 2), ".reqnctapercluster 3, 2", "differs from the one"),
])  # fmt: skip
def test_a_cluster_that_does_not_fit_is_refused(
    grid: tuple[int, int], cluster: tuple[int, int], directive: str, what: str
) -> None:
    text = REGISTERS.replace("DIRECTIVE", directive)
    with pytest.raises(LaunchArguments, match=what):
        launch(text, "k", grid, 1, [np.zeros(8 * 32, np.uint32)], cluster=cluster)


def test_a_block_that_does_not_arrive_is_named() -> None:
    both = "cluster_arrive(); cluster_wait(); }"
    source = CUDA.replace(both, 'if (rank() == 1) asm volatile("bar.sync 1, 96;"); ' + both)
    args = [TensorMap(VALUES, (32, 8)), VALUES, np.zeros(512, np.uint32)]
    with pytest.raises(DeadlockError, match="deadlock") as caught:
        launch(hopper_ptx(source, True), "reads_its_neighbour", 2, 64, args, cluster=2)
    assert "waits at the cluster barrier: of its 4 warps 2 3 have not arrived" in str(caught.value)


def test_a_multicast_to_a_block_outside_the_cluster_is_refused() -> None:
    source = CUDA.replace("(1 << blocks()) - 1", "(2 << blocks()) - 1")
    args = [TensorMap(VALUES, (32, 4)), VALUES, np.zeros(1024, np.uint32)]
    with pytest.raises(LaunchArguments, match="multicast to blocks") as caught:
        launch(hopper_ptx(source, True), "multicast", 4, 64, args, cluster=2)
    assert "mask 0x7" in caught.value.numbers


def test_stores_of_one_value_to_another_block_may_be_allowed() -> None:
    """As those to the block itself: both warps store the same number to the same word."""
    source = (
        CUDA
        + r"""
KERNEL(k) ARGS {
    __shared__ u s[1];
    store_there(there(s, 1 - rank()), 5);
    cluster_sync();
    out[blockIdx.x * 64 + T] = s[0];
}"""
    )
    out = np.zeros(128, np.uint32)
    args = [TensorMap(np.zeros(64, np.float32), (64,)), np.zeros(128, np.uint32), out]
    with pytest.raises(RaceError, match=r"permits it") as caught:
        launch(hopper_ptx(source), "k", 2, 64, args, cluster=2)
    assert "same_value" in str(caught.value)
    launch(hopper_ptx(source), "k", 2, 64, args, cluster=2, allow=("same_value",))
    assert (out == 5).all()


def test_a_bulk_copy_of_what_an_asynchronous_store_wrote_needs_a_proxy_fence_by_the_letter() -> (
    None
):
    """The reader of the bytes executes it: that of the storing thread does not wait for them."""
    source = (
        CUDA
        + r"""
KERNEL(k) ARGS {
    __shared__ __align__(16) u s[64];
    __shared__ ull full;
    if (T == 0) { init(&full, 1); fence_init(); }
    cluster_sync();
    if (T == 0) expect(&full, 256);
    const u other = 1 - rank();
    store_async(there(s + T, other), in[blockIdx.x * 64 + T], there(&full, other));
    BUG(fence_async();)
    wait_cluster(&full, 0);
    FIX(fence_async(); __syncthreads();)
    if (T == 0) { store_bulk(out + blockIdx.x * 64, s, 256); commit(); wait_read<0>(); }
    cluster_sync();
}"""
    )
    values, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    args = [TensorMap(np.zeros(64, np.float32), (64,)), values, out]
    with pytest.raises(RaceError, match=r"without a proxy fence") as caught:
        launch(hopper_ptx(source), "k", 2, 64, args, cluster=2)
    assert 'allow=("cp_async_proxy",)' in caught.value.way_out
    assert "that has waited for the mbarrier" in caught.value.way_out
    for fixed, allow in ((False, ("cp_async_proxy",)), (True, ())):
        out[:] = 0
        launch(hopper_ptx(source, fixed), "k", 2, 64, args, cluster=2, allow=allow)
        assert (out.reshape(2, 64)[::-1] == values.reshape(2, 64)).all()


@pytest.mark.parametrize("bytes_short", [4, 64])
def test_a_phase_that_ends_within_a_store_of_a_warp_is_reported(bytes_short: int) -> None:
    """Lanes have no order: nothing tells whose bytes the waiting warps may read."""
    source = CUDA.replace("expect(&full, 256)", f"expect(&full, 256 - {bytes_short})")
    args = [TensorMap(VALUES, (32, 8)), VALUES, np.zeros(512, np.uint32)]
    with pytest.raises(MbarrierMisuse, match=r"ends within an st\.async") as caught:
        launch(hopper_ptx(source, True), "asynchronous_stores", 2, 64, args, cluster=2)
    assert f"phase 1: 1 of 1 arrivals pending, -{bytes_short} bytes" in caught.value.numbers
