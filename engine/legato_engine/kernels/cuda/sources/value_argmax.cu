// The likeliest bin of a token's decoder, and how sure the model is of it. PAIR_BINS are of first values, then of
// second. `reference_certainty.py` specifies the certainty.
#include "argmax.cuh"

constexpr float PAIR_OCTAVES = 10.f;  // of a pair's values, even by logarithm over 2^-10 .. 1
static_assert(SCALAR_BINS % 128 == 0 && PAIR_BINS % 256 == 0, "unsupported bins");

struct Likeliest {
  u32 bin;
  float near;  // the probability of the bins up to REACH from it
};

// In every lane of a warp.
template <int COUNT, int REACH>
__device__ __forceinline__ Likeliest likeliest(const float* logits) {
  constexpr int LOADS = COUNT / 128;
  const int lane = threadIdx.x % 32 * 4;
  float values[LOADS * 4];
  Best best = {0u, 0u, ~0u};
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const uint4 v = load_fresh(logits + i * 128 + lane);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      values[i * 4 + j] = __uint_as_float((&v.x)[j]) + 0.f;  // a zero has one sign only
      const u32 key = to_key(values[i * 4 + j]);
      if (key > best.first) best = {key, 0u, (u32)(i * 128 + lane + j)};
    }
  }
  best = warp_best(best);
  const float peak = from_key(best.first);
  float all = 0.f, near = 0.f;
#pragma unroll
  for (int i = 0; i < LOADS * 4; i++) {
    const int distance = i / 4 * 128 + lane + i % 4 - (int)best.id;
    const float mass = expf(values[i] - peak);
    all += mass;
    near += -REACH <= distance && distance <= REACH ? mass : 0.f;
  }
  return {best.id, __fdiv_rn(warp_sum(near), warp_sum(all))};
}

// row_payload [R, 2] and payload [B, 2]: (value, 0) for SCALAR, both for PAIR, else zeros. certainty [B, 2]: the token's
// probability against that of END under the constraint, and that of nearby values, else ones. `constraint` is by token,
// or by entry[token] with an `entry`. A block is a row, its warps the values.
extern "C" __global__ void __launch_bounds__(64) value_argmax(
    const float* scalar_bins, const float* pair_bins, const i64* rows, const i64* row_token, const float* logits,
    const float* constraints, const i64* constraint, const i64* entry, float* row_payload, float* payload,
    float* certainty, int scalar_stride, int pair_stride) {
  __shared__ float nearby[2];
  const int batch = blockIdx.x, axis = threadIdx.x / 32;
  launch_dependents();
  wait_previous();
  const i64 row = load_fresh_i64(rows + batch), token = load_fresh_i64(row_token + row);
  float value = 0.f, near = 1.f;
  if (token == SCALAR && axis == 0) {
    const Likeliest best = likeliest<SCALAR_BINS, SCALAR_REACH>(scalar_bins + (i64)batch * scalar_stride);
    value = (float)best.bin / SCALAR_DIVISOR;
    near = best.near;
  }
  if (token == PAIR) {
    const float* bins = pair_bins + (i64)batch * pair_stride + axis * (PAIR_BINS / 2);
    const Likeliest best = likeliest<PAIR_BINS / 2, PAIR_REACH>(bins);
    const float share = __fdiv_rn((float)best.bin, PAIR_BINS / 2 - 1.f);
    value = exp2f(__fadd_rn(__fmul_rn(share, PAIR_OCTAVES), -PAIR_OCTAVES));
    near = best.near;
  }
  if (threadIdx.x % 32 == 0) {
    row_payload[row * 2 + axis] = payload[batch * 2 + axis] = value;
    nearby[axis] = near;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float existence = 1.f;
  if (token == SCALAR || token == PAIR) {
    const float* own = logits + (i64)batch * VOCAB;
    const i64 index = load_fresh_i64(constraint + (entry ? load_fresh_i64(entry + batch) : batch));
    const float end = load_fresh_f32(own + END) + load_fresh_f32(constraints + index * VOCAB + END);
    existence = __fdiv_rn(1.f, 1.f + expf(end - load_fresh_f32(own + token)));
  }
  certainty[batch * 2] = existence;
  certainty[batch * 2 + 1] = nearby[0] * nearby[1];
}
