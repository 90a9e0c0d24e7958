// Sixteen positions' keys and values against up to eight queries, in the layouts of tensor cores; and what
// softmaxes over some positions leave, added up.
//
// In a warp lane = 4g + t. Columns of all products are tokens; unused ones hold zeros, or see nothing.
#pragma once
#include "common.cuh"

constexpr int HEAD = 64;
constexpr int STEP = 16;
constexpr u32 ONES = 0x3f803f80;                       // two bf16
constexpr float SCALE = 0.125f * 1.4426950408889634f;  // 1 / sqrt(64), for powers of two

// Keys and values of a step. Of a position's eight runs of 16 bytes run c lies at c ^ (position % 8), so that
// neither eight positions' same run nor one position's runs meet in a bank.
struct Stage {
  bf16 keys[STEP * HEAD], values[STEP * HEAD];
};

// What the softmax of one token over some positions leaves: `out` is still to be divided by `sum`.
struct Part {
  float out[HEAD];
  float top, sum;
  float unused[2];  // so that a warp's stores meet no bank twice
};

// Parts of 8 tokens as a warp holds them: tokens 2t (.x, .z) and 2t + 1 (.y, .w), dimensions
// 16i + g (.x, .y) and 16i + 8 + g (.z, .w) of out[i].
struct Parts {
  float4 out[HEAD / 16] = {};
  float2 top = {-INFINITY, -INFINITY}, sum = {0.f, 0.f};
  // To `size` parts.
  __device__ __forceinline__ void store(Part* parts, int size) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int column = 0; column < 2; column++) {
      if (2 * t + column >= size) continue;
      Part& part = parts[2 * t + column];
#pragma unroll
      for (int i = 0; i < HEAD / 16; i++) {
        part.out[16 * i + g] = (&out[i].x)[column];
        part.out[16 * i + 8 + g] = (&out[i].x)[2 + column];
      }
      if (g == 0) part.top = (&top.x)[column], part.sum = (&sum.x)[column];
    }
  }
};

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// How two parts are weighed to be added; what has no positions weighs nothing.
struct Weights {
  float top, first, second;
  __device__ __forceinline__ Weights(float a, float b) : top(fmaxf(a, b)) {
    const float base = top == -INFINITY ? 0.f : top;
    first = power_of_two(a - base);
    second = power_of_two(b - base);
  }
  __device__ __forceinline__ float add(float a, float b) const { return __fmaf_rn(a, first, __fmul_rn(b, second)); }
};

__device__ __forceinline__ Parts merged(const Parts& a, const Parts& b) {
  const Weights left(a.top.x, b.top.x), right(a.top.y, b.top.y);
  Parts all;
#pragma unroll
  for (int i = 0; i < HEAD / 16; i++) {
    all.out[i].x = left.add(a.out[i].x, b.out[i].x);
    all.out[i].y = right.add(a.out[i].y, b.out[i].y);
    all.out[i].z = left.add(a.out[i].z, b.out[i].z);
    all.out[i].w = right.add(a.out[i].w, b.out[i].w);
  }
  all.top = float2{left.top, right.top};
  all.sum = float2{left.add(a.sum.x, b.sum.x), right.add(a.sum.y, b.sum.y)};
  return all;
}

// Two dimensions of a token's part.
struct Slice {
  float2 out, end;  // `end`: top and sum
};

__device__ __forceinline__ Slice merged(const Slice& a, const Slice& b) {
  const Weights weights(a.end.x, b.end.x);
  return Slice{{weights.add(a.out.x, b.out.x), weights.add(a.out.y, b.out.y)},
               {weights.top, weights.add(a.end.y, b.end.y)}};
}

// Four 8 x 8 matrices, transposed; a lane names 16 bytes of one row.
__device__ __forceinline__ uint4 load_transposed(const bf16* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(row)) : "memory");
  return v;
}
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 v;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
  return v;
}

// A token's query as a lane holds it: 16 dimensions from 16t on of token g. The order of summation over
// dimensions is free: product s takes dimensions 4s..4s+3 of the lane's.
struct Query {
  uint4 low, high;
};

// 16 positions' keys, as a lane holds them: the dimensions of its query, of positions g and g + 8.
struct Keys {
  uint4 of[2][2];
  __device__ __forceinline__ explicit Keys(const bf16* keys) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int run = 0; run < 2; run++)
        of[half][run] = *reinterpret_cast<const uint4*>(keys + (half * 8 + g) * HEAD + ((2 * t + run) ^ g) * 8);
  }
  __device__ __forceinline__ float4 scores(const Query& q) const {
    float4 a = {0.f, 0.f, 0.f, 0.f}, b = {0.f, 0.f, 0.f, 0.f};
    mma(a, of[0][0].x, of[1][0].x, of[0][0].y, of[1][0].y, q.low.x, q.low.y);
    mma(b, of[0][1].x, of[1][1].x, of[0][1].y, of[1][1].y, q.high.x, q.high.y);
    mma(a, of[0][0].z, of[1][0].z, of[0][0].w, of[1][0].w, q.low.z, q.low.w);
    mma(b, of[0][1].z, of[1][1].z, of[0][1].w, of[1][1].w, q.high.z, q.high.w);
    return float4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
  }
};

// 16 positions' values of dimensions 16i to 16i + 15: positions 2t, 2t + 1 (.x, .y) and 2t + 8, 2t + 9 (.z, .w)
// of dimensions 16i + g (.x, .z) and 16i + 8 + g.
__device__ __forceinline__ uint4 load_values(const bf16* values, int i) {
  const int lane = threadIdx.x % 32, position = lane / 16 * 8 + lane % 8, odd = lane / 8 % 2;
  return load_transposed(values + position * HEAD + ((2 * i + odd) ^ (lane % 8)) * 8);
}

// The finite ones of a pair of bf16.
__device__ __forceinline__ u32 finite(u32 pair) {
  const u32 exponents = ~pair & 0x7f807f80u;
  return pair & ((exponents & 0xffffu ? 0xffffu : 0u) | (exponents >> 16 ? 0xffff0000u : 0u));
}

// Zeros for values that are no numbers: 0 times those is none either.
__device__ __forceinline__ void clean(bf16* values) {
  uint4* at = reinterpret_cast<uint4*>(values) + threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < STEP * HEAD / 8; i += 32) {
    const uint4 v = at[i];
    at[i] = uint4{finite(v.x), finite(v.y), finite(v.z), finite(v.w)};
  }
  __syncwarp();
}

// The most over a column's rows: the lanes with the same t.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

// Adds a step to a track; tokens 2t and 2t + 1 see its first `left` and `right` positions.
__device__ __forceinline__ void attend_step(
    Parts& track, const Stage& stage, const Query& query, int left, int right) {
  const int g = threadIdx.x % 32 / 4;
  float4 score = Keys(stage.keys).scores(query);
  score.x = g < left ? score.x * SCALE : -INFINITY;
  score.y = g < right ? score.y * SCALE : -INFINITY;
  score.z = g + 8 < left ? score.z * SCALE : -INFINITY;
  score.w = g + 8 < right ? score.w * SCALE : -INFINITY;
  const float2 top = {fmaxf(track.top.x, column_max(fmaxf(score.x, score.z))),
                      fmaxf(track.top.y, column_max(fmaxf(score.y, score.w)))};
  const float2 base = {top.x == -INFINITY ? 0.f : top.x, top.y == -INFINITY ? 0.f : top.y};
  const float2 scale = {power_of_two(track.top.x - base.x), power_of_two(track.top.y - base.y)};
  track.top = top;
  const u32 low = pack(power_of_two(score.x - base.x), power_of_two(score.y - base.y));
  const u32 high = pack(power_of_two(score.z - base.x), power_of_two(score.w - base.y));
  const u32 early = transposed(low), late = transposed(high);
  // The sum of the probabilities is one more dimension, whose values are all 1.
  float4 sum = {track.sum.x * scale.x, track.sum.y * scale.y, 0.f, 0.f};
  mma(sum, ONES, ONES, ONES, ONES, early, late);
  track.sum = float2{sum.x, sum.y};
#pragma unroll
  for (int i = 0; i < HEAD / 16; i++) {
    uint4 v = load_values(stage.values, i);
    float4& out = track.out[i];
    out.x *= scale.x, out.y *= scale.y, out.z *= scale.x, out.w *= scale.y;
    mma(out, v.x, v.y, v.z, v.w, early, late);
  }
}
