// A layer's output: the residual stream, plus the sums of fc2, plus the map of attention's heads.
#pragma once
#include "attention.cuh"

// A token's heads, of each chunk this warp's, merged of quarters that other workers computed.
__device__ __forceinline__ void merge_heads(const Arguments& a, bf16 (*merged)[HEAD_DIM], int token) {
  const int lane = threadIdx.x % 32;
  Part quarters[CHUNKS][SPLITS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int head = c * (CHUNK / HEAD_DIM) + threadIdx.x / 32, place = token * WORKERS + head * SPLITS;
#pragma unroll
    for (int i = 0; i < SPLITS; i++) {
      quarters[c][i].end = load_fresh_float2(a.ends + place + i);
      quarters[c][i].out = load_fresh_float2(reinterpret_cast<const float2*>(a.part) + (place + i) * 32 + lane);
    }
  }
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) *reinterpret_cast<u32*>(&merged[c][2 * lane]) = merged_pair(quarters[c]);
}

// A chunk of the tokens' heads: those of rows that one worker has whole, then those that this warp merged.
__device__ __forceinline__ void load_heads(
    const Arguments& a, const Shared& shared, bf16 (*merged)[CHUNKS][HEAD_DIM], int whole, int chunk, Inputs& to) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int token = tile * 8 + g, input = half * 32 + t * 8;
      uint4 value = {0, 0, 0, 0};
      if (active() && token < whole) value = load_fresh(a.heads + token * DIM + chunk * CHUNK + warp * GROUP + input);
      if (active() && token >= whole && token < num_tokens(a, shared))
        value = *reinterpret_cast<const uint4*>(&merged[token - whole][chunk][input]);
      to.of[tile][half] = value;
    }
}

__device__ __forceinline__ void run_out(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, Sums& sums, const Instruction& it) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = it.block * BLOCK + g;
  const float* bias = a.out_bias + it.layer * DIM + row;
  float base[2][2];
  const bf16* from = it.src == SOURCE_X0 ? a.x0 : a.x1;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = warp * 8 + t * 2 + j;
    const bool live = warp < TILES && token < num_tokens(a, shared);
    const bf16* x = it.src == SOURCE_EMBED ? a.embedding + (live ? (i64)shared.token[token] * DIM : 0)
                                           : from + (live ? token * DIM : 0);
    base[j][0] = live ? bias[0] + to_float(load_fresh_bf16(x + row)) : 0.f;
    base[j][1] = live ? bias[8] + to_float(load_fresh_bf16(x + row + 8)) : 0.f;
  }
  // Each warp's sums are free: the heads that it merges lie there until it has loaded them.
  auto* merged = reinterpret_cast<bf16(*)[CHUNKS][HEAD_DIM]>(&shared.sums[warp][0][0][0]);
  static_assert(BLOCKS_AT_ONCE * TILES * 512 >= (SPLITS - 1) * CHUNKS * HEAD_DIM * 2, "a warp's heads");
  const int whole = num_tokens(a, shared) / SPLITS * SPLITS;
  if (active())
    for (int token = whole; token < num_tokens(a, shared); token++) merge_heads(a, merged[token - whole], token);
  __syncwarp();
  Reader reader;
#pragma unroll 1
  for (int first = 0; first < CHUNKS; first += AT_ONCE) {
    Inputs in[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) load_heads(a, shared, merged, whole, first + i, in[i]);
    if (first == 0) reader.begin(a, at, ring);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) reader.multiply(a, at, ring, sums, in[i], first + i + 1 < CHUNKS);
  }
  __syncwarp();
  sums.store(shared, 0);
  workers_sync();
  if (warp >= TILES) return;
  const float4 all = total(shared, 0, warp);
  bf16* to = it.dst == SOURCE_X0 ? a.x0 : a.x1;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = warp * 8 + t * 2 + j;
    if (token >= num_tokens(a, shared)) continue;
    const bf16 low = to_bf16(base[j][0] + (j ? all.y : all.x)), high = to_bf16(base[j][1] + (j ? all.w : all.z));
    to[token * DIM + row] = low, to[token * DIM + row + 8] = high;
    if (a.trace) {
      bf16* trace = a.trace + (((i64)at.step * a.layers + it.layer) * TOKENS + token) * DIM + row;
      trace[0] = low, trace[8] = high;
    }
  }
}
