"""Chains of wgmma: several warpgroups, groups in flight, and branches. Sums are exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import ptx_emulator as emulator
from ptx_emulator.isa import wgmma
from tests.ptx_emulator.test_conformance_wgmma import compiled, exact, integers
from tests.support.tiers import slow
from tests.support.wgmma_kernels import HEAD, issue, stored, sums_of

TEAMS = (
    HEAD
    + issue("mma", 64)
    + r"""
// Every warpgroup multiplies its own 64 rows by the B of the block, `turns` times, and then once
// more by a second B while that is still in flight; groups of odd number make one turn more.
extern "C" __global__ void teams(const uint4* a, const uint4* b, float* out, u64 da, u64 db,
                                 int turns) {
  extern __shared__ __align__(1024) unsigned char smem[];
  int groups = blockDim.x / 128, group = threadIdx.x / 128;
  fill((uint4*)smem, a + blockIdx.x * groups * 512, groups * 8192);
  fill((uint4*)(smem + groups * 8192), b + blockIdx.x * 1024, 16384);
  PROXY_FENCE; __syncthreads();
  da += group * 8192 >> 4;
  db += groups * 8192 >> 4;
  float d[32], e[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) { d[i] = 1; e[i] = 0; }
  keep(d); keep(e);
  for (int t = 0; t < turns + group % 2; ++t) {
    keep(d); FENCE;
#pragma unroll
    for (int s = 0; s < 4; ++s) mma(d, da + 2 * s, db + 2 * s, s > 0 || t % 2 == group % 2);
    COMMIT;
    FENCE;
#pragma unroll
    for (int s = 0; s < 4; ++s) mma(e, da + 2 * s, db + 512 + 2 * s, 1);
    COMMIT;
    WAIT(1); keep(d);
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] += 1;
    WAIT(0); keep(e);
  }
  out += (blockIdx.x * blockDim.x + threadIdx.x) * 64;
#pragma unroll
  for (int i = 0; i < 32; ++i) { out[i] = d[i]; out[32 + i] = e[i]; }
}
"""
)


@pytest.mark.parametrize("seed", [None, 1, slow(2)])
@pytest.mark.parametrize(("groups", "blocks"), [slow(1, 3), slow(2, 1), (2, 3), (3, 2)])
def test_warpgroups_share_b_and_chain_at_their_own_pace(
    groups: int, blocks: int, seed: int | None
) -> None:
    a = integers(12, (blocks, groups, 64, 64), "f16")
    b = integers(13, (blocks, 2, 64, 64), "f16")
    image_a = np.concatenate([stored(one, 128).image for one in a.reshape(-1, 64, 64)])
    image_b = np.concatenate([stored(one, 128).image for one in b.reshape(-1, 64, 64)])
    one = stored(a[0, 0], 128).descriptors()[0]
    out = np.zeros((blocks, groups, 128, 64), np.float32)
    args = [image_a, image_b, out, one, one, np.int32(3)]
    emulator.launch(
        compiled(TEAMS), "teams", blocks, 128 * groups, args, groups * 8192 + 16384, order_seed=seed
    )
    for block, group in itertools.product(range(blocks), range(groups)):
        product, other = (exact(a[block, group], one) for one in b[block])
        d, e = np.ones((64, 64)), np.zeros((64, 64))
        for turn in range(3 + group % 2):
            d = (d if turn % 2 == group % 2 else 0) + product + 1
            e = e + other
        got = out[block, group]
        assert (sums_of(got[:, :32], 64) == d).all()
        assert (sums_of(got[:, 32:], 64) == e).all()


ROLLING = (
    HEAD
    + issue("mma", 64)
    + r"""
// Groups of one instruction add to the same sums, `left` of them in flight; when a group has
// landed, its operands are overwritten by those of a later step.
template <int left> __device__ __forceinline__ void
roll(uint4* smem, const uint4* a, const uint4* b, float* out, u64 da, u64 db, int steps) {
  float d[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) d[i] = 0;
  keep(d);
  for (int s = 0; s < steps; ++s) {
    uint4* to = smem + s % (left + 1) * 256;
    fill(to, a + s * 128, 2048);
    fill(to + 128, b + s * 128, 2048);
    PROXY_FENCE; __syncthreads();
    FENCE;
    mma(d, da + s % (left + 1) * 256, db + s % (left + 1) * 256, 1);
    COMMIT; WAIT(left); __syncthreads();
  }
  WAIT(0); keep(d);
#pragma unroll
  for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = d[i];
}
#define ROLL(n) extern "C" __global__ void __launch_bounds__(128) roll##n( \
    const uint4* a, const uint4* b, float* out, u64 da, u64 db, int steps) { \
  extern __shared__ __align__(1024) uint4 smem[]; roll<n>(smem, a, b, out, da, db, steps); }
ROLL(0) ROLL(1) ROLL(3)
"""
)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("left", [0, 1, 3])
def test_groups_that_add_to_the_same_sums_land_one_after_the_other(
    left: int, seed: int | None
) -> None:
    steps = 7
    a, b = integers(14, (steps, 64, 16), "f16"), integers(15, (steps, 64, 16), "f16")
    images = [np.concatenate([stored(one, 32).image for one in part]) for part in (a, b)]
    one = stored(a[0], 32).descriptors()[0]
    out = np.zeros((128, 32), np.float32)
    args = [*images, out, one, one + np.uint64(128), np.int32(steps)]
    shared = (left + 1) * 4096
    emulator.launch(compiled(ROLLING), f"roll{left}", 1, 128, args, shared, order_seed=seed)
    want = sum(exact(x, y) for x, y in zip(a, b, strict=True))
    assert (sums_of(out, 64) == want).all()


BRANCHES = (
    HEAD
    + issue("mma", 16)
    + r"""
// Warpgroups leave each other between the instructions of a chain and between groups.
extern "C" __global__ void branches(const uint4* a, const uint4* b, float* out, u64 da, u64 db) {
  extern __shared__ __align__(1024) unsigned char smem[];
  int group = threadIdx.x / 128 + blockIdx.x;
  fill((uint4*)smem, a, 8192);
  fill((uint4*)(smem + 8192), b, 2048);
  PROXY_FENCE; __syncthreads();
  float d[8], e[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) { d[i] = 1; e[i] = 2; }
  keep(d); keep(e); FENCE;
  mma(d, da, db, 1);
  if (group % 2) mma(d, da + 2, db + 2, 1);
  if (group % 3 == 2) mma(d, da + 4, db + 4, 0);
  COMMIT;
  if (group % 2 == 0) { mma(e, da + 6, db + 6, group > 2); COMMIT; }
  WAIT(1);
  if (group % 2 == 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i] *= 2;
    keep(d); FENCE;
    mma(d, da + 6, db + 6, 1); COMMIT;
  } else { mma(d, da, db, 1); COMMIT; }
  WAIT(0); keep(d); keep(e);
  out += (blockIdx.x * blockDim.x + threadIdx.x) * 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) { out[i] = d[i]; out[8 + i] = e[i]; }
}
"""
)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_chains_are_cut_where_warpgroups_part(seed: int | None) -> None:
    blocks, groups = 3, 4
    a, b = integers(16, (64, 64), "f16"), integers(17, (16, 64), "f16")
    left, right = stored(a, 128), stored(b, 128)
    where = left.descriptors()[0], right.descriptors(left.image.size)[0]
    out = np.zeros((blocks, groups, 128, 16), np.float32)
    args = [left.image, right.image, out, *where]
    ptx = compiled(BRANCHES)
    emulator.launch(ptx, "branches", blocks, 128 * groups, args, 10240, order_seed=seed)
    parts = [exact(a[:, 16 * i : 16 * i + 16], b[:, 16 * i : 16 * i + 16]) for i in range(4)]
    for block, member in itertools.product(range(blocks), range(groups)):
        group = block + member
        d, e = 1 + parts[0], np.full((64, 16), 2.0)
        if group % 2:
            d = d + parts[1]
        if group % 3 == 2:
            d = parts[2]
        if group % 2 == 0:
            d, e = 2 * d + parts[3], (e if group > 2 else 0) + parts[3]
        else:
            d = d + parts[0]
        got = out[block, member]
        assert (sums_of(got[:, :8], 16) == d).all(), group
        assert (sums_of(got[:, 8:], 16) == e).all(), group


@pytest.mark.parametrize(("blocks", "count"), [("001122", 2), ("00111", 1), ("0011222", 1)])
def test_b_is_shared_where_as_many_warpgroups_of_each_block_have_it(
    blocks: str, count: int
) -> None:
    """Fewer of one block multiply where others have nothing to compute."""
    arena = np.array([1024 * int(block) for block in blocks])
    b = wgmma.SharedOperand(np.zeros(len(arena), np.int64), None)  # type: ignore[arg-type]
    assert wgmma._sharers(arena, [b]) == count
