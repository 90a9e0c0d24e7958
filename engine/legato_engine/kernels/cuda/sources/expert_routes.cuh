// The tokens of each expert, shared by a thread block.
#pragma once
#include "expert_choice.cuh"
#include "skinny_gemm.cuh"

constexpr int TOKENS = TILES * 8;

// Pair token * ACTIVE + rank, the likeliest first.
struct Routes {
  u64 touched;             // the experts with tokens, a bit each
  u32 tokens[EXPERTS];     // a bit each
  unsigned char expert[TOKENS * ACTIVE];
  unsigned char pairs[EXPERTS][TOKENS];  // in the order of tokens
  float share[TOKENS * ACTIVE];

  // The workers; logits [B, EXPERTS].
  __device__ __forceinline__ void choose(const float* logits, int batch) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    if (warp >= batch) return;
    Choice choices[TILES];
    choose_experts(choices, [&](int i) { return logits + min(i * WARPS + warp, batch - 1) * EXPERTS; });
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const int pair = (i * WARPS + warp) * ACTIVE + lane;
      if (i * WARPS + warp < batch && lane < ACTIVE) expert[pair] = choices[i].expert, share[pair] = choices[i].share;
    }
  }

  // The workers, after `expert` is written. Readers need a barrier afterwards.
  __device__ __forceinline__ void group(int batch) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < EXPERTS) tokens[threadIdx.x] = 0u;
    workers_sync();
    for (int pair = threadIdx.x; pair < batch * ACTIVE; pair += WORKERS) atomicOr(tokens + expert[pair], 1u << pair / ACTIVE);
    workers_sync();
    for (int pair = threadIdx.x; pair < batch * ACTIVE; pair += WORKERS) {
      const int e = expert[pair];
      pairs[e][__popc(tokens[e] & ((1u << pair / ACTIVE) - 1u))] = pair;
    }
    if (threadIdx.x < 32) {
      const u32 low = __ballot_sync(~0u, lane < EXPERTS && tokens[lane]);
      const u32 high = __ballot_sync(~0u, lane + 32 < EXPERTS && tokens[lane + 32]);
      if (lane == 0) touched = (u64)high << 32 | low;
    }
  }
};

// each(e, count) for every expert with tokens, in rising order.
template <class Each>
__device__ __forceinline__ void for_touched(const Routes& routes, Each each) {
  for (u64 left = routes.touched; left; left &= left - 1) {
    const int e = __ffsll(left) - 1;
    each(e, __popc(routes.tokens[e]));
  }
}
