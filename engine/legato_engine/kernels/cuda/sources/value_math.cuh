// Values of tokens: encoded by Fourier features, and read as the likeliest bins of a decoder. SCALAR_FEATURES and
// PAIR_FEATURES are numbers of frequencies, PAIR_BINS are of first values, then of second.
//
// The kernels of single steps and the megakernel share it, and have equal bits: where a compiler could fuse a product
// with a sum, in one of them and not in the other, the function says how each is rounded.
#pragma once
#include "argmax.cuh"

// A token's values as angles, rounded as the model's own are.
struct Angles {
  float a, b;
  __device__ __forceinline__ Angles(float first, float second)
      : a(angle(first)), b(angle(second)) {}
  __device__ __forceinline__ static float angle(float value) {
    return rounded(__fmul_rn(6.283185307179586f, rounded(value)));
  }
  __device__ __forceinline__ float phase(float frequency) const { return rounded(__fmul_rn(a, frequency)); }
  __device__ __forceinline__ float phase(float first, float second) const {
    return rounded(__fmaf_rn(a, first, __fmul_rn(b, second)));
  }
};

// Features are `count` cosines, then as many sines.
__device__ __forceinline__ void store_feature(bf16* features, int count, int i, float phase) {
  features[i] = to_bf16(cosf(phase));
  features[count + i] = to_bf16(sinf(phase));
}

// Eight products of a map with features.
__device__ __forceinline__ void add_products(float& sum, const uint4& w, const uint4& f) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float high = __fmul_rn(high_float((&w.x)[j]), high_float((&f.x)[j]));
    sum = __fadd_rn(sum, __fmaf_rn(low_float((&w.x)[j]), low_float((&f.x)[j]), high));
  }
}

#ifdef SCALAR_BINS
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
    all = __fadd_rn(all, mass);
    near = __fadd_rn(near, -REACH <= distance && distance <= REACH ? mass : 0.f);
  }
  return {best.id, __fdiv_rn(warp_sum(near), warp_sum(all))};
}

// A value of a token, and how sure the model is of it; by a warp.
struct Value {
  float value = 0.f, near = 1.f;
};
__device__ __forceinline__ Value read_value(i64 token, int axis, const float* scalar_bins, const float* pair_bins) {
  Value read;
  if (token == SCALAR && axis == 0) {
    const Likeliest best = likeliest<SCALAR_BINS, SCALAR_REACH>(scalar_bins);
    read.value = __fdiv_rn((float)best.bin, (float)SCALAR_DIVISOR);
    read.near = best.near;
  }
  if (token == PAIR) {
    const Likeliest best = likeliest<PAIR_BINS / 2, PAIR_REACH>(pair_bins + axis * (PAIR_BINS / 2));
    const float share = __fdiv_rn((float)best.bin, PAIR_BINS / 2 - 1.f);
    read.value = exp2f(__fadd_rn(__fmul_rn(share, PAIR_OCTAVES), -PAIR_OCTAVES));
    read.near = best.near;
  }
  return read;
}

// A token's probability against that of the end, of their constrained logits.
__device__ __forceinline__ float existence(float end, float own) {
  return __fdiv_rn(1.f, __fadd_rn(1.f, expf(__fadd_rn(end, -own))));
}
#endif
