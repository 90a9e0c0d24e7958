// The end of a step: what the host wishes, and whether a step follows.
#pragma once
#include "decode_loop.cuh"
#include "draws.cuh"

__device__ __forceinline__ void run_listen(const Arguments& a, const Instruction& it) {
  if (it.num_blocks && threadIdx.x == 0) *a.stop = stop_wished(a.words);
}

#if !DRAFTS
__device__ __forceinline__ void run_commit(const Arguments& a, const Place& at, Shared& shared) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  const int token = lane < a.rows ? (int)load_fresh_u32(a.token + lane) : 0;
  const bool stop = load_fresh_u32(a.stop) != 0;
  const u32 aborted = load_relaxed(a.abort);
  const bool broken = __any_sync(~0u, token < 0);
  if (lane < a.rows) {
    shared.chosen[lane] = token;
    shared.constraint[lane] = (int)successor(a.successors, shared.constraint[lane], token);
    shared.token[lane] = min(max(token, 0), VOCAB - 1);  // after a failed wait it may be anything
    if (VALUES) {
      const uint4 value = load_fresh(a.value + lane);
      shared.value[lane] = float4{__uint_as_float(value.x), __uint_as_float(value.y), __uint_as_float(value.z),
                                  __uint_as_float(value.w)};
    }
  }
  if (lane == 0) shared.ended = aborted ? ABORTED : follows(broken, at.step + 1, a.steps, stop) ? GOES_ON : ENDED;
}
#endif
