// Softmaxes over parts of a token's positions, and how they are merged: the same bits in every kernel that attends.
//
// A page of 16 positions is a step. Steps i, i + 32, ... are a track, one after the other; a line is four tracks, those of steps
// whose number has the same remainder by LINES.
#pragma once
#include "common.cuh"

// 1 / sqrt(dimensions of a head), for powers of two.
constexpr float scale_of(int head) { return (head == 64 ? 0.125f : 0.08838834764831845f) * 1.4426950408889634f; }
constexpr int LINES = 8;
constexpr int TURNS = 4;  // tracks of a line

// A softmax's weights of 0 before it has seen any position.
__device__ __forceinline__ float base_of(float top) { return top == -INFINITY ? 0.f : top; }

// The weight of a position, of the product of query and key, -INFINITY where there is none. `base` is at least all products times
// `unit`.
__device__ __forceinline__ float weight_of(float product, float unit, float base) {
  return power_of_two(__fmaf_rn(product, unit, -base));
}

// A part without positions has weight 0.
struct Weights {
  float top, first, second;
  __device__ __forceinline__ Weights(float a, float b) : top(fmaxf(a, b)) {
    const float base = base_of(top);
    first = power_of_two(a - base);
    second = power_of_two(b - base);
  }
  __device__ __forceinline__ float add(float a, float b) const { return __fmaf_rn(a, first, __fmul_rn(b, second)); }
};

// Two dimensions of a part, still to be divided by its sum.
struct Slice {
  float2 out, end;  // `end`: top and sum
};

__device__ __forceinline__ Slice merged(const Slice& a, const Slice& b) {
  const Weights weights(a.end.x, b.end.x);
  return Slice{{weights.add(a.out.x, b.out.x), weights.add(a.out.y, b.out.y)},
               {weights.top, weights.add(a.end.y, b.end.y)}};
}

// A line of its tracks.
__device__ __forceinline__ Slice line_of(const Slice (&tracks)[TURNS]) {
  return merged(merged(tracks[0], tracks[1]), merged(tracks[2], tracks[3]));
}

// The token's result.
__device__ __forceinline__ float2 result_of(const Slice (&lines)[LINES]) {
  float top = -INFINITY, total = 0.f;
#pragma unroll
  for (int i = 0; i < LINES; i++) top = fmaxf(top, lines[i].end.x);
  float2 value = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < LINES; i++) {
    const float weight = power_of_two(lines[i].end.x - top);
    total = __fmaf_rn(weight, lines[i].end.y, total);
    value.x = __fmaf_rn(weight, lines[i].out.x, value.x);
    value.y = __fmaf_rn(weight, lines[i].out.y, value.y);
  }
  return float2{__fdiv_rn(value.x, total), __fdiv_rn(value.y, total)};
}
