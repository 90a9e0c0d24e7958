// The end of a step: the host's stop flag, and whether a step follows.
#pragma once
#include "decode_loop.cuh"
#include "draws.cuh"

__device__ __forceinline__ void run_listen(const Arguments& a, const Instruction& it) {
  if (it.num_blocks && threadIdx.x == 0) *a.stop = stop_requested(a.words);
}

// Publish both values of a step's token, and the certainties of its kind and of them.
__device__ __forceinline__ void publish_value(const Arguments& a, i64 step, int lane, const float4& value) {
  const i64 at = step * a.ring_stride + lane;  // in 8-byte words, because all fields of a step are contiguous
  a.payload_ring[at].x = value.x, a.payload_ring[at].y = value.y;
  a.certainty_ring[at].x = value.z, a.certainty_ring[at].y = value.w;
}

#if !DRAFTS
__device__ __forceinline__ void stage_commit(const Arguments& a, const Place& at, Shared& shared) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  const int token = lane < a.rows ? (int)load_fresh_u32(a.token + lane) : 0;
  const bool stop = load_fresh_u32(a.stop) != 0;
  const u32 aborted = load_relaxed(a.abort);
  const bool broken = __any_sync(~0u, token < 0);
  if (lane < a.rows) {
    shared.chosen[lane] = token;
    shared.constraint[lane] = (int)successor(a.successors, shared.constraint[lane], token);
    shared.token[lane] = min(max(token, 0), VOCAB - 1);  // after a timeout it may be anything
    if (VALUES) shared.value[lane] = load_fresh_float4(a.value + lane);
  }
  if (lane == 0) shared.ended = aborted ? ABORTED : follows(broken, at.step + 1, a.steps, stop) ? GOES_ON : ENDED;
}
#endif
