// Stages of 16 rows by CHUNK inputs for skinny_gemm.cuh, of row-major or packed weights. The copy engine takes about
// 35 ns for any short copy, so a stage is few: of row-major weights one for each row, or for several whole ones.
#pragma once
#include "skinny_gemm.cuh"

// At most 2048 bytes of a row of WIDTH weights of SIZE bytes.
__host__ __device__ constexpr int row_chunk(int width, int size) {
  for (int groups = 2048 / size / GROUP; groups > 1; groups--)
    if (width % (groups * GROUP) == 0) return groups * GROUP;
  return GROUP;
}

// At most `most` of as many runs, which it divides.
__host__ __device__ constexpr int runs_of(int runs, int most) {
  for (int each = most; each > 1; each--)
    if (runs % each == 0) return each;
  return 1;
}

// Row-major weights: bf16, or with a scale for each row E4M3 or INT8.
template <int WIDTH, int KIND>
struct Rows {
  static constexpr int SIZE = KIND == BF16 ? 2 : 1;
  static constexpr int CHUNK = row_chunk(WIDTH, SIZE), CHUNKS = WIDTH / CHUNK, BYTES = CHUNK * SIZE;
  static constexpr int TOGETHER = CHUNKS > 1 ? 1 : BYTES > 1024 ? 2 : 4;  // rows that are copied as one
  static constexpr int PIECE = TOGETHER * BYTES + 64;                     // from one copy to the next
  static constexpr int STAGE = 16 / TOGETHER * PIECE;
  // For 16-byte reads without bank conflicts.
  static constexpr int LANE = SIZE == 1 ? 16 : 8;  // inputs from lane to lane
  static constexpr int HALF = SIZE == 1 ? 8 : 32;  // from its first eight to the others
  static constexpr int PADDING = SIZE == 1 ? 8 : 32;  // values between tokens

  // Adjacent rows of a product come from adjacent copies.
  static __device__ __forceinline__ int row(int g) {
    if (TOGETHER == 1) return g;
    return TOGETHER == 2 ? (g & 4) | (g & 1) << 1 | (g >> 1 & 1) : (g & 1) << 2 | g >> 1;
  }
  static __device__ __forceinline__ int offset(int row) { return row / TOGETHER * PIECE + row % TOGETHER * BYTES; }

  // One warp: stage i of 16 rows of `weights`, which are rows at(0) to at(15).
  template <class At>
  static __device__ __forceinline__ void produce(Ring& ring, u64 policy, const unsigned char* weights, i64, int i, At at) {
    ring.fill(16 / TOGETHER, TOGETHER * BYTES, PIECE, policy, [&](int copy) {
      return weights + ((i64)at(copy * TOGETHER) * WIDTH + i * CHUNK) * SIZE;
    });
  }
};

// The same of packed weights, of WEIGHTS: at most MOST inputs, in runs.
template <int WIDTH, int MOST>
struct PackedRows {
  static constexpr int RUN = chunk_of(WIDTH), RUNS = runs_of(WIDTH / RUN, MOST / RUN);
  static constexpr int CHUNK = RUN * RUNS, CHUNKS = WIDTH / CHUNK, STAGE = RUNS * STAGE_BYTES<RUN>;
  static constexpr int HALF = 32, PADDING = PAD;

  static __device__ __forceinline__ int row(int g) { return g; }

  // Of block `block` of 16 packed rows.
  template <class At>
  static __device__ __forceinline__ void produce(Ring& ring, u64 policy, const unsigned char* weights, i64 block, int i, At) {
    ring.fill(1, STAGE, STAGE, policy, [&](int) { return weights + (block * CHUNKS + i) * STAGE; });
  }
};

// e4m3's sign, exponent and mantissa are moved as they are, subnormals included, so bf16 has other units. Tokens are
// lifted by LIFT, so that no sum gets too small for float32.
constexpr float LOWER = 0x1p56f;  // 2^120 / LIFT: of sums

// Of e4m3 in the upper bytes of both halves.
__device__ __forceinline__ u32 of_e4m3(u32 pair) { return pair & 0x80008000u | pair >> 4 & 0x07f007f0u; }

// Eight weights of KIND, E4M3 or INT8.
template <int KIND>
__device__ __forceinline__ uint4 widened(u32 first, u32 second) {
  if (KIND == INT8)
    return {of_int8(__byte_perm(first, 0, 0x4140)), of_int8(__byte_perm(first, 0, 0x4342)),
            of_int8(__byte_perm(second, 0, 0x4140)), of_int8(__byte_perm(second, 0, 0x4342))};
  return {of_e4m3(__byte_perm(first, 0, 0x1404)), of_e4m3(__byte_perm(first, 0, 0x3424)),
          of_e4m3(__byte_perm(second, 0, 0x1404)), of_e4m3(__byte_perm(second, 0, 0x3424))};
}

// One warp: `inputs` of each token, `stride` apart, from at(i).
template <class At>
__device__ __forceinline__ void produce_tokens(Ring& ring, int count, int inputs, int stride, u64 policy, At at) {
  ring.fill(count, inputs * 2, stride * 2, policy, at);
}

// A warp's weights of a stage in registers, so that the stage is let go before the products.
template <class R>
struct HeldRows;
template <int WIDTH, int KIND>
struct HeldRows<Rows<WIDTH, KIND>> {
  using R = Rows<WIDTH, KIND>;
  static constexpr int GROUPS = ceil_div(R::CHUNK / GROUP, WARPS), SIZE = R::SIZE, PIECES = SIZE;
  uint4 low[GROUPS][PIECES] = {}, high[GROUPS][PIECES] = {};

  // Inputs of the lane from which on its weights of a group are; negative without any.
  static __device__ __forceinline__ int at(int group) {
    const int first = (group * WARPS + threadIdx.x / 32) * GROUP, t = threadIdx.x % 4;
    return (group + 1) * WARPS * GROUP > R::CHUNK && first >= R::CHUNK ? -1 : first + t * R::LANE;
  }
  __device__ __forceinline__ explicit HeldRows(const bf16* stage) {
    const auto* rows = reinterpret_cast<const unsigned char*>(stage) + R::offset(R::row(threadIdx.x % 32 / 4));
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      if (at(group) < 0) break;
#pragma unroll
      for (int piece = 0; piece < PIECES; piece++) {
        const auto* from = rows + (at(group) + piece * R::HALF) * SIZE;
        low[group][piece] = *reinterpret_cast<const uint4*>(from);
        high[group][piece] = *reinterpret_cast<const uint4*>(from + R::STAGE / 2);
      }
    }
  }
  // A word that depends on all reads.
  __device__ __forceinline__ u32 read() const {
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < GROUPS * PIECES; i++) all |= low[i / PIECES][i % PIECES].x | high[i / PIECES][i % PIECES].x;
    return all;
  }
  __device__ __forceinline__ Weights group(int i) const {
    if constexpr (KIND == BF16) {
      return Weights{{low[i][0], low[i][1]}, {high[i][0], high[i][1]}};
    } else {
      const uint4 a = low[i][0], b = high[i][0];
      return Weights{{widened<KIND>(a.x, a.y), widened<KIND>(a.z, a.w)}, {widened<KIND>(b.x, b.y), widened<KIND>(b.z, b.w)}};
    }
  }
};
template <int WIDTH, int MOST>
struct HeldRows<PackedRows<WIDTH, MOST>> {
  using R = PackedRows<WIDTH, MOST>;
  static constexpr int GROUPS = R::RUNS;
  PackedWeights of[GROUPS] = {};

  static __device__ __forceinline__ int at(int group) {
    const int warp = threadIdx.x / 32;
    return has_inputs<R::RUN>(warp) ? group * R::RUN + warp * GROUP + threadIdx.x % 4 * 8 : -1;
  }
  __device__ __forceinline__ explicit HeldRows(const bf16* stage) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
      if (at(group) >= 0) of[group].template load<R::RUN>(stage + group * (STAGE_BYTES<R::RUN> / 2));
  }
  __device__ __forceinline__ u32 read() const {
    u32 all = 0;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) all |= of[group].read();
    return all;
  }
  __device__ __forceinline__ const PackedWeights& group(int i) const { return of[i]; }
};

// The workers; one token of each tile at `from`. Returns a word that depends on all reads of tokens.
template <class R, int NT>
__device__ __forceinline__ u32 multiply_rows(float4 (&sum)[NT], const HeldRows<R>& rows, const bf16* const (&from)[NT]) {
  u32 read = 0;
#pragma unroll
  for (int group = 0; group < rows.GROUPS; group++) {
    const int at = rows.at(group);
    if (at < 0) break;
    Tokens<NT> tokens;
#pragma unroll
    for (int tile = 0; tile < NT; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        tokens.of[tile][half] = *reinterpret_cast<const uint4*>(from[tile] + at + half * R::HALF);
    multiply<NT>(sum, rows.group(group), tokens);
    read |= tokens.read();
  }
  return read;
}
