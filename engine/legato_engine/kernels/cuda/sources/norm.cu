// x [count, DIM] becomes x + y, rounded once; the result is its layer norm or RMS norm, as bf16 or as e4m3 with a float32
// scale per row. y [terms, DIM] repeats over x, or is null.
#include "row_ops.cuh"

__device__ __forceinline__ void add_and_normalise(Row& row, int index, bf16* x, const bf16* y, int terms,
                                                  const bf16* weight, const bf16* bias, float epsilon) {
  __shared__ float shared[2][WARPS];
  inputs_ready();
  row.lane = row_lane();
  if (y)
    row.load_sum(x + (i64)index * DIM, y + (i64)((u32)index % (u32)terms) * DIM);
  else
    row.load(x + (i64)index * DIM);
  normalise(row, weight, bias, epsilon, shared);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS * ROWS)
    add_norm(bf16* x, const bf16* y, int terms, const bf16* weight, const bf16* bias, float epsilon,
             bf16* out, int count) {
  const int index = row_index();
  if (index >= count) return;
  Row row;
  add_and_normalise(row, index, x, y, terms, weight, bias, epsilon);
  row.store(out + (i64)index * DIM);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS * ROWS)
    add_rms_norm(bf16* x, const bf16* y, const bf16* weight, float epsilon, bf16* out, int count) {
  __shared__ float shared[WARPS];
  launch_dependents();  // which may read weights beforehand
  const int index = row_index();
  if (index >= count) return;
  Row row;
  inputs_ready();
  row.lane = row_lane();
  if (y)
    row.load_sum(x + (i64)index * DIM, y + (i64)index * DIM);
  else
    row.load(x + (i64)index * DIM);
  const float inverse = rsqrtf(row_sum(row.sum([](float x) { return x * x; }), shared) / DIM + epsilon);
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    if (!row.has(i)) continue;
    float w[WIDTH];
    row.read(weight, i, w);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) row.values[i][j] *= inverse * w[j];
  }
  row.store(out + (i64)index * DIM);
}

// Rounded once: y becomes the sum.
extern "C" __global__ void __launch_bounds__(32 * WARPS * ROWS)
    add3_norm(const bf16* x, bf16* y, const bf16* z, const bf16* weight, const bf16* bias, float epsilon, bf16* out,
              int count) {
  __shared__ float shared[2][WARPS];
  const int index = row_index();
  if (index >= count) return;
  Row row;
  inputs_ready();
  row.lane = row_lane();
  row.load_sum3(x + (i64)index * DIM, y + (i64)index * DIM, z + (i64)index * DIM);
  normalise(row, weight, bias, epsilon, shared);
  row.store(out + (i64)index * DIM);
}

#if HAS_E4M3
extern "C" __global__ void __launch_bounds__(32 * WARPS * ROWS)
    add_norm_quantise(bf16* x, const bf16* y, int terms, const bf16* weight, const bf16* bias, float epsilon,
                      unsigned char* values, float* scales, int count) {
  __shared__ float shared[WARPS];
  const int index = row_index();
  if (index >= count) return;
  Row row;
  add_and_normalise(row, index, x, y, terms, weight, bias, epsilon);
  quantise(row, values + (i64)index * DIM, scales + index, shared);
}
#endif
