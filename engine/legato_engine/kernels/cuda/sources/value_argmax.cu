// The likeliest bin of a token's decoder. PAIR_BINS are of first values, then of second.
#include "argmax.cuh"

constexpr float PAIR_OCTAVES = 10.f;  // of a pair's values, even by logarithm over 2^-10 .. 1
static_assert(SCALAR_BINS % 128 == 0 && PAIR_BINS % 256 == 0, "unsupported bins");

// In every lane of a warp.
__device__ __forceinline__ u32 likeliest(const float* logits, int count) {
  Best best = {0u, 0u, ~0u};
#pragma unroll 8
  for (int first = threadIdx.x % 32 * 4; first < count; first += 128) {
    const uint4 v = load_fresh(logits + first);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 key = to_key(__uint_as_float((&v.x)[j]) + 0.f);  // a zero has one sign only
      if (key > best.first) best = {key, 0u, (u32)(first + j)};
    }
  }
  return warp_best(best).id;
}

// row_payload [R, 2] and payload [B, 2]: (value, 0) for SCALAR, both for PAIR, else zeros. A block is a row, its
// warps the values.
extern "C" __global__ void __launch_bounds__(64) value_argmax(const float* scalar_bins, const float* pair_bins,
                                                         const i64* rows, const i64* row_token, float* row_payload,
                                                         float* out, int scalar_stride, int pair_stride) {
  const int batch = blockIdx.x, axis = threadIdx.x / 32;
  launch_dependents();
  wait_previous();
  const i64 row = load_fresh_i64(rows + batch), token = load_fresh_i64(row_token + row);
  float value = 0.f;
  if (token == SCALAR && axis == 0)
    value = (float)likeliest(scalar_bins + (i64)batch * scalar_stride, SCALAR_BINS) / SCALAR_DIVISOR;
  if (token == PAIR) {
    const u32 bin = likeliest(pair_bins + (i64)batch * pair_stride + axis * (PAIR_BINS / 2), PAIR_BINS / 2);
    const float share = __fdiv_rn((float)bin, PAIR_BINS / 2 - 1.f);
    value = exp2f(__fadd_rn(__fmul_rn(share, PAIR_OCTAVES), -PAIR_OCTAVES));
  }
  if (threadIdx.x % 32 == 0) row_payload[row * 2 + axis] = out[batch * 2 + axis] = value;
}
