// Inputs of the tokens' products, in registers, and the moments of the residual stream.
#pragma once
#include "worker.cuh"

constexpr int IN_CHUNKS = CHUNKS, SLICES = CHUNK / GROUP;
#include "moments.cuh"

// Index of an input of products. They are stored in the order in which lanes load them, so that each load of a warp is
// contiguous: [inputs / GROUP, TILES, GROUP / 32, 8 tokens, 32].
__device__ __forceinline__ int place_of(int token, int input) {
  return input / GROUP * (GROUP * TOKENS) + (token / 8 * (GROUP / 32) + input % GROUP / 32) * 256 + token % 8 * 32 + input % 32;
}
// Index of the lane's piece of half a group: inputs of token tile * 8 + lane / 4.
__device__ __forceinline__ int piece_of(int group, int tile, int half) {
  return group * (GROUP * TOKENS) + (tile * (GROUP / 32) + half) * 256 + threadIdx.x % 32 * 8;
}

__device__ __forceinline__ bool active() {
  return CHUNK == WARPS * GROUP || threadIdx.x / 32 * GROUP < CHUNK;
}
// The warp's group of a chunk.
__device__ __forceinline__ int group_of(int chunk) { return chunk * SLICES + threadIdx.x / 32; }

// A lane's share of 64 inputs of all tokens.
struct Inputs {
  uint4 of[TILES][2];
  // Load a group of the first `tokens` from global memory.
  __device__ __forceinline__ void load(const bf16* from, int group, int tokens) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        of[tile][half] = tile * 8 + threadIdx.x % 32 / 4 < tokens ? load_fresh(from + piece_of(group, tile, half))
                                                                  : uint4{0, 0, 0, 0};
  }
};

// The residual stream in one of its buffers.
template <class Taken>
__device__ __forceinline__ const bf16* residual(const Taken& a, int source) { return source == SOURCE_X0 ? a.x0 : a.x1; }

// The 8 values that a lane multiplies of half a chunk, from the residual stream or the token's embedding.
__device__ __forceinline__ uint4 load_piece(const Arguments& a, const Shared& shared, int source, int tile, int chunk, int half) {
  const int token = tile * 8 + threadIdx.x % 32 / 4, group = group_of(chunk);
  const bool live = token < num_tokens(a, shared) && active();
  const bf16* from = source == SOURCE_EMBED
                         ? a.embedding + (live ? (i64)shared.token[token] * DIM + group * GROUP + half * 32 + threadIdx.x % 4 * 8 : 0)
                         : residual(a, source) + (live ? piece_of(group, tile, half) : 0);
  return live ? load_fresh(from) : uint4{0, 0, 0, 0};
}

// Load all chunks of the residual stream, which registers hold from an instruction's first block on; before its other operands,
// which are needed later.
__device__ __forceinline__ void load_chunks(const Arguments& a, const Shared& shared, int source, Inputs (&to)[CHUNKS]) {
  if (source != SOURCE_EMBED) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) to[c].load(residual(a, source), group_of(c), active() ? num_tokens(a, shared) : 0);
    return;
  }
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) to[i / 2].of[tile][i % 2] = load_piece(a, shared, source, tile, i / 2, i % 2);
}

// Mean and inverse deviation of a token from its slices.
__device__ __forceinline__ float2 whole_moments(const Shared& shared, int token) {
  const auto over = [](const float (&x)[WARPS]) {
    return __fadd_rn(__fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3])),
                     __fadd_rn(__fadd_rn(x[4], x[5]), __fadd_rn(x[6], x[7])));
  };
  float sums[WARPS], squares[WARPS];
#pragma unroll
  for (int i = 0; i < WARPS; i++) sums[i] = i < SLICES ? shared.slices[i][token].x : 0.f;
  const float mean = mean_of(over(sums));
#pragma unroll
  for (int i = 0; i < WARPS; i++) squares[i] = i < SLICES ? about(shared.slices[i][token], mean) : 0.f;
  return float2{mean, deviation_of(over(squares))};
}

// Store the moments of a slice of a tile's tokens; `at(chunk, half)` is the lane's piece of it.
template <class At>
__device__ __forceinline__ void store_slices(Shared& shared, int tile, At at) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float2 slice = slice_moments(at);
  if (t == 0 && active()) shared.slices[warp][tile * 8 + g] = slice;
}
