// EXPERTS are at most 64, ACTIVE at most 8.
#pragma once
#include "argmax.cuh"

static_assert(EXPERTS <= 64 && ACTIVE <= 8 && ACTIVE <= EXPERTS, "unsupported sizes");

struct Choice {
  u32 expert;
  float share;
};

// Lane r < ACTIVE has the token's r-th best expert by logits [EXPERTS], ties to the lower number, and its share: a
// softmax over these alone.
__device__ __forceinline__ Choice choose_experts(const float* logits) {
  const int lane = threadIdx.x % 32;
  u32 keys[2], chosen = 0, mine = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int e = i * 32 + lane;
    keys[i] = e < EXPERTS ? max(1u, to_key(load_fresh_f32(logits + e))) : 0u;
  }
#pragma unroll
  for (int rank = 0; rank < ACTIVE; rank++) {
    const u32 best = __reduce_max_sync(~0u, max(keys[0], keys[1]));
    const u32 low = __ballot_sync(~0u, keys[0] == best), high = __ballot_sync(~0u, keys[1] == best);
    const u32 e = low ? __ffs(low) - 1 : 31 + __ffs(high);
    if (lane == rank) chosen = e, mine = best;
    if (e == lane) keys[0] = 0u;
    if (e == lane + 32) keys[1] = 0u;
  }
  const float value = from_key(mine), top = __shfl_sync(~0u, value, 0);
  const float p = lane < ACTIVE ? expf(value - top) : 0.f;
  float sum = p;
#pragma unroll
  for (int lanes = 4; lanes; lanes >>= 1) sum += __shfl_xor_sync(~0u, sum, lanes);
  return {chosen, p / sum};
}
