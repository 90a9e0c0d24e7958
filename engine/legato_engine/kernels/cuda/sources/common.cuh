// There are no system headers.
#pragma once
#include "ptx.cuh"

constexpr float LIFT = 0x1p64f;  // see row_major_gemm.cuh

#define INFINITY __int_as_float(0x7f800000)

__device__ __forceinline__ float to_float(bf16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ bf16 to_bf16(float x) { return (bf16)pack(x, 0.f); }
__device__ __forceinline__ float rounded(float x) { return low_float(pack(x, 0.f)); }

#ifdef DELAYS  // for tests: warps arrive late at waits
__device__ __forceinline__ void dawdle(u32 where) {
  u32 luck = clock_word();
  luck ^= where * 0x9e3779b9u ^ blockIdx.x * 0x85ebca6bu ^ threadIdx.x / 32 * 0xc2b2ae35u;
  luck = (luck ^ luck >> 15) * 0x2c1b3c6du;
  luck = (luck ^ luck >> 12) * 0x297a2d39u;
  luck ^= luck >> 15;
  if (luck % 4 == 0) __nanosleep(luck >> 8 & (luck / 4 % 16 == 0 ? 16383 : 2047));
}
#else
__device__ __forceinline__ void dawdle(u32) {}
#endif

__device__ __forceinline__ void launch_dependents() {
  dawdle(1);
  grid_launch_dependents();
}
__device__ __forceinline__ void wait_previous() {
  dawdle(2);
  grid_wait();
  dawdle(3);
}

// Counters by which running thread blocks signal writes.
constexpr u32 MOST_POLLS = 1 << 22;
__device__ __forceinline__ void signal(u32* count) {
  dawdle(4);
  increase_release(count);
}
// Whether this is the last of `all` signals, which sees what the others wrote. A count goes on with the next launch.
__device__ __forceinline__ bool is_last_signal(u32* count, u32 all) {
  dawdle(6);
  return increase_acquire_release(count) % all == all - 1;
}
// A signal that takes seconds is a launch error.
__device__ __forceinline__ void wait_for(const u32* count, u32 target) {
  for (u32 polls = 0;; polls++) {
    if (load_acquire(count) >= target) break;
    if (polls == MOST_POLLS) trap();
  }
  dawdle(5);
}

__device__ __forceinline__ void add(float4& a, const float4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes; lanes >>= 1) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// x / (1 + exp(-2u)) is x (1 + tanh(u)) / 2.
__device__ __forceinline__ float gelu_tanh(float x) {
  // -2u in powers of two; no contraction but this one, so that every kernel has the same bits.
  const float power = __fmul_rn(x, __fmaf_rn(__fmul_rn(-0.1029432397f, x), x, -2.302208198144325f));
  return x * reciprocal(1.f + power_of_two(power));
}
__device__ __forceinline__ float gelu_exact(float x) { return 0.5f * x * (1.f + erff(x * 0.7071067811865476f)); }
