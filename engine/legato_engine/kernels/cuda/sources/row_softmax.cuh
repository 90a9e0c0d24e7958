// The softmax of attention to all keys, block by block, of scores as tensor cores leave them: of a row r or r + 8, four lanes each have
// two of every eight. HEAD dimensions.
#pragma once
#include "common.cuh"

// Of this thread's two rows: greatest score, and its share of the sum.
struct Softmax {
  float top[2], sum[2];
  __device__ __forceinline__ void reset() { top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0.f; }

  // Scores become powers below the new greatest; `shrink` scales earlier results. Of N keys VALID exist.
  template <int N, int VALID>
  __device__ __forceinline__ void step(float (&s)[N / 2], float (&shrink)[2]) {
    constexpr float SCALE = HEAD == 64 ? 0.125f * 1.4426950408889634f : 0.11785113019775793f * 1.4426950408889634f;
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (8 * i + 8 > VALID && 8 * i + column + j % 2 >= VALID) s[4 * i + j] = -INFINITY;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = top[r];
#pragma unroll
      for (int i = 0; i < N / 8; i++) most = fmaxf(most, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      shrink[r] = power_of_two((top[r] - most) * SCALE);
      top[r] = most;
      const float offset = most * SCALE;
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float& x = s[4 * i + 2 * r + j];
          x = power_of_two(fmaf(x, SCALE, -offset));
          total += x;
        }
      sum[r] = sum[r] * shrink[r] + total;
    }
  }
  __device__ __forceinline__ float inverse(int r) const {
    float total = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
    total += __shfl_xor_sync(~0u, total, 2);
    return 1.f / total;
  }
};
