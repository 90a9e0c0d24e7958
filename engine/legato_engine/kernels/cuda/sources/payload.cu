// The value that a token carries: the likeliest bin of the decoder that belongs to it.
//
// Constants: COORD and SIZE token ids, COORD_BINS, SIZE_BINS (all of a decoder's outputs: widths, then heights),
// COORD_DIVISOR of a coord's bin.
// B rows of a batch, R rows of the state.
#include "best.cuh"

constexpr float SIZE_OCTAVES = 10.f;  // sizes are spread evenly by logarithm over 2^-10 .. 1
static_assert(COORD_BINS % 128 == 0 && SIZE_BINS % 256 == 0, "unsupported bins");

// The index of the highest of `count` logits, in every lane of a warp.
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

// row_payload [R, 2] and payload [B, 2]: (coordinate, 0) with COORD, (width, height) with SIZE, else zeros. A block is
// a row, and its two warps are the two numbers. `stride`s are from a row's bins to the next row's.
extern "C" __global__ void __launch_bounds__(64) payload(const float* coord_bins, const float* size_bins,
                                                         const i64* rows, const i64* row_token, float* row_payload,
                                                         float* out, int coord_stride, int size_stride) {
  const int batch = blockIdx.x, axis = threadIdx.x / 32;
  launch_dependents();
  wait_previous();
  const i64 row = load_fresh_i64(rows + batch), token = load_fresh_i64(row_token + row);
  float value = 0.f;
  if (token == COORD && axis == 0)
    value = (float)likeliest(coord_bins + (i64)batch * coord_stride, COORD_BINS) / COORD_DIVISOR;
  if (token == SIZE) {
    const u32 bin = likeliest(size_bins + (i64)batch * size_stride + axis * (SIZE_BINS / 2), SIZE_BINS / 2);
    const float share = __fdiv_rn((float)bin, SIZE_BINS / 2 - 1.f);
    value = exp2f(__fadd_rn(__fmul_rn(share, SIZE_OCTAVES), -SIZE_OCTAVES));
  }
  if (threadIdx.x % 32 == 0) row_payload[row * 2 + axis] = out[batch * 2 + axis] = value;
}
