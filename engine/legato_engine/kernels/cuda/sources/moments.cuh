// The moments of a layer norm, and a map's results with them, for every kernel that multiplies raw inputs. Sums run in one
// order, and no product is joined to a sum unless it says so: the bits are the same in all of them.
//
// Constants: DIM, IN_CHUNKS, and SLICES: the inputs of a token that one warp multiplies are a slice of it, of SLICES.
#pragma once
#include "common.cuh"

constexpr int SLICE = DIM / SLICES;  // values of one

// The sum, and that of squared deviations from a slice's mean. Lanes t = lane % 4 have 8 values of each 32, at(chunk,
// half).
template <class At>
__device__ __forceinline__ float2 slice_moments(At at) {
  float sum[4] = {}, squares[4] = {};
#pragma unroll
  for (int i = 0; i < 2 * IN_CHUNKS; i++) {
    const uint4 v = at(i / 2, i % 2);
#pragma unroll
    for (int j = 0; j < 4; j++) sum[j] = __fadd_rn(sum[j], __fadd_rn(low_float((&v.x)[j]), high_float((&v.x)[j])));
  }
  float total = __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
  total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 1));
  total = __fadd_rn(total, __shfl_xor_sync(~0u, total, 2));
  const float mean = __fmul_rn(total, 1.f / SLICE);
#pragma unroll
  for (int i = 0; i < 2 * IN_CHUNKS; i++) {
    const uint4 v = at(i / 2, i % 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float low = __fsub_rn(low_float((&v.x)[j]), mean), high = __fsub_rn(high_float((&v.x)[j]), mean);
      squares[j] = __fmaf_rn(low, low, __fmaf_rn(high, high, squares[j]));
    }
  }
  float off = __fadd_rn(__fadd_rn(squares[0], squares[1]), __fadd_rn(squares[2], squares[3]));
  off = __fadd_rn(off, __shfl_xor_sync(~0u, off, 1));
  off = __fadd_rn(off, __shfl_xor_sync(~0u, off, 2));
  return {total, off};
}

// Squared deviations from the whole token's mean.
__device__ __forceinline__ float about(float2 slice, float mean) {
  const float off = __fsub_rn(__fmul_rn(slice.x, 1.f / SLICE), mean);
  return __fmaf_rn(__fmul_rn(off, off), (float)SLICE, slice.y);
}

__device__ __forceinline__ float mean_of(float sum) { return __fmul_rn(sum, 1.f / DIM); }
// Its inverse, of squared deviations.
__device__ __forceinline__ float deviation_of(float squares) { return rsqrtf(__fadd_rn(__fmul_rn(squares, 1.f / DIM), 1e-5f)); }

// What a map of the normed token is: `sum` is of raw inputs; row.x is what a row's weights add up to, row.y its bias with the
// norm's.
__device__ __forceinline__ float normed(float sum, float2 moment, float2 row) {
  return __fmaf_rn(moment.y, __fmaf_rn(-moment.x, row.x, sum), row.y);
}

// A pair of dimensions that a position turns.
__device__ __forceinline__ float2 turned(float first, float second, float cosine, float sine) {
  return float2{__fmaf_rn(first, cosine, -__fmul_rn(second, sine)), __fmaf_rn(first, sine, __fmul_rn(second, cosine))};
}
