// Rows of bf16 in registers. DIM is a multiple of 8; ROWS is 1 unless WARPS is 1.
#pragma once
#include "common.cuh"

constexpr int WIDTH = 8;  // values of one 16-byte load
constexpr int LANES = 32 * WARPS, LOADS = DIM / WIDTH, HELD = (LOADS + LANES - 1) / LANES;
constexpr float LARGEST = 448.f;  // of e4m3
constexpr float FLOOR = 1e-12f;   // a row below is all zeros, and its scale is not

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = 16; lanes; lanes >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

// Load `i` is load i * LANES + lane of the row.
struct Row {
  float values[HELD][WIDTH];
  int lane;

  __device__ __forceinline__ bool has(int i) const { return i * LANES + lane < LOADS; }

  __device__ __forceinline__ void read(const bf16* source, int i, float* out) const {
    const uint4 bits = reinterpret_cast<const uint4*>(source)[i * LANES + lane];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      out[2 * j] = low_float((&bits.x)[j]);
      out[2 * j + 1] = high_float((&bits.x)[j]);
    }
  }

  // All loads are issued before the first is used; values beyond the end are 0.
  __device__ __forceinline__ void load(const bf16* source) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
#pragma unroll
      for (int j = 0; j < WIDTH; j++) values[i][j] = 0.f;
      if (has(i)) read(source, i, values[i]);
    }
  }

  // x becomes x + y, rounded; all loads are issued first.
  __device__ __forceinline__ void load_sum(bf16* x, const bf16* y) {
    uint4 sums[HELD], terms[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      sums[i] = terms[i] = uint4{0, 0, 0, 0};
      if (!has(i)) continue;
      sums[i] = reinterpret_cast<const uint4*>(x)[i * LANES + lane];
      terms[i] = reinterpret_cast<const uint4*>(y)[i * LANES + lane];
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u32& a = (&sums[i].x)[j];
        const u32 b = (&terms[i].x)[j];
        a = pack(low_float(a) + low_float(b), high_float(a) + high_float(b));
        values[i][2 * j] = low_float(a);
        values[i][2 * j + 1] = high_float(a);
      }
      if (has(i)) reinterpret_cast<uint4*>(x)[i * LANES + lane] = sums[i];
    }
  }

  // y becomes x + y + z, rounded once.
  __device__ __forceinline__ void load_sum3(const bf16* x, bf16* y, const bf16* z) {
    uint4 terms[3][HELD];
    const bf16* const sources[3] = {x, y, z};
#pragma unroll
    for (int i = 0; i < HELD; i++)
#pragma unroll
      for (int j = 0; j < 3; j++)
        terms[j][i] = has(i) ? reinterpret_cast<const uint4*>(sources[j])[i * LANES + lane] : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      uint4 sum;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 a = (&terms[0][i].x)[j], b = (&terms[1][i].x)[j], c = (&terms[2][i].x)[j];
        (&sum.x)[j] = pack(low_float(a) + low_float(b) + low_float(c), high_float(a) + high_float(b) + high_float(c));
        values[i][2 * j] = low_float((&sum.x)[j]);
        values[i][2 * j + 1] = high_float((&sum.x)[j]);
      }
      if (has(i)) reinterpret_cast<uint4*>(y)[i * LANES + lane] = sum;
    }
  }

  __device__ __forceinline__ void store(bf16* out) const {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const float* v = values[i];
      if (has(i))
        reinterpret_cast<uint4*>(out)[i * LANES + lane] =
            uint4{pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])};
    }
  }

  // Over this thread's values.
  template <class Value>
  __device__ __forceinline__ float sum(Value value) const {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < HELD; i++)
#pragma unroll
      for (int j = 0; j < WIDTH; j++) total += has(i) ? value(values[i][j]) : 0.f;
    return total;
  }
};

// Over all threads of a row; every use has its own `shared`.
template <class Combine>
__device__ __forceinline__ float across_warps(float x, float* shared, Combine combine) {
  if constexpr (WARPS > 1) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) x = combine(x, shared[i]);
  }
  return x;
}
__device__ __forceinline__ float row_sum(float x, float* shared) {
  return across_warps(warp_sum(x), shared, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float row_max(float x, float* shared) {
  return across_warps(warp_max(x), shared, [](float a, float b) { return fmaxf(a, b); });
}

__device__ __forceinline__ void normalise(Row& row, const bf16* weight, const bf16* bias, float epsilon,
                                          float (*shared)[WARPS]) {
  const float mean = row_sum(row.sum([](float x) { return x; }), shared[0]) / DIM;
  const float square = row_sum(row.sum([=](float x) { return (x - mean) * (x - mean); }), shared[1]);
  const float inverse = rsqrtf(square / DIM + epsilon);
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    if (!row.has(i)) continue;
    float w[WIDTH], b[WIDTH];
    row.read(weight, i, w);
    row.read(bias, i, b);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) row.values[i][j] = (row.values[i][j] - mean) * inverse * w[j] + b[j];
  }
}

// value = e4m3 * scale.
__device__ __forceinline__ void quantise(const Row& row, unsigned char* out, float* scale, float* shared) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < HELD; i++)
#pragma unroll
    for (int j = 0; j < WIDTH; j++) most = fmaxf(most, fabsf(row.values[i][j]));
  most = fmaxf(row_max(most, shared), FLOOR);
  if (row.lane == 0) *scale = most * (1.f / LARGEST);
  const float inverse = 1.f / most * LARGEST;  // in the same roundings as torch's
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const float* v = row.values[i];
    if (!row.has(i)) continue;
    reinterpret_cast<uint2*>(out)[i * LANES + row.lane] =
        make_uint2(pack_e4m3(v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse),
                   pack_e4m3(v[4] * inverse, v[5] * inverse, v[6] * inverse, v[7] * inverse));
  }
}

// Whole warps lie beyond the last row, and blocks of several rows have no barriers.
__device__ __forceinline__ int row_index() { return blockIdx.x * ROWS + (ROWS > 1 ? threadIdx.x / 32 : 0); }
__device__ __forceinline__ int row_lane() { return ROWS > 1 ? threadIdx.x % 32 : threadIdx.x; }

__device__ __forceinline__ void inputs_ready() {
  wait_previous();
}
