// Which experts take which tokens, known to a whole thread block.
//
// Constants: EXPERTS, at most 64, ACTIVE of them for a token, at most 8; TILES groups of 8 tokens.
#pragma once
#include "best.cuh"
#include "stream.cuh"

constexpr int TOKENS = TILES * 8;
static_assert(EXPERTS <= 64 && ACTIVE <= 8 && ACTIVE <= EXPERTS, "unsupported sizes");

// A token and one of its experts are a pair: number token * ACTIVE + rank, the likeliest expert first.
struct Routes {
  u64 touched;             // the experts with tokens, a bit each
  u32 tokens[EXPERTS];     // of an expert, a bit each
  unsigned char expert[TOKENS * ACTIVE];
  unsigned char pairs[EXPERTS][TOKENS];  // of an expert, in the order of its tokens
  float share[TOKENS * ACTIVE];

  // The workers: each token's best experts by their logits [B, EXPERTS], ties to the lower number, and their
  // shares: a softmax over these alone. A warp has every eighth token.
  __device__ __forceinline__ void choose(const float* logits, int batch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int token = warp; token < batch; token += WARPS) {
      u32 keys[2], chosen = 0, mine = 0;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int e = i * 32 + lane;
        keys[i] = e < EXPERTS ? max(1u, to_key(load_fresh_f32(logits + token * EXPERTS + e))) : 0u;
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
      if (lane < ACTIVE) {
        expert[token * ACTIVE + lane] = chosen;
        share[token * ACTIVE + lane] = p / sum;
      }
    }
  }

  // The workers, when `expert` is there: the rest. What follows needs a barrier of whoever reads it.
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

// each(e, count) for every expert with tokens, in rising order; `count` of them.
template <class Each>
__device__ __forceinline__ void for_touched(const Routes& routes, Each each) {
  for (u64 left = routes.touched; left; left &= left - 1) {
    const int e = __ffsll(left) - 1;
    each(e, __popc(routes.tokens[e]));
  }
}
