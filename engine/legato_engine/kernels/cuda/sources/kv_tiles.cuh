// A step's keys and values, from pages to shared memory to tensor cores' layouts: bf16, or e4m3 in units of a layer's
// scale, widened to fp16. HEAD is 64 or 128. In a warp lane = 4g + t.
#pragma once
#include "kv_element.cuh"

static_assert(HEAD == 64 || HEAD == 128, "unsupported sizes");
constexpr int HALVES = HEAD / 64;  // of 64 dimensions
constexpr int TILE = 16;  // positions of a product
constexpr bool NARROW = KV_BYTES == 1;
constexpr int STEP_TILES = NARROW ? 2 : 1;  // as many bytes of either kind
constexpr int STEP = STEP_TILES * TILE;
static_assert(KV_BYTES == 1 || KV_BYTES == 2, "bf16 or e4m3");

constexpr int RUN = 16 / KV_BYTES;  // elements copied at once
constexpr int RUNS = HEAD / RUN;    // of a position

// Run c of a position lies at c ^ position, or c ^ (position / 2) of four, modulo the runs, against bank conflicts.
struct Stage {
  Element keys[STEP * HEAD], values[STEP * HEAD];
};
__device__ __forceinline__ int run_at(int position, int run) {
  return position * HEAD + ((run ^ (RUNS == 4 ? position >> 1 : position)) & (RUNS - 1)) * RUN;
}

__device__ __forceinline__ void multiply_cached(float4& d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (NARROW)
    mma_half(d, a0, a1, a2, a3, b0, b1);
  else
    mma(d, a0, a1, a2, a3, b0, b1);
}

__device__ __forceinline__ u32 pack_cached(float low, float high) { return NARROW ? pack_half(low, high) : pack(low, high); }
constexpr u32 ONES = NARROW ? 0x3c003c00 : 0x3f803f80;

// Beyond 65504 fp16 has no numbers: queries as large give infinite scores.
__device__ __forceinline__ uint4 as_cached(uint4 v) {
  if (!NARROW) return v;
#pragma unroll
  for (int i = 0; i < 4; i++) (&v.x)[i] = pack_cached(low_float((&v.x)[i]), high_float((&v.x)[i]));
  return v;
}

// The e4m3 in half of a word: all are fp16 numbers, and NaN stays.
#if KV_BYTES == 1
__device__ __forceinline__ u32 widened(u32 word, int upper) {
  return half_of_e4m3(upper ? word >> 16 : word & 0xffff);
}
#else
__device__ __forceinline__ u32 widened(u32 word, int) { return word; }
#endif

// A lane's dimensions from 16t on of each 64 of token g. The order of summation is free: product s takes 4s..4s+3 of them.
struct Query {
  uint4 low[HALVES], high[HALVES];
};

// The same dimensions of positions g and g + 8, of 64.
struct Keys {
  uint4 of[2][NARROW ? 1 : 2];
  __device__ __forceinline__ Keys(const Element* keys, int part) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr int each = NARROW ? 1 : 2;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int run = 0; run < each; run++)
        of[half][run] = *reinterpret_cast<const uint4*>(keys + run_at(half * 8 + g, each * (4 * part + t) + run));
  }
  __device__ __forceinline__ u32 pair(int half, int i) const {
    if (NARROW) return widened((&of[half][0].x)[i / 2], i % 2);
    return (&of[half][i / 4 % (NARROW ? 1 : 2)].x)[i % 4];
  }
  __device__ __forceinline__ void multiply(float4& a, float4& b, const uint4& low, const uint4& high) const {
    multiply_cached(a, pair(0, 0), pair(1, 0), pair(0, 1), pair(1, 1), low.x, low.y);
    multiply_cached(b, pair(0, 4), pair(1, 4), pair(0, 5), pair(1, 5), high.x, high.y);
    multiply_cached(a, pair(0, 2), pair(1, 2), pair(0, 3), pair(1, 3), low.z, low.w);
    multiply_cached(b, pair(0, 6), pair(1, 6), pair(0, 7), pair(1, 7), high.z, high.w);
  }
};

__device__ __forceinline__ float4 scores_of(const Element* keys, const Query& q) {
  float4 a = {0.f, 0.f, 0.f, 0.f}, b = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < HALVES; i++) Keys(keys, i).multiply(a, b, q.low[i], q.high[i]);
  return float4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

__device__ __forceinline__ int value_dim(int g, int which) { return NARROW ? 2 * g + which : g + 8 * which; }

// Values of one or two runs of 16 dimensions, from 16i on: positions 2t, 2t + 1 (.x, .y) and 2t + 8, 2t + 9 (.z, .w)
// of dimensions `value_dim`(g, 0) (.x, .z) and (g, 1) (.y, .w).
struct Values {
  static constexpr int RUNS_AT_ONCE = NARROW ? 2 : 1;
  uint4 of[RUNS_AT_ONCE];
  __device__ __forceinline__ Values(const Element* values, int i) {
    const int lane = threadIdx.x % 32, upper = lane / 16, odd = lane / 8 % 2;
    if (!NARROW) {
      of[0] = load_transposed(values + run_at(upper * 8 + lane % 8, (2 * i + odd) % RUNS));
      return;
    }
    // A word has two dimensions of each of two positions.
    const uint4 v = load_transposed(values + run_at(odd * 8 + lane % 8, (i + upper) % RUNS));
#pragma unroll
    for (int run = 0; run < RUNS_AT_ONCE; run++) {
      const u32 early = __byte_perm((&v.x)[2 * run], 0, 0x3120), late = __byte_perm((&v.x)[2 * run + 1], 0, 0x3120);
      of[run] = uint4{widened(early, 0), widened(early, 1), widened(late, 0), widened(late, 1)};
    }
  }
};

// e4m3 has NaN only.
__device__ __forceinline__ u32 finite(u32 word) {
  if (NARROW) return word & ~((((word & 0x7f7f7f7fu) + 0x01010101u) >> 7 & 0x01010101u) * 0xffu);
  const u32 exponents = ~word & 0x7f807f80u;
  return word & ((exponents & 0xffffu ? 0xffffu : 0u) | (exponents >> 16 ? 0xffff0000u : 0u));
}

// Zeros for values that are not finite, because 0 times them is NaN.
__device__ __forceinline__ void clean(Element* values) {
  uint4* at = reinterpret_cast<uint4*>(values) + threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < STEP * RUNS; i += 32) {
    const uint4 v = at[i];
    at[i] = uint4{finite(v.x), finite(v.y), finite(v.z), finite(v.w)};
  }
  __syncwarp();
}
