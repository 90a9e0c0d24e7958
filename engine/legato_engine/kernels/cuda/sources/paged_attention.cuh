// A step's keys and values for up to eight queries, and merged softmaxes over parts of the positions. In a warp lane
// = 4g + t; columns are tokens.
#pragma once
#include "kv_tiles.cuh"
#include "softmax_parts.cuh"

// `out` is still to be divided by `sum`.
struct Part {
  float out[HEAD];
  float top, sum;
  float unused[2];  // against bank conflicts
};

// Tokens 2t (.x, .z) and 2t + 1 (.y, .w), dimensions 16i + `value_dim`(g, 0) (.x, .y) and (g, 1) (.z, .w) of out[i].
struct Parts {
  float4 out[HEAD / 16] = {};
  float2 top = {-INFINITY, -INFINITY}, sum = {0.f, 0.f};
  __device__ __forceinline__ void store(Part* parts, int size) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int column = 0; column < 2; column++) {
      if (2 * t + column >= size) continue;
      Part& part = parts[2 * t + column];
#pragma unroll
      for (int i = 0; i < HEAD / 16; i++) {
        const float low = (&out[i].x)[column], high = (&out[i].x)[2 + column];
        if (NARROW) {
          *reinterpret_cast<float2*>(part.out + 16 * i + value_dim(g, 0)) = float2{low, high};
        } else {
          part.out[16 * i + value_dim(g, 0)] = low;
          part.out[16 * i + value_dim(g, 1)] = high;
        }
      }
      if (g == 0) part.top = (&top.x)[column], part.sum = (&sum.x)[column];
    }
  }
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

struct Quad {
  float4 out;
  float2 end;
};

__device__ __forceinline__ Quad merged(const Quad& a, const Quad& b) {
  const Weights weights(a.end.x, b.end.x);
  return Quad{{weights.add(a.out.x, b.out.x), weights.add(a.out.y, b.out.y), weights.add(a.out.z, b.out.z),
               weights.add(a.out.w, b.out.w)},
              {weights.top, weights.add(a.end.y, b.end.y)}};
}

// Over the lanes with the same t.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

// Tokens 2t and 2t + 1 see the step's first `left` and `right` positions. `unit` makes of products exponents of two.
__device__ __forceinline__ void attend_step(
    Parts& track, const Stage& stage, const Query& query, float unit, int left, int right) {
  const int g = threadIdx.x % 32 / 4;
  float4 scores[STEP_TILES];
  float2 most;
#pragma unroll
  for (int tile = 0; tile < STEP_TILES; tile++) {
    float4& score = scores[tile];
    score = scores_of(stage.keys + tile * TILE * HEAD, query);
    const int low = tile * TILE + g, high = low + 8;
    score.x = low < left ? score.x : -INFINITY;
    score.y = low < right ? score.y : -INFINITY;
    score.z = high < left ? score.z : -INFINITY;
    score.w = high < right ? score.w : -INFINITY;
    const float2 here = {fmaxf(score.x, score.z), fmaxf(score.y, score.w)};
    most = tile == 0 ? here : float2{fmaxf(most.x, here.x), fmaxf(most.y, here.y)};
  }
  const float2 top = {fmaxf(track.top.x, column_max(most.x) * unit), fmaxf(track.top.y, column_max(most.y) * unit)};
  const float2 base = {base_of(top.x), base_of(top.y)};
  const float2 scale = {power_of_two(track.top.x - base.x), power_of_two(track.top.y - base.y)};
  track.top = top;
  // The sum of probabilities is one more dimension, whose values are all 1.
  float4 sum = {track.sum.x * scale.x, track.sum.y * scale.y, 0.f, 0.f};
  u32 early[STEP_TILES], late[STEP_TILES];
#pragma unroll
  for (int tile = 0; tile < STEP_TILES; tile++) {
    const float4 score = scores[tile];
    early[tile] = transposed(pack_cached(weight_of(score.x, unit, base.x), weight_of(score.y, unit, base.y)));
    late[tile] = transposed(pack_cached(weight_of(score.z, unit, base.x), weight_of(score.w, unit, base.y)));
    multiply_cached(sum, ONES, ONES, ONES, ONES, early[tile], late[tile]);
  }
  track.sum = float2{sum.x, sum.y};
#pragma unroll
  for (int i = 0; i < HEAD / 16; i += Values::RUNS_AT_ONCE) {
#pragma unroll
    for (int run = i; run < i + Values::RUNS_AT_ONCE; run++) {
      float4& out = track.out[run];
      out.x *= scale.x, out.y *= scale.y, out.z *= scale.x, out.w *= scale.y;
    }
#pragma unroll
    for (int tile = 0; tile < STEP_TILES; tile++) {
      const Values values(stage.values + tile * TILE * HEAD, i);
#pragma unroll
      for (int run = 0; run < Values::RUNS_AT_ONCE; run++) {
        const uint4 v = values.of[run];
        multiply_cached(track.out[i + run], v.x, v.y, v.z, v.w, early[tile], late[tile]);
      }
    }
  }
}
