"""Small CUDA C++ sources for the tests of compile, cache and launch."""

TOY = """\
struct Params {
  const float* x;
  float* y;
  int n;
};

extern "C" __global__ void __launch_bounds__(64) toy(const Params p) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (i < p.n) p.y[i] = 2.0f * p.x[i];
}
"""

# Static shared memory, a stack of its own and a function that is not inlined.
STACKED = """\
__device__ __noinline__ float pick(float a, int n) {
  float table[40];
  for (int i = 0; i < n; i++) table[i % 40] = a * i;
  return table[n % 37];
}

extern "C" __global__ void __launch_bounds__(128) stacked(const float* x, float* y, int n) {
  __shared__ float tile[96];
  tile[threadIdx.x % 96] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = pick(tile[95 - threadIdx.x % 96], n);
}
"""

# 128 live values in a block of 1024 threads, which have 64 registers each.
SPILLING = """\
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x, int n) {
  float a[128];
#pragma unroll
  for (int i = 0; i < 128; i++) a[i] = x[i * n + threadIdx.x];
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 128; i++) a[i] = a[i] * a[(i * 7 + 3) % 128] + x[k];
  }
#pragma unroll
  for (int i = 0; i < 128; i++) x[i * n + threadIdx.x] = a[i];
}
"""

# An accumulator of wgmma that is read before the wait.
SERIALISED = """\
__device__ __forceinline__ void mma(float (&d)[4], unsigned long long a, unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}

extern "C" __global__ void __launch_bounds__(128) hopper(float* x, unsigned long long a, int n) {
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < n; i++) {
    mma(d, a + i, a + 2 * i);
    d[0] += x[i];
    asm volatile("wgmma.commit_group.sync.aligned;");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  x[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""
