// The output head: each row's best token of the worker, ties to the lower id, and the scores of rows that need more than that.
#pragma once
#include "matrix.cuh"

// Compare keys, then ids; BROKEN stays set in an id.
__device__ __forceinline__ bool better(uint2 a, uint2 b) { return a.x > b.x || (a.x == b.x && a.y < b.y); }
__device__ __forceinline__ uint2 best_of(uint2 a, uint2 b) { return better(b, a) ? b : a; }
__device__ __forceinline__ uint2 from_lane(uint2 mine, int lanes) {
  return uint2{__shfl_xor_sync(~0u, mine.x, lanes), __shfl_xor_sync(~0u, mine.y, lanes)};
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u; }

// Compute a block's logits of a tile and merge their best into the warp's.
__device__ __forceinline__ void choose(const Arguments& a, const Place& at, Shared& shared, int row, int tile, float4 sum) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float2 low = a.head_folded[row], high = a.head_folded[row + 8];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = tile * 8 + t * 2 + j;
    uint2 mine = {0u, 0u};
    if (token < num_tokens(a, shared)) {
      const float2 m = shared.moments[token];
      const float* allowed = a.constraints + (i64)shared.constraint[token] * VOCAB + row;
      const float forbidden[2] = {allowed[0], allowed[8]};
      const float raw[2] = {normed(j ? sum.y : sum.x, m, low), normed(j ? sum.w : sum.z, m, high)};
      if (a.logits) {
        float* logits = a.logits + ((i64)at.step * TOKENS + token) * VOCAB + row;
        logits[0] = raw[0], logits[8] = raw[1];
      }
      const float first = raw[0] + forbidden[0], second = raw[1] + forbidden[1];
      if (shared.kept >> token & 1) {
        float* scores = a.scores + (i64)token * VOCAB + row;
        scores[0] = first, scores[8] = second;
      }
      mine = best_of(uint2{to_key(first), (u32)row}, uint2{to_key(second), (u32)row + 8});
      if (!is_finite(raw[0]) || !is_finite(raw[1])) mine.x = ~0u, mine.y |= BROKEN;
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes <<= 1) mine = best_of(mine, from_lane(mine, lanes));
    if (g == 0) shared.best[warp][token] = best_of(shared.best[warp][token], mine);
  }
}

__device__ __forceinline__ void run_head(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, const Instruction& it) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int token = lane; token < TOKENS; token += 32) shared.best[warp][token] = uint2{0u, ~0u};
  __syncwarp();
  Inputs in[CHUNKS];
  load_chunks(a, shared, it.src, in);
  for (int first = 0; first < it.num_blocks; first += BLOCKS_AT_ONCE) {
    const int blocks = min(BLOCKS_AT_ONCE, it.num_blocks - first);
    multiply_blocks(a, at, shared, ring, in, blocks, first == 0);
    workers_sync();
    for (int i = warp; i < blocks * TILES; i += WARPS) {
      const int row = (it.block + (first + i / TILES) * WORKERS) * BLOCK + lane / 4;
      choose(a, at, shared, row, i % TILES, total(shared, i / TILES, i % TILES));
    }
    workers_sync();
  }
  if (threadIdx.x < num_tokens(a, shared)) {
    uint2 all = shared.best[0][threadIdx.x];
    for (int i = 1; i < WARPS; i++) all = best_of(all, shared.best[i][threadIdx.x]);
    a.best[blockIdx.x * TOKENS + threadIdx.x] = all;
  }
}
