// EXPERTS are at most 64, ACTIVE at most 8.
#pragma once
#include "argmax.cuh"

static_assert(EXPERTS <= 64 && ACTIVE <= 8 && ACTIVE <= EXPERTS, "unsupported sizes");

struct Choice {
  u32 expert;
  float share;
};

// Lane r < ACTIVE has each token's r-th best expert by logits(token) [EXPERTS], ties to the lower number, and its share: a
// softmax over these alone. Instructions of several tokens fill each other's waits.
template <int COUNT, class Logits>
__device__ __forceinline__ void choose_experts(Choice (&choices)[COUNT], Logits logits) {
  const int lane = threadIdx.x % 32;
  u32 keys[COUNT][2], mine[COUNT];
#pragma unroll
  for (int i = 0; i < 2 * COUNT; i++) {
    const int e = i % 2 * 32 + lane;
    keys[i / 2][i % 2] = e < EXPERTS ? max(1u, to_key(load_fresh_f32(logits(i / 2) + e))) : 0u;
  }
#pragma unroll
  for (int rank = 0; rank < ACTIVE; rank++) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      u32(&key)[2] = keys[i];
      const u32 best = __reduce_max_sync(~0u, max(key[0], key[1]));
      const u32 low = __ballot_sync(~0u, key[0] == best), high = __ballot_sync(~0u, key[1] == best);
      const u32 e = low ? __ffs(low) - 1 : 31 + __ffs(high);
      if (rank == 0 || lane == rank) choices[i].expert = e, mine[i] = best;
      if (e == lane) key[0] = 0u;
      if (e == lane + 32) key[1] = 0u;
    }
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const float value = from_key(mine[i]), top = __shfl_sync(~0u, value, 0);
    const float p = lane < ACTIVE ? expf(value - top) : 0.f;
    float sum = p;
#pragma unroll
    for (int lanes = 4; lanes; lanes >>= 1) sum += __shfl_xor_sync(~0u, sum, lanes);
    choices[i].share = p / sum;
  }
}
