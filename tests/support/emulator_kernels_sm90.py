"""A CUDA source for tests of the emulator: a warp-specialised forward kernel for sm_90a."""

from __future__ import annotations

from tests.support.wgmma_kernels import HEAD, issue

# One CTA: 128 rows of one head in two consumer warpgroups, keys in tiles of 64 with two stages,
# loaded by one thread of the first warpgroup. The products for the scores of a tile and for the
# values of the tile before are in flight together. O is staged in the rows of Q in shared memory.
# All tiles in shared memory are panels of 64 halfs with a swizzle of 128 bytes.
_FORWARD = r"""
struct __align__(64) Map { u64 opaque[16]; };
constexpr int KEYS = 64, ROWS = 128, STAGE = KEYS * D * 2;
enum { Q_FULL, K_FULL, K_EMPTY = 3, V_FULL = 5, V_EMPTY = 7, BARRIERS = 9 };  // two of each stage

__device__ __forceinline__ void init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
    :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, int parity) {
  asm volatile("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
    "@p bra DONE; bra AGAIN; DONE: }" :: "r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void
load(u32 to, const Map* map, int row, int head, int rows, u32 barrier) {
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel)
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" :: "r"(to + panel * rows * 128), "l"(map), "r"(panel * 64),
      "r"(row), "r"(head), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store(const Map* map, int column, int row, int head, u32 from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group "
    "[%0, {%1, %2, %3}], [%4];"
    :: "l"(map), "r"(column), "r"(row), "r"(head), "r"(from) : "memory");
}
__device__ __forceinline__ u64 describe(u32 at, int leading) {
  return (u64)(at >> 4) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
__device__ __forceinline__ float over_quad(float x, bool sum) {
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    float y = __shfl_xor_sync(0xffffffffu, x, d);
    x = sum ? x + y : fmaxf(x, y);
  }
  return x;
}
__device__ __forceinline__ void scores(float (&s)[32], u32 q, u32 k) {
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = 0;
  keep(s); FENCE;
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
    mma_s(s, describe(q + i / 4 * ROWS * 128 + i % 4 * 32, 0),
          describe(k + i / 4 * KEYS * 128 + i % 4 * 32, 0), i > 0);
  COMMIT;
}
__device__ __forceinline__ void values(float (&o)[D / 2], u32 (&p)[4][4], u32 v) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(p[i / 4][i % 4]) :: "memory");
  keep(o); FENCE;
#pragma unroll
  for (int i = 0; i < 4; ++i) mma_o(o, p[i], describe(v + i * 2048, KEYS * 128), 1);
  COMMIT;
}
__device__ __forceinline__ void
softmax(float (&s)[32], float (&m)[2], float (&l)[2], float (&shrink)[2], float c, int row, int key,
        int n, bool causal) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int last = causal ? min(row + 8 * h, n - 1) : n - 1;
    float top = m[h];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& x = s[i / 2 * 4 + 2 * h + i % 2];
      if (key + i / 2 * 8 + i % 2 > last) x = -1e30f;
      top = fmaxf(top, x);
    }
    top = over_quad(top, false);
    shrink[h] = exp2_approx((m[h] - top) * c);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& x = s[i / 2 * 4 + 2 * h + i % 2];
      x = exp2_approx((x - top) * c);
      sum += x;
    }
    m[h] = top; l[h] = l[h] * shrink[h] + sum;
  }
}
__device__ __forceinline__ void round(u32 (&p)[4][4], const float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) p[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
}
extern "C" __global__ void __launch_bounds__(384, 1)
flash(const __grid_constant__ Map mq, const __grid_constant__ Map mk,
      const __grid_constant__ Map mv, const __grid_constant__ Map mo, int n, float scale,
      int causal) {
  extern __shared__ __align__(1024) unsigned char smem[];
  u32 q = SMEM(smem), k = q + ROWS * D * 2, v = k + 2 * STAGE, b = v + 2 * STAGE;
  int group = threadIdx.x / 128, row0 = (gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y;
  int tiles = ((causal ? min(n, row0 + ROWS) : n) + KEYS - 1) / KEYS;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < BARRIERS; ++i) init(b + 8 * i, (i - K_FULL) % 4 >= 2 ? 2 : 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      expect(b, ROWS * D * 2);
      load(q, &mq, row0, head, ROWS, b);
      for (int t = 0; t < tiles; ++t) {
        int stage = t % 2, phase = t / 2 % 2;
        wait(b + 8 * (K_EMPTY + stage), phase ^ 1);
        expect(b + 8 * (K_FULL + stage), STAGE);
        load(k + stage * STAGE, &mk, t * KEYS, head, KEYS, b + 8 * (K_FULL + stage));
        wait(b + 8 * (V_EMPTY + stage), phase ^ 1);
        expect(b + 8 * (V_FULL + stage), STAGE);
        load(v + stage * STAGE, &mv, t * KEYS, head, KEYS, b + 8 * (V_FULL + stage));
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, mine = (group - 1) * 64;
  int row = row0 + mine + warp * 16 + lane / 4, key = lane % 4 * 2;
  bool first = threadIdx.x % 128 == 0;
  float s[32], o[D / 2], m[2] = {-1e30f, -1e30f}, l[2] = {0, 0}, shrink[2];
  u32 p[4][4];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) o[i] = 0;
  float c = scale * 1.44269504f;
  wait(b + 8 * Q_FULL, 0);
  wait(b + 8 * K_FULL, 0);
  scores(s, q + mine * 128, k);
  WAIT(0); keep(s);
  if (first) arrive(b + 8 * K_EMPTY);
  softmax(s, m, l, shrink, c, row, key, n, causal);
  round(p, s);
  for (int t = 1; t < tiles; ++t) {
    int stage = t % 2, before = stage ^ 1;
    wait(b + 8 * (K_FULL + stage), t / 2 % 2);
    scores(s, q + mine * 128, k + stage * STAGE);
    wait(b + 8 * (V_FULL + before), (t - 1) / 2 % 2);
    values(o, p, v + before * STAGE);
    WAIT(1); keep(s);
    if (first) arrive(b + 8 * (K_EMPTY + stage));
    softmax(s, m, l, shrink, c, row, key + t * KEYS, n, causal);
    WAIT(0); keep(o); keep(s);
    if (first) arrive(b + 8 * (V_EMPTY + before));
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] *= shrink[i / 2 % 2];
    round(p, s);
  }
  int stage = (tiles - 1) % 2;
  wait(b + 8 * (V_FULL + stage), (tiles - 1) / 2 % 2);
  values(o, p, v + stage * STAGE);
  WAIT(0); keep(o);
  l[0] = 1 / over_quad(l[0], true);
  l[1] = 1 / over_quad(l[1], true);
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    int at = mine + warp * 16 + lane % 16, chunk = i % 4 * 2 + lane / 16;
    u32 to = q + i / 4 * ROWS * 128 + at * 128 + ((chunk ^ (at & 7)) << 4);
    u32 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      x[j] = pack(o[8 * i + 2 * j] * l[j % 2], o[8 * i + 2 * j + 1] * l[j % 2]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
  }
  PROXY_FENCE;
  asm volatile("bar.sync %0, 128;" :: "r"(group) : "memory");
  if (first) {
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
      store(&mo, panel * 64, row0 + mine, head, q + (panel * ROWS + mine) * 128);
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}
"""


def flash_forward(head_dim: int) -> str:
    """Source of the kernel ``flash`` for a multiple of 64."""
    products = issue("mma_s", 64) + issue("mma_o", head_dim, fragments=True, flags=(1, 1, 1))
    return HEAD + f"constexpr int D = {head_dim};\n" + products + _FORWARD


def shared_bytes(head_dim: int) -> int:
    return (128 + 4 * 64) * head_dim * 2 + 1024
