// Row-major weights for skinny_gemm.cuh. A stage is CHUNK inputs of 16 rows. The copy engine takes about 35 ns for
// any short copy, so a stage is few: one for each row, or for several whole ones.
#pragma once
#include "skinny_gemm.cuh"

// At most 2048 bytes of a row of WIDTH weights of SIZE bytes.
__host__ __device__ constexpr int row_chunk(int width, int size) {
  for (int groups = 2048 / size / GROUP; groups > 1; groups--)
    if (width % (groups * GROUP) == 0) return groups * GROUP;
  return GROUP;
}

template <int WIDTH, int SIZE>
struct Rows {
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

// One warp; at(row) points at the stage's first input.
template <class R, class At>
__device__ __forceinline__ void produce_rows(Ring& ring, u64 policy, At at) {
  ring.fill(16 / R::TOGETHER, R::TOGETHER * R::BYTES, R::PIECE, policy, [&](int i) { return at(i * R::TOGETHER); });
}

// One warp: `inputs` of each token, `stride` apart, from at(i).
template <class At>
__device__ __forceinline__ void produce_tokens(Ring& ring, int count, int inputs, int stride, u64 policy, At at) {
  ring.fill(count, inputs * 2, stride * 2, policy, at);
}

// Words that depend on all reads of weights, and of tokens.
struct Reads {
  u32 weights = 0, tokens = 0;
};

// The workers; one token of each tile at `from`.
template <class R, int KIND, int NT>
__device__ __forceinline__ Reads multiply_rows(float4 (&sum)[NT], const unsigned char* stage, const bf16* const (&from)[NT]) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const unsigned char* rows = stage + R::offset(R::row(g));
  Reads reads;
#pragma unroll
  for (int i = 0; i < ceil_div(R::CHUNK / GROUP, WARPS); i++) {
    const int at = (i * WARPS + warp) * GROUP + t * R::LANE;
    if ((i + 1) * WARPS * GROUP > R::CHUNK && (i * WARPS + warp) * GROUP >= R::CHUNK) break;
    Weights weights;
    if (KIND != BF16) {
      const uint4 a = *reinterpret_cast<const uint4*>(rows + at);
      const uint4 b = *reinterpret_cast<const uint4*>(rows + R::STAGE / 2 + at);
      reads.weights |= a.x | b.x;
      weights.low[0] = widened<KIND>(a.x, a.y), weights.low[1] = widened<KIND>(a.z, a.w);
      weights.high[0] = widened<KIND>(b.x, b.y), weights.high[1] = widened<KIND>(b.z, b.w);
    } else {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        weights.low[half] = *reinterpret_cast<const uint4*>(rows + (at + half * R::HALF) * 2);
        weights.high[half] = *reinterpret_cast<const uint4*>(rows + R::STAGE / 2 + (at + half * R::HALF) * 2);
      }
      reads.weights |= weights.read();
    }
    Tokens<NT> tokens;
#pragma unroll
    for (int tile = 0; tile < NT; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        tokens.of[tile][half] = *reinterpret_cast<const uint4*>(from[tile] + at + half * R::HALF);
    multiply<NT>(sum, weights, tokens);
    reads.tokens |= tokens.read();
  }
  return reads;
}
