// A layer's output: the residual stream plus the sums of fc2 plus the projection of attention's heads.
#pragma once
#include "attention.cuh"

__device__ __forceinline__ void run_out(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, Sums& sums, int added, const Instruction& it) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = it.block * BLOCK + g;
  const float* biases = a.out_bias + it.layer * DIM + row;
  float2 bias = {0.f, 0.f}, old[2] = {};
  if (warp < TILES) bias = float2{biases[0], biases[8]};
  const bf16* from = residual(a, it.src);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = warp * 8 + t * 2 + j;
    const bool live = warp < TILES && token < num_tokens(a, shared);
    const bf16* x = it.src == SOURCE_EMBED ? a.embedding + (live ? (i64)shared.token[token] * DIM + row : 0)
                                           : from + (live ? place_of(token, row) : 0);
    if (live) old[j] = float2{to_float(load_fresh_bf16(x)), to_float(load_fresh_bf16(x + 8))};
  }
  Reader reader;
  Inputs in[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) in[i].load(a.heads, group_of(i), active() ? num_tokens(a, shared) : 0);
  reader.begin(a, at, ring);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) reader.multiply(a, at, ring, sums, in[i], i + 1 < CHUNKS);
  __syncwarp();
  store_part(shared, sums, PARTS - 1);
  workers_sync();
  if (warp >= TILES) return;
  float4 all = {0.f, 0.f, 0.f, 0.f};
  if (PARTS > 1) all = shared.parts[warp][lane];
  add_parts(shared, all, added, PARTS);
  bf16* to = it.dst == SOURCE_X0 ? a.x0 : a.x1;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = warp * 8 + t * 2 + j;
    if (token >= num_tokens(a, shared)) continue;
    const bf16 low = to_bf16(old[j].x + ((j ? all.y : all.x) + bias.x));
    const bf16 high = to_bf16(old[j].y + ((j ? all.w : all.z) + bias.y));
    to[place_of(token, row)] = low, to[place_of(token, row + 8)] = high;
    if (a.trace) {
      bf16* trace = a.trace + (((i64)at.step * a.layers + it.layer) * TOKENS + token) * DIM + row;
      trace[0] = low, trace[8] = high;
    }
  }
}
