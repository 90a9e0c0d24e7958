#pragma once
#include "common.cuh"

// None beyond the batch.
__device__ __forceinline__ int slot_of(const i64* slots, const i64* rows, int token, int batch) {
  return token < batch ? (int)slots[rows[token]] : 0;
}

// A bit for each of at most 32 tokens; called by whole warps.
__device__ __forceinline__ u32 adapted_tokens(const i64* slots, const i64* rows, int batch) {
  return __ballot_sync(~0u, slot_of(slots, rows, threadIdx.x % 32, batch) != 0);
}

__device__ __forceinline__ uint4 load_constant(const bf16* from) { return *reinterpret_cast<const uint4*>(from); }

// A lane's part of a warp's SHARE values.
template <int SHARE>
struct LaneValues {
  static constexpr int STEPS = (SHARE + 255) / 256;
  uint4 at[STEPS] = {};
  template <class Load>
  __device__ __forceinline__ void load(const bf16* from, Load load) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const int column = i * 256 + threadIdx.x % 32 * 8;
      if (column < SHARE) at[i] = load(from + column);
    }
  }
  // In a loop: unpacked ahead of it they would take twice the registers.
  __device__ __forceinline__ void keep_packed() {
#pragma unroll
    for (int i = 0; i < STEPS; i++) asm volatile("" : "+r"(at[i].x), "+r"(at[i].y), "+r"(at[i].z), "+r"(at[i].w));
  }
};

template <int SHARE>
__device__ __forceinline__ float dot(const LaneValues<SHARE>& a, const LaneValues<SHARE>& x) {
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < a.STEPS; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 p = (&a.at[i].x)[j], q = (&x.at[i].x)[j];
      sum[j] += low_float(p) * low_float(q) + high_float(p) * high_float(q);
    }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
