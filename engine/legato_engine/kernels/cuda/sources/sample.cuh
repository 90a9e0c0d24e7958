// What a sampled token depends on, shared by the kernels that sample: every sum is of integers, so that a token does not
// depend on the number or the order of threads.
#pragma once

#include "argmax.cuh"

constexpr float GREEDY_TEMPERATURE = 1e-6f;  // at or below, the highest logit wins
constexpr int BINS = 1024, DIGIT_BITS = 10, PASSES = 6;
// Noise is within -3.7 .. 37.5, so a token this far below the highest never wins; its share of the mass is below
// 2^-69. Nearer ones have first digits up to 48 * 21 = 1008.
constexpr float REACH = 48.f, FIRST_DIGITS = 21.f;
constexpr float MASS_ONE = 1099511627776.f;  // 2^40 is the mass of the highest; a row's fits 57 bits
constexpr float NOISE_SLACK = 1e-3f;       // far above the error of `rough_noise`

// Of a mass 16, 16 and 32 bits, whose sums over 65,536 tokens fit words: so additions need no carry, and nothing waits for one.
struct __align__(16) Bin {
  u32 low, middle, high, count;
};
__device__ __forceinline__ u64 mass_in(u32 low, u32 middle, u32 high) { return ((u64)high << 32) + ((u64)middle << 16) + low; }
struct Share {
  u64 mass;
  u32 count;
};
struct Choice {  // the last kept token's bin, and what comes before it
  u64 mass;
  u32 count;
  int digit;
  bool settled;  // all of the bin are kept
};
// Ten bits of a token's place in falling order: first by distance from the highest, which spreads common rows over
// the bins, then of the inverted value and of the id, 48 bits in all.
__device__ __forceinline__ int digit_of(int pass, float x, float peak, int id) {
  if (pass == 0) return (int)((peak - x) * FIRST_DIGITS);
  const u64 place = ((u64)~to_key(x) << 16 | (u32)id) << 2;
  return (int)(place >> ((PASSES - 1 - pass) * DIGIT_BITS)) & (BINS - 1);
}

__device__ __forceinline__ u64 mass_of(float x, float peak) { return __float2ull_rn(expf(x - peak) * MASS_ONE); }

// The sum does not depend on the order.
__device__ __forceinline__ void add(Bin& bin, u64 mass) {
  const u32 low = (u32)mass & 0xffffu, middle = (u32)mass >> 16, high = (u32)(mass >> 32);
  if (low) atomicAdd(&bin.low, low);
  if (middle) atomicAdd(&bin.middle, middle);
  if (high) atomicAdd(&bin.high, high);
  atomicAdd(&bin.count, 1u);
}

__device__ __forceinline__ Share warp_prefix(Share share) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u64 mass = __shfl_up_sync(~0u, share.mass, step);
    const u32 count = __shfl_up_sync(~0u, share.count, step);
    if (threadIdx.x % 32 >= step) share.mass += mass, share.count += count;
  }
  return share;
}

// What a row keeps: mass before a token of at most `mass`, and at most `count` tokens.
struct Bounds {
  u64 mass;
  u32 count;
};

// `total` is of the highest pass, which has all of a row's mass.
__device__ __forceinline__ u64 mass_limit(float top_p, const Share& total) {
  return top_p >= 1.f ? total.mass : (u64)((double)top_p * (double)total.mass);
}
__device__ __forceinline__ u32 count_limit(i64 top_k) { return top_k > 0 && top_k < VOCAB ? (u32)top_k : VOCAB; }

// Whether a bin has the last kept token, and then the choice. `through` is of the pass's bins up to this one, `before` of
// what comes before them, `total` of all of the pass.
__device__ __forceinline__ bool has_last(
    const Share& bin, const Share& through, const Choice& before, const Share& total, Bounds most, int digit, Choice& to) {
  const u64 mass = before.mass + through.mass;
  const u32 count = before.count + through.count;
  const bool stays = bin.count && mass - bin.mass <= most.mass && count - bin.count < most.count;
  if (!stays || (through.count < total.count && mass <= most.mass && count < most.count)) return false;
  to = {mass - bin.mass, count - bin.count, digit, bin.count == 1 || (mass <= most.mass && count <= most.count)};
  return true;
}

// SplitMix64's finaliser.
__device__ __forceinline__ u64 mix(u64 x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

// Standard Gumbel noise from 53 random bits of (seed, position, token); `rough_noise` is within 1e-5.
__device__ __forceinline__ float exact_noise(u64 bits) {
  return (float)-log(-log(((double)(i64)bits + 0.5) * 0x1p-53));
}
__device__ __forceinline__ float rough_noise(u64 bits) {
  constexpr u64 ALL = (1ull << 53) - 1;
  const bool low = bits >> 52 == 0;
  const float tail = ((float)(low ? bits : ALL - bits) + 0.5f) * 0x1p-53f;
  return -logf(low ? -logf(tail) : -log1pf(-tail));
}
// Not below `rough_noise` by more than 1e-5, from the mixed bits before they are shifted: the noise of the tail's first 32 bits.
__device__ __forceinline__ float most_noise(u64 mixed) {
  return 0.6931471806f * (32.f - logarithm_of_two((float)~(u32)(mixed >> 32)));
}
__device__ __forceinline__ u64 noise_key(i64 seed, i64 position) { return mix(mix((u64)seed) + (u64)position); }
