"""A CUDA source for tests of the emulator: a compact flash-attention forward kernel for sm_80."""

from __future__ import annotations

# One CTA: 64 rows of one head, 4 warps of 16 rows; keys in tiles of 64, double-buffered with
# cp.async. Rows are 64 halfs = 8 chunks of 16 bytes; chunk c of row r lives at c ^ (r & 7).
FLASH_FORWARD = r"""
typedef unsigned int u32;
typedef unsigned short u16;
__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void ldsm4(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
__device__ __forceinline__ void ldsm4t(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ u32 place(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}
__device__ __forceinline__ void load_tile(u32 to, const u16* from, int row0, int rows, int tid) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int id = tid + i * 128, row = id >> 3, chunk = id & 7;
    bool inside = row0 + row < rows;
    const u16* p = from + (long long)(inside ? row0 + row : 0) * 64 + chunk * 8;
    copy16(to + place(row, chunk), p, inside ? 16 : 0);
  }
}
extern "C" __global__ void __launch_bounds__(128)
flash(const u16* q, const u16* k, const u16* v, u16* o, float* lse, int n, float scale) {
  extern __shared__ __align__(1024) unsigned char smem[];
  int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  int q0 = (gridDim.x - 1 - blockIdx.x) * 64;
  long long head = (long long)blockIdx.y * n * 64;
  q += head; k += head; v += head; o += head; lse += (long long)blockIdx.y * n;
  u32 sq = shared_address(smem), sk = sq + 8192, sv = sk + 16384;
  load_tile(sq, q, q0, n, tid);
  load_tile(sk, k, 0, n, tid);
  load_tile(sv, v, 0, n, tid);
  asm volatile("cp.async.commit_group;");
  int last = min(n, q0 + 64);
  int tiles = (last + 63) >> 6;
  float acc[8][4], m[2], l[2];
  u32 fq[4][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.f;
  m[0] = m[1] = -__int_as_float(0x7f800000); l[0] = l[1] = 0.f;
  float c = scale * 1.44269504f;
  for (int t = 0; t < tiles; ++t) {
    int stage = (t & 1) * 8192;
    asm volatile("cp.async.wait_group 0;");
    __syncthreads();
    if (t + 1 < tiles) {
      load_tile(sk + (stage ^ 8192), k, (t + 1) * 64, n, tid);
      load_tile(sv + (stage ^ 8192), v, (t + 1) * 64, n, tid);
      asm volatile("cp.async.commit_group;");
    }
    if (t == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ldsm4(fq[i], sq + place(warp * 16 + (lane & 15), i * 2 + (lane >> 4)));
    }
    float s[8][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 b[4];
        int key = j * 16 + (lane & 7) + ((lane >> 4) << 3);
        ldsm4(b, sk + stage + place(key, i * 2 + ((lane >> 3) & 1)));
        mma(s[2 * j], fq[i], b[0], b[1]);
        mma(s[2 * j + 1], fq[i], b[2], b[3]);
      }
    int row = q0 + warp * 16 + (lane >> 2), col = t * 64 + (lane & 3) * 2;
    if (t * 64 + 63 > q0 || t * 64 + 64 > n) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int key = col + j * 8 + (e & 1), r = row + (e >> 1) * 8;
          if (key > r || key >= n) s[j][e] = -__int_as_float(0x7f800000);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = m[h];
#pragma unroll
      for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      float base = top == -__int_as_float(0x7f800000) ? 0.f : top * c;
      float shrink = exp2_approx(m[h] * c - base);
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float p = exp2_approx(s[j][2 * h + e] * c - base);
          s[j][2 * h + e] = p;
          sum += p;
        }
      l[h] = l[h] * shrink + sum;
      m[h] = top;
#pragma unroll
      for (int j = 0; j < 8; ++j) { acc[j][2 * h] *= shrink; acc[j][2 * h + 1] *= shrink; }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 a[4] = {pack(s[2 * i][0], s[2 * i][1]), pack(s[2 * i][2], s[2 * i][3]),
                  pack(s[2 * i + 1][0], s[2 * i + 1][1]), pack(s[2 * i + 1][2], s[2 * i + 1][3])};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 b[4];
        ldsm4t(b, sv + stage + place(i * 16 + (lane & 15), j * 2 + (lane >> 4)));
        mma(acc[2 * j], a, b[0], b[1]);
        mma(acc[2 * j + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
    l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
    float inverse = l[h] == 0.f ? 0.f : 1.f / l[h];
    int row = q0 + warp * 16 + (lane >> 2) + h * 8;
    if (row < n) {
      if ((lane & 3) == 0) lse[row] = m[h] * scale + __logf(l[h]);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *(u32*)(o + (long long)row * 64 + j * 8 + (lane & 3) * 2) =
            pack(acc[j][2 * h] * inverse, acc[j][2 * h + 1] * inverse);
    }
  }
}
"""
