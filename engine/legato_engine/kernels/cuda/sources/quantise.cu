// Rows of bf16, or of their gelu less a centre, to e4m3 with a float32 scale each.
#include "row_ops.cuh"

// x / (1 + exp(-2u)), u the argument of the tanh form: one exponential and one reciprocal limit it; small results
// keep their relative precision.
__device__ __forceinline__ float gelu(float x) {
  constexpr float LINEAR = -2.3022082f, CUBIC = -0.10294324f;  // -2 log2(e) sqrt(2 / pi), and 0.044715 of that
  return x * reciprocal(1.f + power_of_two(x * fmaf(CUBIC, x * x, LINEAR)));
}

enum Before { NOTHING, GELU };

template <Before BEFORE>
__device__ __forceinline__ void quantise_rows(const bf16* x, const bf16* centre, unsigned char* values, float* scales,
                                              int count) {
  __shared__ float shared[WARPS];
  const int index = row_index();
  if (index >= count) return;
  inputs_ready();
  Row row;
  row.lane = row_lane();
  row.load(x + (i64)index * DIM);
  if constexpr (BEFORE == GELU) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      if (!row.has(i)) continue;
      float c[WIDTH];
      row.read(centre, i, c);
#pragma unroll
      for (int j = 0; j < WIDTH; j++) row.values[i][j] = gelu(row.values[i][j]) - c[j];
    }
  }
  quantise(row, values + (i64)index * DIM, scales + index, shared);
}

// `values` [count, DIM], `scales` [count] and `centre` [DIM]; x may be anything finite.
extern "C" __global__ void __launch_bounds__(32 * WARPS * ROWS)
    quantise_plain(const bf16* x, unsigned char* values, float* scales, int count) {
  quantise_rows<NOTHING>(x, nullptr, values, scales, count);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS * ROWS)
    quantise_gelu(const bf16* x, const bf16* centre, unsigned char* values, float* scales, int count) {
  quantise_rows<GELU>(x, centre, values, scales, count);
}
