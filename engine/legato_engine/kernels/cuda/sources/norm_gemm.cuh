// Maps of a layer-normed batch, whose weights hold the norm's scale.
#pragma once
#include "skinny_gemm.cuh"

constexpr int IN_CHUNK = chunk_of(DIM), IN_CHUNKS = DIM / IN_CHUNK, SLICES = IN_CHUNK / GROUP;
#include "moments.cuh"

static_assert(SLICES <= WARPS, "a warp has one slice");

// Mean and inverse deviation of each of a tile's tokens, by a warp, four lanes a slice.
__device__ __forceinline__ void measure(float2* moments, const Ring& inputs, int tile, int batch) {
  const int lane = threadIdx.x % 32, slice = lane / 4;
  for (int token = tile * 8; token < min(tile * 8 + 8, batch); token++) {
    const bf16* from = inputs.data + token * (DIM + PAD) + (slice < SLICES ? slice : 0) * GROUP + lane % 4 * 8;
    const float2 mine = slice_moments(
        [&](int chunk, int half) { return *reinterpret_cast<const uint4*>(from + chunk * IN_CHUNK + half * 32); });
    const auto over = [](float x) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, lanes));
      return x;
    };
    const bool has = slice < SLICES;
    const float mean = mean_of(over(has ? mine.x : 0.f));
    const float deviation = deviation_of(over(has ? about(mine, mean) : 0.f));
    if (lane == 0) moments[token] = float2{mean, deviation};
  }
  __syncwarp();
}

struct Folded {
  float2 low, high;
};

// Blocks of rows that all read the normed batch; each ends with finish(block, tile, sum, prepare(block, tile), moments) by the
// tile's own warp. early(token) runs before the preceding kernel's results are needed. also(inputs, moments, tile) runs once in
// each of those warps. A cluster of SHARED blocks reads the batch once.
template <int SHARED, class Early, class Prepare, class Finish, class Also>
__device__ __forceinline__ void normed_blocks(
    int blocks, const bf16* weights, int stages, const bf16* x, int batch, Early early, Prepare prepare,
    Finish finish, Also also) {
  __shared__ float2 moments[TILES * 8];
  unsigned char* shared = shared_memory;
  Ring ring(shared, stages, 16 * IN_CHUNK), inputs(shared, 1, columns<TILES>(batch) * (DIM + PAD));
  auto& barriers = SumBarriers::at(shared);
  auto& sums = *reinterpret_cast<BlockSums<TILES>*>(shared);
  const int first = blockIdx.x, step = gridDim.x, count = (blocks - first + step - 1) / step, warp = threadIdx.x / 32;
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init(), barriers.init(TILES);
  if (warp < WARPS) clear<TILES>(inputs, DIM + PAD, batch);
  if (SHARED > 1) cluster_sync(); else __syncthreads();
  launch_dependents();
  if (warp < WARPS) {
    wait_previous();
    multiply_blocks<TILES, DIM>(count, ring, inputs, sums, barriers, batch);
  } else if (warp == WARPS) {
    if (threadIdx.x == WORKERS)
      produce_weights<IN_CHUNK>(ring, count * IN_CHUNKS, [&](int i) {
        const i64 block = first + i / IN_CHUNKS * step;
        return weights + (block * IN_CHUNKS + i % IN_CHUNKS) * (16 * IN_CHUNK);
      });
  } else if (warp == WARPS + 1) {
    const int token = threadIdx.x % 32;
    if (token < batch) early(token);
    __syncwarp();
    wait_previous();
    const auto at = [&](int, int token) { return x + (i64)token * DIM; };
    produce_inputs<DIM, SHARED>(inputs, 1, batch, at, SHARED > 1 ? cluster_rank() : 0);
  } else {
    const int tile = warp - WARPS - 2;
    wait_previous();
    barrier_wait(inputs.full, 0);
    measure(moments, inputs, tile, batch);
    also(inputs, moments, tile);
    finish_blocks<TILES>(
        count, tile, sums, barriers, [&](int i) { return prepare(first + i * step, tile); },
        [&](int i, float4 sum, const auto& prepared) { finish(first + i * step, tile, sum, prepared, moments); });
  }
}

template <int SHARED, class Early, class Prepare, class Finish>
__device__ __forceinline__ void normed_blocks(
    int blocks, const bf16* weights, int stages, const bf16* x, int batch, Early early, Prepare prepare,
    Finish finish) {
  normed_blocks<SHARED>(
      blocks, weights, stages, x, batch, early, prepare, finish, [](const Ring&, const float2*, int) {});
}
