// Edited by hand, from a file that flashgen 0.1.0 emits: two neighbouring blocks are a cluster.
// FLASHGEN_OVERRIDE compiles it in place of that file; README.md beside it says what for.
//
// base      sha256 ef58d1fc7f43ce70f3fc694b9c8f0a7b of that file
// change    Both blocks walk the query tiles of the first. Each loads one panel of Q and of dO for
//           both. Of dQ each keeps one half of the queries, sends the other half to the other
//           block, adds what arrives, and adds this sum to global memory.
// needs     an even number of key tiles: ceil(seq_k / 128) % 2 == 0. The grid has one block per
//           key tile, which an override cannot change: a launch of an odd number is refused.
//
// spec      full, specs/full.py
// template  templates/sm90/backward_dkdv.cu.j2
// target    sm_90a  dtype bfloat16  head_dim 128  backward, fused
//
//   S = scale Q K^T    P = exp(S - LSE)    dP = dO V^T
//   delta = rowsum(dO * O) - dLSE    dS = P * (dP - delta)
//   dV = P^T dO    dK = scale dS^T Q    dQ = scale dS K
//
// plan      fused  block_q 80  block_k 128  warps 8  blocks per SM 1
// limits    smem 231,392 of 232,448, smem_sm 232,416 of 233,472, registers 238 of 240 (binds)
// refused   block_q 96: needs 256 registers per thread, 240 allowed
// refused   block_k 256 by 16 warps: needs 16 warps, 8 allowed
// launch    grid (ceil(seq_k / 128), heads_kv, batch)  block 384  dynamic shared memory 231,392 B

// ---- plan: derived by the planner, recomputed by the asserts below -----------------------------
constexpr int BLOCK_Q = 80;  // query rows per step of the main loop
constexpr int BLOCK_K = 128;  // keys per block
constexpr int HEAD_DIM = 128;  // columns of Q and K
constexpr int HEAD_DIM_V = 128;  // columns of V and O
constexpr int ELEMENT_BYTES = 2;  // bfloat16
constexpr int WARPGROUP = 128;  // threads
constexpr int CONSUMERS = 2;  // warpgroups besides the producer
constexpr int THREADS = WARPGROUP * CONSUMERS;  // consumer threads
constexpr int STAGES = 2;  // buffers for Q, and for dO

// Tiles are panels of PANEL columns, the width of a swizzle. Columns past the head dim are 0.
constexpr int PANEL = 64;  // for Q and K
constexpr int PANELS = 2;
constexpr int PANEL_V = 64;  // for V and dO
constexpr int PANELS_V = 2;
constexpr int PANEL_S = 64;  // keys of dS, with a row per query
constexpr int VECTORS = HEAD_DIM * ELEMENT_BYTES / 16;      // per row of dK
constexpr int VECTORS_V = HEAD_DIM_V * ELEMENT_BYTES / 16;  // per row of dV

constexpr int K_BYTES = BLOCK_K * PANELS * PANEL * ELEMENT_BYTES;
constexpr int V_BYTES = BLOCK_K * PANELS_V * PANEL_V * ELEMENT_BYTES;
constexpr int Q_BYTES = BLOCK_Q * PANELS * PANEL * ELEMENT_BYTES;
constexpr int DO_BYTES = BLOCK_Q * PANELS_V * PANEL_V * ELEMENT_BYTES;
// Base of each query, -delta of pairs, twice; a Tile.
constexpr int ROWS_BYTES = 3 * BLOCK_Q * 4 + 16;
constexpr int S_BYTES = BLOCK_Q * BLOCK_K * ELEMENT_BYTES;

// The elements that one warpgroup computes.
constexpr int QUERIES = BLOCK_Q;  // scores of all queries, with 64 keys
constexpr int COLUMNS = HEAD_DIM;  // columns of dK, for its own 64 keys
constexpr int COLUMNS_V = HEAD_DIM_V;  // columns of dV
// dQ^T has blocks of 64 rows. Each warpgroup has some of the blocks.
constexpr int DQ_BLOCKS = (HEAD_DIM + 63) / 64 / CONSUMERS;
constexpr int DQ_QUERIES = BLOCK_Q;
constexpr int DQ_BYTES = 16 * DQ_QUERIES * 4;  // bytes that a warp has of one block
constexpr int DQ_SHARE = 4 * DQ_BLOCKS * DQ_BYTES;  // bytes that a warpgroup has
constexpr int DQ_STRIPS = (HEAD_DIM + 15) / 16;  // strips of 16 columns of dQ
constexpr int SUM_COLUMNS = 16 * DQ_STRIPS;  // of the sums of dQ

// Byte offsets into dynamic shared memory. dK and dV are staged over K and V when the loop is done.
constexpr int SMEM_K = 0;
constexpr int SMEM_V = 32768;
constexpr int SMEM_Q = 65536;
constexpr int SMEM_DO = 106496;
constexpr int SMEM_DS = 147456;  // two buffers: one is read while one is written
constexpr int SMEM_DQ = SMEM_DS + 2 * S_BYTES;
constexpr int SMEM_ROWS = 229376;  // a buffer for each buffer of Q
constexpr int SMEM_BARRIERS = SMEM_ROWS + STAGES * ROWS_BYTES;
constexpr int SMEM_BYTES = 231392;

static_assert(BLOCK_K == 64 * CONSUMERS, "plan and code disagree: keys per warpgroup");
static_assert(PANELS * PANEL >= 64 * DQ_BLOCKS, "plan and code disagree: columns of K");
static_assert(SMEM_V == SMEM_K + K_BYTES, "plan and code disagree: K tile");
static_assert(SMEM_Q == SMEM_V + V_BYTES, "plan and code disagree: V tile");
static_assert(SMEM_DO == SMEM_Q + STAGES * Q_BYTES, "plan and code disagree: Q tiles");
static_assert(SMEM_DS >= SMEM_DO + STAGES * DO_BYTES,
              "plan and code disagree: dO tiles");
static_assert(SMEM_ROWS == SMEM_DQ + CONSUMERS * DQ_SHARE,
              "plan and code disagree: dS tiles, dQ tile");
static_assert(SMEM_BYTES == SMEM_BARRIERS + 8 * 4 * STAGES,
              "plan and code disagree: rows, barriers");

#define DEVICE __device__ __forceinline__  // a function that is a part of its callers
#define UNROLL _Pragma("unroll")    // a loop of which each round is written out
#define ROLLED _Pragma("unroll 1")  // a loop that stays one

// ---- arguments ---------------------------------------------------------------------------------
struct alignas(128) TensorMap { unsigned long long opaque[16]; };  // of a tensor, for TMA
typedef unsigned short Element;  // the bits of a bfloat16
struct Params {
  TensorMap q_map;  // [batch, heads_q, seq_q, HEAD_DIM], read by TMA
  TensorMap k_map;  // [batch, heads_kv, seq_k, HEAD_DIM], read by TMA
  TensorMap v_map;  // [batch, heads_kv, seq_k, HEAD_DIM_V], read by TMA
  TensorMap do_map;  // [batch, heads_q, seq_q, HEAD_DIM_V], read by TMA
  const float* rows;  // [batch, heads_q, seq_q, 2]: base of P, and delta = rowsum(dO * O) - dLSE
  const float* lse;  // [batch, heads_q, seq_q], natural log
  Element* dk;  // [batch, heads_kv, seq_k, HEAD_DIM]
  Element* dv;  // [batch, heads_kv, seq_k, HEAD_DIM_V]
  float* dq_sum;  // [batch, heads_q, rows / DQ_QUERIES, DQ_STRIPS, DQ_QUERIES / 8, 128], unscaled
  long long dk_stride_b;  // elements to the next batch entry
  long long dk_stride_h;  // elements to the next head
  long long dk_stride_n;  // elements to the next row
  long long dv_stride_b;  // elements to the next batch entry
  long long dv_stride_h;  // elements to the next head
  long long dv_stride_n;  // elements to the next row
  int heads_q;
  int heads_kv;  // divides heads_q
  int seq_q;
  int seq_k;
  float scale;  // factor on Q K^T
  int first_head_group;  // of this launch: a grid has 65,535 along y and z
  int first_batch;  // of this launch
};

// ---- the spec ----------------------------------------------------------------------------------
struct Range { int lo, hi; };  // queries [lo, hi) from the first of the call

// Functions of floats that are one instruction.
#define UNARY(name, op) \
  DEVICE float name(float x) { float y; asm(op " %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE int ceil_div(int n, int by) { return (n + by - 1) / by; }  // rounded up, for n >= 0

// All queries belong to the range of a key.
DEVICE Range key_queries(const Params& p) { return {0, p.seq_q}; }

// ---- helpers -----------------------------------------------------------------------------------
// Two numbers, rounded to the operand type; `first` is the low half.
DEVICE unsigned pack(float first, float second) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}

// Byte offset of a vector of a row-major tile with G vectors per row. Columns are XORed with bits
// of the row, so that any 8 consecutive rows of one column lie in 8 different groups of 4 banks.
template <int G> DEVICE unsigned vector_offset(int row, int column) {
  constexpr int BITS = G % 8 == 0 ? 3 : G % 4 == 0 ? 2 : G % 2 == 0 ? 1 : 0;
  return 16 * (row * G + (column ^ ((row >> (3 - BITS)) & ((1 << BITS) - 1))));
}

// Write two neighbouring elements of O, columns 8n + 2*(lane%4) and the next, to the staging tile.
template <int G>
DEVICE void stage_pair(unsigned stage, int row, int n, int lane, float first, float second) {
  const unsigned address = stage + vector_offset<G>(row, n) + lane % 4 * 4;
  asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(pack(first, second)) : "memory");
}

// Write a lane's two rows of accumulators, times `factor`, to the staging tile: TILES groups of 8
// columns from group `first` on, as far as a row has them.
template <int G, int TILES>
DEVICE void stage_rows(unsigned stage, int row, int first, int lane, const float (&x)[TILES][4],
                       float factor) {
  UNROLL for (int r = 0; r < 2; ++r) {
    UNROLL for (int n = 0; n < TILES; ++n) {
      if (first + n >= G * 16 / ELEMENT_BYTES / 8) break;
      stage_pair<G>(stage, row + 8 * r, first + n, lane, x[n][2 * r] * factor,
                    x[n][2 * r + 1] * factor);
    }
  }
}

// Write one vector of O.
DEVICE void store_vector(Element* to, unsigned from) {
  unsigned x, y, z, w;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(from) : "memory");
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "l"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// `THREADS` threads copy those of ROWS rows of G vectors below `valid_rows` to global memory.
template <int ROWS, int G>
DEVICE void store_rows(Element* to, long long stride, unsigned tile, int valid_rows, int thread) {
#pragma unroll 4
  for (int i = thread; i < ROWS * G; i += THREADS) {
    const int row = i / G;
    const int column = i % G;
    if (row < valid_rows) {
      store_vector(to + row * stride + column * (16 / ELEMENT_BYTES),
                   tile + vector_offset<G>(row, column));
    }
  }
}

// blockIdx.y. The assembly is volatile, so that each call reads it again.
DEVICE int block_index_y() {
  int y;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
  return y;
}

DEVICE int thread_index() {  // among the consumers; volatile, so that no register keeps it
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index - WARPGROUP;
}

// The phase of an mbarrier completes after all arrivals and all announced bytes.
DEVICE void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_announce(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_expect(unsigned barrier, int bytes) {  // announce bytes without an arrival
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Wait for the phase of this parity, 0 for the first. The phase before it counts as complete.
DEVICE void barrier_wait(unsigned barrier, unsigned parity) {
  asm volatile("{\n.reg .pred complete;\nagain:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
               "@!complete bra again;\n}"
               :: "r"(barrier), "r"(parity) : "memory");
}

struct Barriers {  // consecutive mbarriers of 8 bytes, one for each buffer or warpgroup
  unsigned first;
  DEVICE unsigned operator[](int index) const { return first + 8 * index; }
};
struct Stage {  // the current buffer of a pipeline, and the parity of the phase that fills it
  int index = 0;
  unsigned parity = 0;
  DEVICE void next() {
    if (++index == STAGES) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Named barriers, at which `threads` threads wait or only arrive; __syncthreads uses barrier 0.
constexpr int BARRIER_CONSUMERS = 1;  // that of all consumers
// Of each consumer warpgroup with the warp that adds its dQ: it is written, or read.
constexpr int BARRIER_DQ_FULL = 2, BARRIER_DQ_EMPTY = 4;
DEVICE void named_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
DEVICE void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// One step of the walk over tiles, published by the producer.
struct Tile {
  int start;  // the first query; -1: the walk has ended, and there is no tile
  int h;
  int full;  // the mask is true on every element, and is not evaluated
  int far;   // a query is far: low half, of the first 64 queries; high half, of the others
};
DEVICE void store_tile(unsigned address, int start, int h, int full) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};\n"
               "st.shared.b32 [%0 + 8], %3;"
               :: "r"(address), "r"(start), "r"(h), "r"(full) : "memory");
}
// Each of two warps writes its half.
DEVICE void store_far(unsigned address, int half, bool far) {
  asm volatile("st.shared.b16 [%0], %1;"
               :: "r"(address + 12 + 2 * half), "h"(short(far)) : "memory");
}
DEVICE Tile read_tile(unsigned address) {
  Tile tile;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile.start), "=r"(tile.h), "=r"(tile.full), "=r"(tile.far) : "r"(address)
               : "memory");
  return tile;
}

// Start copying `PANELS` boxes side by side, PANEL columns x ROWS rows of one head each, from `row`
// on. Elements outside the tensor become zeros, and count as copied bytes.
template <int PANELS, int PANEL, int ROWS>
DEVICE void tma_load(unsigned to, const TensorMap& from, unsigned barrier, int row, int h, int b) {
  UNROLL for (int panel = 0; panel < PANELS; ++panel) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile"
                 ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(to + panel * (PANEL * ROWS * ELEMENT_BYTES)), "l"(&from), "r"(barrier),
                    "r"(panel * PANEL), "r"(row), "r"(h), "r"(b) : "memory");
  }
}

// Start adding `bytes` bytes of floats in shared memory to global memory.
DEVICE void add_bulk(float* to, unsigned from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

// Close the group of bulk copies that this thread started; wait until all but its newest GROUPS
// have read shared memory.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int GROUPS> DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(GROUPS) : "memory");
}

// Make ordinary stores to shared memory visible to TMA and wgmma.
DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

typedef unsigned long long Descriptor;  // where wgmma finds an operand in shared memory

// A tile of ROWS rows that wgmma reads from shared memory: panels of SWIZZLE bytes, in groups of 8
// rows, whose 16-byte vectors are XORed with the row as TMA wrote them. The same tile serves
// products along its rows and, transposed, along its columns. Only the low half of the descriptor
// is stored, because the high half is a constant.
template <int SWIZZLE, int ROWS> struct Operand {
  static constexpr int PANEL_BYTES = ROWS * SWIZZLE;
  unsigned low;
  DEVICE explicit Operand(unsigned address)
      : low(PANEL_BYTES / 16 << 16 | (address & 0x3ffff) / 16) {}
  // The operand `count` times `bytes` bytes further.
  DEVICE Operand moved(int count, int bytes) const {
    Operand result = *this;
    result.low += count * (bytes / 16);
    return result;
  }
  DEVICE Operand from_row(int row) const { return moved(row, SWIZZLE); }
  DEVICE Operand from_panel(int n) const { return moved(n, PANEL_BYTES); }
  // The descriptor of the operand that begins `bytes` bytes into the tile.
  DEVICE Descriptor at(int bytes) const {
    constexpr unsigned PATTERN = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 3;
    constexpr unsigned HIGH = PATTERN << 30 | 8 * SWIZZLE / 16;
    return Descriptor(HIGH) << 32 | (low + bytes / 16);
  }
  // 16 columns, or 16 rows: those of step n of a product.
  DEVICE Descriptor columns(int n) const {
    return at(n / (SWIZZLE / 32) * PANEL_BYTES + n % (SWIZZLE / 32) * 32);
  }
  DEVICE Descriptor rows(int n) const { return at(16 * n * SWIZZLE); }
};

// Order products after ordinary writes to their registers and, as ptxas does (C7519), after waits.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> DEVICE void wgmma_wait() {  // until at most the last GROUPS are pending
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(GROUPS) : "memory");
}
// Keep the compiler from moving arithmetic on accumulators across a wait.
template <int N> DEVICE void pin(float (&x)[N][4]) {
  UNROLL for (int i = 0; i < 4 * N; ++i) asm volatile("" : "+f"(x[i / 4][i % 4]) :: "memory");
}

#define D8(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])  // 8 columns of D
// D += A B, 16 columns of A, from registers, and rows of B, from shared memory.
DEVICE void multiply_columns(float (&d)[16][4], const unsigned (&a)[4], Descriptor b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
      "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : D8(0), D8(1), D8(2), D8(3), D8(4), D8(5), D8(6), D8(7), D8(8), D8(9), D8(10), D8(11),
        D8(12), D8(13), D8(14), D8(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}

// D (+)= A^T B^T, 16 rows of A and columns of B, from shared memory.
DEVICE void multiply_queries(float (&d)[10][4], Descriptor a, Descriptor b, bool add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %42, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
      "%38, %39"
      "}, %40, %41, add, 1, 1, 1, 0;\n}"
      : D8(0), D8(1), D8(2), D8(3), D8(4), D8(5), D8(6), D8(7), D8(8), D8(9)
      : "l"(a), "l"(b), "r"(int(add)) : "memory");
}

// D (+)= A B^T, 16 columns of each: row-wise both, from shared memory.
DEVICE void multiply_rows(float (&d)[10][4], Descriptor a, Descriptor b, bool add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %42, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
      "%38, %39"
      "}, %40, %41, add, 1, 1, 0, 0;\n}"
      : D8(0), D8(1), D8(2), D8(3), D8(4), D8(5), D8(6), D8(7), D8(8), D8(9)
      : "l"(a), "l"(b), "r"(int(add)) : "memory");
}

// Write and read neighbouring floats in shared memory.
DEVICE void store_pair(unsigned address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(address), "f"(x), "f"(y) : "memory");
}
DEVICE void read_pair(float (&x)[2], unsigned address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
}

// Numbers of queries lie in such an order that a lane reads those of 16 columns of scores at once:
// the offset of columns 8 n and on.
DEVICE int of_columns(int n) { return 64 * (n / 2) + 8 * (n % 2); }

DEVICE void read_four(float (&x)[4], unsigned address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(address) : "memory");
}

// Round accumulators: each 16 columns become an operand A, four matrices of 8 x 8 as well.
template <int N> DEVICE void round_scores(unsigned (&to)[N / 2][4], const float (&from)[N][4]) {
  UNROLL for (int n = 0; n < N / 2; ++n) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const float* pair = from[2 * n + i / 2] + i % 2 * 2;
      to[n][i] = pack(pair[0], pair[1]);
    }
  }
}

// A word that says which of two neighbouring queries, 8 n and the next, are at or past
// `end`, by all bits of its low and of its high half.
DEVICE unsigned pair_from(int end, int n) {
  unsigned mask;
  const int near = min(max(end, 0), 1 << 20);  // 16 times this does not overflow
  const int bits = max(16 * near - 128 * n, 0);
  asm("shl.b32 %0, %1, %2;" : "=r"(mask) : "r"(0xffffffffu), "r"(bits));  // by 32 or more: 0
  return mask;
}

// Write scores transposed to shared memory, one row per query. `lane_address` is the result of
// scores_address.
template <int N> DEVICE void store_scores(unsigned lane_address, const unsigned (&from)[N][4]) {
  UNROLL for (int n = 0; n < N; ++n) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(lane_address + 16 * n * 2 * PANEL_S), "r"(from[n][0]), "r"(from[n][1]),
                    "r"(from[n][2]), "r"(from[n][3]) : "memory");
  }
}

// A lane's byte offset for store_scores: matrix lane/8 holds keys 8*(lane/8%2) and on of the 16
// keys that begin at `key`, and queries 8*(lane/16) and on. The swizzle is the one of wgmma.
DEVICE unsigned scores_address(int key, int lane) {
  const int query = lane / 16 * 8 + lane % 8;
  const int vector = key / 8 + lane / 8 % 2;
  return query * 2 * PANEL_S + 16 * (vector ^ lane % 8);
}

constexpr float LOG2E = 1.4426950408889634f;
constexpr float EXP_UNIT = LOG2E;  // exponentials are computed in base 2

UNARY(exp2_approx, "ex2.approx.ftz.f32")  // with an error below 2^-22 of the result, as the next
// exp2(score * scale - base), where the base is a row's maximum or its LSE, in units of log2.
DEVICE float probability(float score, float scale, float base) {
  return exp2_approx(fmaf(score, scale, -base));
}

// Whether a row is far, by its base.
DEVICE bool is_far(float base) { return __float_as_uint(base) == 0x80000000u; }

// Changes a lane's scores of 8 columns, whose two queries have these bases, so that `probability`
// gives P with the bases. In a far row a score becomes relative to the natural LSE: their
// difference as exponents, rounded once, is divided by `unit`, the factor from scores to exponents
// (of both a quarter: the approximate quotient is 0 from 2^126 on). Where the difference is no
// larger than the rounding error of LSE the score is all of LSE, and P is exactly 1. From 2^20 on,
// one unit in the last place of a score changes P as much: the forward kernel may fuse other
// products with sums.
DEVICE void subtract_lse(float (&s)[4], float unit, const float (&base)[2], const float* lse) {
  UNROLL for (int e = 0; e < 4; ++e) {
    const float* own = lse + e % 2;
    if (!is_far(base[e % 2])) continue;
    const float x = fmaf(s[e], unit, -*own);
    const float error = fabsf(*own) < 0x1p20f ? 0x1.01p-24f : 0x1.8p-23f;
    s[e] = fabsf(x) < fabsf(*own) * error ? 0.0f : __fdividef(x * 0.25f, unit * 0.25f);
  }
}

// ---- clusters of two blocks --------------------------------------------------------------------
constexpr int CLUSTER = 2;  // blocks, of neighbouring key tiles of one head
constexpr int DQ_HALF = DQ_BYTES / CLUSTER;  // of a warp's bytes: those of the queries of one block
constexpr int SMEM_INBOX = SMEM_DQ + CONSUMERS * DQ_SHARE / CLUSTER;  // the other block's halves
static_assert(DQ_BLOCKS == 1 && DQ_QUERIES % (8 * CLUSTER) == 0, "halves of whole registers");
static_assert(PANELS == CLUSTER && PANELS_V == CLUSTER, "each block loads one panel for both");

DEVICE unsigned cluster_rank() {  // volatile, so that no register keeps it
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE unsigned in_block(unsigned address, unsigned rank) {  // the same place in that block
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {  // for all threads of both blocks that have not exited
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Its scope is the block, as that of barrier_wait: for the scope of the cluster the compiler puts
// MEMBAR.ALL.GPU before each arrival. What was read before has already arrived in registers.
DEVICE void barrier_arrive_in(unsigned rank, unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
               :: "r"(in_block(barrier, rank)) : "memory");
}
// Start copying one panel of a tile, that of this block's rank, to the same place in both blocks.
template <int PANEL, int ROWS>
DEVICE void tma_load_both(unsigned to, const TensorMap& from, unsigned barrier, int row, int h,
                          int b) {
  const int panel = cluster_rank();
  const unsigned short blocks = (1 << CLUSTER) - 1;
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile"
               ".mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
               :: "r"(to + panel * (PANEL * ROWS * ELEMENT_BYTES)), "l"(&from), "r"(barrier),
                  "r"(panel * PANEL), "r"(row), "r"(h), "r"(b), "h"(blocks) : "memory");
}
// Start writing four floats to the other block, whose barrier counts their bytes.
DEVICE void send_four(unsigned to, const float (&x)[4], unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier) : "memory");
}
// A lane's elements of dQ^T: the block of rank KEPT adds up the half of this number.
template <int KEPT, int N> DEVICE void send_half(const float (&dq)[N][4], unsigned to,
                                                 unsigned barrier) {
  UNROLL for (int n = 0; n < N / 2; ++n) {
    send_four(to + 512 * n, dq[n + (1 - KEPT) * (N / 2)], barrier);
  }
}
template <int KEPT, int N> DEVICE void add_half(const float (&dq)[N][4], unsigned inbox,
                                                unsigned stage) {
  UNROLL for (int n = 0; n < N / 2; ++n) {
    const float (&own)[4] = dq[n + KEPT * (N / 2)];
    float other[4];
    read_four(other, inbox + 512 * n);
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(stage + 512 * n), "f"(own[0] + other[0]), "f"(own[1] + other[1]),
                    "f"(own[2] + other[2]), "f"(own[3] + other[3]) : "memory");
  }
}

// ---- kernel ------------------------------------------------------------------------------------
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
__launch_bounds__(WARPGROUP + THREADS, 1)
full_backward_fused_bf16_d128(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const unsigned smem_base = (unsigned)__cvta_generic_to_shared(smem);
  const Barriers q_full{smem_base + SMEM_BARRIERS}, q_empty{q_full[STAGES]};
  const Barriers do_full{q_empty[STAGES]}, do_empty{do_full[STAGES]};
  // Of each consumer warp: the inbox has the other block's half; the other block has read ours.
  __shared__ __align__(8) unsigned long long exchange_barriers[2 * 4 * CONSUMERS];
  const Barriers inbox_full{(unsigned)__cvta_generic_to_shared(exchange_barriers)};
  const Barriers outbox_empty{inbox_full[4 * CONSUMERS]};

  // 1. The keys of this block: grid (key tiles, key heads, batch).
  const int k_start = blockIdx.x * BLOCK_K;
  const int h_kv = p.first_head_group + blockIdx.y;
  const int b = p.first_batch + blockIdx.z;

  // 2. Barriers. A stage is full when TMA has copied Q, with the first one also K and V, and two
  //    warps have written base and delta.
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(q_full[i], 3);
      barrier_init(do_full[i], 1);
      barrier_init(q_empty[i], CLUSTER * 4 * CONSUMERS);  // every warp read base, delta and Tile
      barrier_init(do_empty[i], CLUSTER * CONSUMERS);
    }
    for (int i = 0; i < 4 * CONSUMERS; ++i) {
      barrier_init(inbox_full[i], 1);
      barrier_init(outbox_empty[i], 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_arrive();
  cluster_wait();

  // 3. The producer needs few registers.
  if (threadIdx.x < WARPGROUP) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");

    // 3a. The heads that share these keys.
    const int group = p.heads_q / p.heads_kv;
    const int h_end = (h_kv + 1) * group;

    // 3b. The query tiles [next_tile, tile_end) of each head that the mask can reach.
    int next_h = h_kv * group;
    int next_tile = 0;
    const int tile_end = ceil_div(p.seq_q, BLOCK_Q);
    const int first_tile = next_tile;
    // Advance to the next tile in this head or a later one; next_h = h_end when none is left.
    const auto settle = [&] {
      while (true) {
        if (next_tile < tile_end || ++next_h >= h_end) return;
        next_tile = first_tile;
      }
    };
    settle();

    // 3c. One thread of the first warp issues the TMA copies; all of its lanes take part in the
    //     walk, whose end is a stage without a copy.
    Stage stage;
    if (threadIdx.x < 32) {
      const bool copies = threadIdx.x == 0;
      if (copies && next_h < h_end) {
        barrier_expect(q_full[0], K_BYTES + V_BYTES);  // with the first Q
        tma_load<PANELS, PANEL, BLOCK_K>(smem_base + SMEM_K, p.k_map, q_full[0],
                                         k_start, h_kv, b);
        tma_load<PANELS_V, PANEL_V, BLOCK_K>(smem_base + SMEM_V, p.v_map, q_full[0],
                                             k_start, h_kv, b);
      }
      ROLLED while (next_h < h_end) {
        const int q_start = next_tile * BLOCK_Q;
        if (copies) {
          const unsigned q_here = q_full[stage.index], do_here = do_full[stage.index];
          barrier_wait(q_empty[stage.index], stage.parity ^ 1);
          barrier_announce(q_here, Q_BYTES);
          tma_load_both<PANEL, BLOCK_Q>(smem_base + SMEM_Q + stage.index * Q_BYTES, p.q_map,
                                        q_here, q_start, next_h, b);
          barrier_wait(do_empty[stage.index], stage.parity ^ 1);
          barrier_announce(do_here, DO_BYTES);
          tma_load_both<PANEL_V, BLOCK_Q>(smem_base + SMEM_DO + stage.index * DO_BYTES, p.do_map,
                                          do_here, q_start, next_h, b);
        }
        __syncwarp();
        ++next_tile;
        settle();
        stage.next();
      }
      if (copies) {
        barrier_wait(q_empty[stage.index], stage.parity ^ 1);
        barrier_arrive(q_full[stage.index]);
      }
      return;
    }

    // 3d. Two more warps load base and delta, whose rows need not be aligned for TMA, a pair of
    //     queries per thread, and publish the tile, so that the consumers need not walk.
    //     The last warp adds its block's half of dQ of each step in global memory, to the sums
    //     over all blocks that reach the queries, where a warp's elements are neighbours.
    //     They wait for the kernel before, which writes base and delta, and the
    //     zeros to which all warps add. Then the next may start where SMs have room.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    ROLLED while (true) {
      const int thread = thread_index() + 96;  // no register keeps it
      const bool end = next_h >= h_end;
      const int q_start = next_tile * BLOCK_Q;
      if (thread >= 64) {
        if (end) break;
        // The space of a warpgroup is free when the copy of the step before has read it.
        bulk_wait<1>();
        __syncwarp();
        named_arrive(BARRIER_DQ_EMPTY, WARPGROUP + 32);
        bulk_wait<0>();
        __syncwarp();
        named_arrive(BARRIER_DQ_EMPTY + 1, WARPGROUP + 32);
        const long long sum_tile = ((long long)b * p.heads_q + next_h) * ceil_div(p.seq_q, BLOCK_Q)
                                   + next_tile;
        float* const sums = p.dq_sum + sum_tile * (BLOCK_Q * SUM_COLUMNS);
        UNROLL for (int i = 0; i < CONSUMERS; ++i) {
          named_wait(BARRIER_DQ_FULL + i, WARPGROUP + 32);
          const int strip = 4 * i + thread - 64;
          if (thread < 68) {
            add_bulk(sums + strip * (DQ_BYTES / 4) + cluster_rank() * (DQ_HALF / 4),
                     smem_base + SMEM_DQ + strip * DQ_HALF, DQ_HALF);
            bulk_commit();
          }
        }
        ++next_tile;
        settle();
        continue;
      }
      const unsigned to = smem_base + SMEM_ROWS + stage.index * ROWS_BYTES;
      barrier_wait(q_empty[stage.index], stage.parity ^ 1);
      const int query = q_start + 2 * thread;
      const bool loads = !end && 2 * thread < BLOCK_Q;
      const long long row = (long long)(b * p.heads_q + next_h) * p.seq_q + query;
      const float2* rows = (const float2*)p.rows + row;
      float2 first = {__int_as_float(0x7f800000), 0.0f};  // P is 0 past the end
      float2 next = first;
      if (loads && query < p.seq_q) first = rows[0];
      if (loads && query + 1 < p.seq_q) next = rows[1];
      const bool far = __any_sync(0xffffffffu, is_far(first.x) | is_far(next.x));
      if (loads) {
        const unsigned pair = to + of_columns(thread / 4) + thread % 4 * 16;
        store_pair(pair, first.x, next.x);
        store_pair(to + 4 * BLOCK_Q + 16 * thread, -first.y, -next.y);
        store_pair(to + 4 * BLOCK_Q + 16 * thread + 8, -first.y, -next.y);
      }
      const bool whole = q_start + BLOCK_Q <= p.seq_q && k_start + BLOCK_K <= p.seq_k;
      const bool full_tile = !end && whole;
      const unsigned tile = to + ROWS_BYTES - 16;
      if (thread == 0) store_tile(tile, end ? -1 : q_start, next_h, full_tile);
      if (thread % 32 == 0) store_far(tile, thread / 32, far);
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(q_full[stage.index]);
      if (end) break;
      ++next_tile;
      settle();
      stage.next();
    }
    bulk_wait<0>();  // before the block's shared memory is released
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");

  // 4. This lane's elements of the accumulators: rows lane/4 and lane/4 + 8 of its warp's 16,
  //    columns 2*(lane%4) and the next of each group of 8. Rows are keys, columns are queries.
  const int thread = threadIdx.x - WARPGROUP;  // index among the consumers
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int warpgroup = __shfl_sync(0xffffffffu, thread / WARPGROUP, 0);
  const int first_key = warpgroup * 64;  // first key whose scores the warpgroup computes
  const int warp_row = warp * 16;
  // Where its share of dQ begins.
  const int dq_block = warpgroup * DQ_BLOCKS;
  const int dq_query = 0;
  const unsigned dq_stage = smem_base + SMEM_DQ + warp * DQ_HALF + 16 * lane;
  // Row-wise and column-wise products read the same tiles.
  const Operand<2 * PANEL, BLOCK_K> k_operand(smem_base + SMEM_K);
  const Operand<2 * PANEL_V, BLOCK_K> v_operand(smem_base + SMEM_V);
  const Operand<2 * PANEL, BLOCK_Q> q_operand(smem_base + SMEM_Q);
  const Operand<2 * PANEL_V, BLOCK_Q> do_operand(smem_base + SMEM_DO);
  const Operand<2 * PANEL_S, BLOCK_Q> ds_operand(smem_base + SMEM_DS);
  const auto k_rows = k_operand.from_row(first_key);
  const auto v_rows = v_operand.from_row(first_key);
  const unsigned scores_lane = smem_base + scores_address(warp % 4 * 16, lane)
                               + first_key / PANEL_S * ds_operand.PANEL_BYTES;
  const float exp_scale = p.scale * EXP_UNIT;  // factor on Q K^T

  float dk[COLUMNS / 8][4] = {};  // not yet multiplied by the scale
  float dv[COLUMNS_V / 8][4] = {};
  Stage stage;
  unsigned exchange = 0;  // the buffer of dS that this step writes

  // 5. Main loop.
  ROLLED while (true) {
    barrier_wait(q_full[stage.index], stage.parity);
    const Tile tile = read_tile(smem_base + SMEM_ROWS + stage.index * ROWS_BYTES + ROWS_BYTES - 16);
    if (tile.start < 0) break;
    const int q_start = tile.start;
    const int h = tile.h;

    // 5a. S^T = K Q^T and (dP - delta)^T = V dO^T - delta, from -delta on
    float s[QUERIES / 8][4];
    float ds[QUERIES / 8][4];
    const auto q_here = q_operand.moved(stage.index, Q_BYTES);
    const auto do_here = do_operand.moved(stage.index, DO_BYTES);
    const int first = 2 * (lane % 4);  // first query of this lane in the tile
    const unsigned base_lane = smem_base + SMEM_ROWS + stage.index * ROWS_BYTES + 8 * first;
    const unsigned delta_lane = base_lane + 4 * BLOCK_Q;
    wgmma_fence();
    UNROLL for (int c = 0; c < (HEAD_DIM + 15) / 16; ++c) {
      multiply_rows(s, k_rows.columns(c), q_here.columns(c), c > 0);
    }
    wgmma_commit();
    UNROLL for (int n = 0; n < QUERIES / 8; ++n) {
      read_four(ds[n], delta_lane + 64 * n);
    }
    barrier_wait(do_full[stage.index], stage.parity);
    pin(ds);
    wgmma_fence();
    UNROLL for (int c = 0; c < (HEAD_DIM_V + 15) / 16; ++c) {
      multiply_rows(ds, v_rows.columns(c), do_here.columns(c), true);
    }
    wgmma_commit();

    // 5b. P = exp(S - LSE), while dP is computed; then dS = P (dP - delta).
    wgmma_wait<1>();
    pin(s);
    if (tile.far) {
      const float* lse = p.lse + (long long)(b * p.heads_q + h) * p.seq_q + q_start + first;
      UNROLL for (int n = 0; n < QUERIES / 8; ++n) {
        float base[2];
        read_pair(base, base_lane + of_columns(n));
        subtract_lse(s[n], p.scale, base, lse + 8 * n);
      }
    }
    float base[4];  // of two n
    UNROLL for (int n = 0; n < QUERIES / 8; ++n) {
      if (n % 2 == 0) read_four(base, base_lane + 32 * n);
      UNROLL for (int e = 0; e < 4; ++e) {
        s[n][e] = probability(s[n][e], exp_scale, base[n % 2 * 2 + e % 2]);
      }
    }
    // This wait is over at once. The compiler leaves the exponentials before its loop; in
    // straight code it moves most of them behind the next wait, where nothing else runs.
    barrier_wait(q_full[stage.index], stage.parity);
    wgmma_wait<0>();
    pin(ds);
    UNROLL for (int n = 0; n < QUERIES / 8; ++n) {
      UNROLL for (int e = 0; e < 4; ++e) ds[n][e] *= s[n][e];
    }

    // 5c. Round P and dS, in pairs of queries, to the operands of the products below.
    unsigned p_rows[QUERIES / 16][4], ds_rows[QUERIES / 16][4];
    round_scores(p_rows, s);
    round_scores(ds_rows, ds);

    // 5d. The mask, on mixed tiles only; after the derivative, which may be infinite outside it.
    if (!tile.full) {
      const int thread = thread_index();
      const int column = q_start + thread % 4 * 2;
      const int row = k_start + thread / 32 * 16 + thread % 32 / 4;
      UNROLL for (int r = 0; r < 2; ++r) {
        const int key = row + 8 * r;
        const Range queries = key_queries(p);
        const int hi = key < p.seq_k ? queries.hi - column : 0;
        UNROLL for (int n = 0; n < QUERIES / 8; ++n) {
          const unsigned keep = ~pair_from(hi, n);
          p_rows[n / 2][n % 2 * 2 + r] &= keep;
          ds_rows[n / 2][n % 2 * 2 + r] &= keep;
        }
      }
    }

    // 5e. dS to shared memory, for all warpgroups.
    const unsigned scores_here = scores_lane + exchange * S_BYTES;
    store_scores(scores_here + SMEM_DS, ds_rows);
    proxy_fence();
    const auto ds_here = ds_operand.moved(exchange, S_BYTES);

    // 5f. dV += P^T dO
    wgmma_fence();
    UNROLL for (int n = 0; n < QUERIES / 16; ++n) {
      multiply_columns(dv, p_rows[n], do_here.rows(n));
    }
    wgmma_commit();
    named_wait(BARRIER_CONSUMERS, THREADS);

    // 5g. dQ^T = K^T dS^T of this tile
    float dq[DQ_BLOCKS][DQ_QUERIES / 8][4];
    const auto ds_columns = ds_here.from_row(dq_query);
    UNROLL for (int i = 0; i < DQ_BLOCKS; ++i) {
      UNROLL for (int n = 0; n < BLOCK_K / 16; ++n) {
        const auto columns = k_operand.from_panel((dq_block + i) * (64 / PANEL));
        multiply_queries(dq[i], columns.rows(n), ds_columns.columns(n), n > 0);
      }
    }
    wgmma_commit();

    // 5h. dK += dS^T Q
    UNROLL for (int n = 0; n < BLOCK_Q / 16; ++n) {
      multiply_columns(dk, ds_rows[n], q_here.rows(n));
    }
    wgmma_commit();

    // 5i. While that product runs, the buffer of dO is released, in both blocks, and they exchange
    //     halves of dQ: block 0 keeps the first half of the queries.
    //     A producer warp adds the sum of both, in the order of registers, to the sums.
    wgmma_wait<1>();
    if (thread % WARPGROUP < CLUSTER) barrier_arrive_in(lane, do_empty[stage.index]);
    pin(dq[0]);
    const unsigned rank = cluster_rank();
    const unsigned inbox_lane = dq_stage + (SMEM_INBOX - SMEM_DQ);
    const unsigned inbox_there = in_block(inbox_lane, rank ^ 1);
    const unsigned full_there = in_block(inbox_full[warp], rank ^ 1);
    if (lane == 0) barrier_announce(inbox_full[warp], DQ_HALF);
    barrier_wait(outbox_empty[warp], exchange ^ 1);
    if (rank == 0) send_half<0>(dq[0], inbox_there, full_there);
    else send_half<1>(dq[0], inbox_there, full_there);
    named_wait(BARRIER_DQ_EMPTY + warpgroup, WARPGROUP + 32);
    barrier_wait(inbox_full[warp], exchange);
    if (rank == 0) add_half<0>(dq[0], inbox_lane, dq_stage);
    else add_half<1>(dq[0], inbox_lane, dq_stage);
    __syncwarp();
    if (lane == 0) barrier_arrive_in(rank ^ 1, outbox_empty[warp]);
    proxy_fence();
    named_arrive(BARRIER_DQ_FULL + warpgroup, WARPGROUP + 32);
    wgmma_wait<0>();
    pin(dk);
    pin(dv);
    if (lane < CLUSTER) barrier_arrive_in(lane, q_empty[stage.index]);
    stage.next();
    exchange ^= 1;
  }

  // Of the other block this one has read everything, and writes no more to it.
  cluster_arrive();

  // 6. Every warpgroup is done with K and V, whose space now stages dK and dV.
  named_wait(BARRIER_CONSUMERS, THREADS);
  const int row = warp_row + lane / 4;
  stage_rows<VECTORS>(smem_base + SMEM_K, row, 0, lane, dk, p.scale);
  stage_rows<VECTORS_V>(smem_base + SMEM_V, row, 0, lane, dv, 1.0f);

  // 7. Copy them out in 16-byte vectors. Several warps copy each row: hence the barrier.
  named_wait(BARRIER_CONSUMERS, THREADS);
  const int head = p.first_head_group + block_index_y();  // h_kv, which the loop does not keep
  Element* dk_rows = p.dk + b * p.dk_stride_b + head * p.dk_stride_h + k_start * p.dk_stride_n;
  Element* dv_rows = p.dv + b * p.dv_stride_b + head * p.dv_stride_h + k_start * p.dv_stride_n;
  store_rows<BLOCK_K, VECTORS>(dk_rows, p.dk_stride_n, smem_base + SMEM_K, p.seq_k - k_start,
                               thread);
  store_rows<BLOCK_K, VECTORS_V>(dv_rows, p.dv_stride_n, smem_base + SMEM_V, p.seq_k - k_start,
                                 thread);
  cluster_wait();  // until then the other block may write to this one
}
