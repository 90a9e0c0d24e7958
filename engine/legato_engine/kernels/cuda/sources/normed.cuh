// Maps of a layer-normed batch, whose weights hold the norm's own scale.
//
// Constants: DIM width, TILES groups of 8 tokens.
#pragma once
#include "stream.cuh"

constexpr int IN_CHUNK = chunk_of(DIM), IN_CHUNKS = DIM / IN_CHUNK;

// Mean and inverse deviation of each token's residual stream, a warp a token.
__device__ __forceinline__ void measure(float2* moments, const Ring& inputs, int batch) {
  constexpr int STEPS = ceil_div(DIM, 256);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int token = warp; token < batch; token += WARPS) {
    uint4 v[STEPS];
    float sum[4] = {}, squares[4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const int at = i * 256 + lane * 8;
      v[i] = at < DIM ? *reinterpret_cast<const uint4*>(inputs.data + token * (DIM + PAD) + at) : uint4{0, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < 4; j++) sum[j] += low_float((&v[i].x)[j]) + high_float((&v[i].x)[j]);
    }
    const float mean = warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) / DIM;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      if (i * 256 + lane * 8 < DIM) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float low = low_float((&v[i].x)[j]) - mean, high = high_float((&v[i].x)[j]) - mean;
          squares[j] += low * low + high * high;
        }
      }
    const float variance = warp_sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / DIM;
    if (lane == 0) moments[token] = float2{mean, rsqrtf(variance + 1e-5f)};
  }
}

// A map of normed inputs, where `sum` is the product of the raw ones with weights that hold the norm's own
// scale: rows[0] is what a row's weights add up to, rows[1] its bias with the norm's.
__device__ __forceinline__ float normed(float sum, float2 moment, float2 row) {
  return moment.y * (sum - moment.x * row.x) + row.y;
}

// Of rows g and g + 8 of a block what `normed` needs.
struct Folded {
  float2 low, high;
};

// The frame of a kernel whose blocks of rows all read the normed batch; finish(block, tile, sum, prepare(block),
// moments). early(token) runs for each token, a lane a token, ahead of the kernel in front's results.
// also(inputs, moments) runs once in all workers, while the inputs lie in shared memory; each warp has
// measured its own tokens by then. A cluster of SHARED thread blocks reads the batch once.
template <int SHARED, class Early, class Prepare, class Finish, class Also>
__device__ __forceinline__ void normed_blocks(
    int blocks, const bf16* weights, int stages, const bf16* x, int batch, Early early, Prepare prepare,
    Finish finish, Also also) {
  __shared__ float2 moments[TILES * 8];
  unsigned char* shared = shared_memory;
  const int elements = places<TILES>(batch) * (DIM + PAD), late = HELD<TILES> ? elements / (16 * IN_CHUNK) : 0;
  Ring ring(shared, stages, 16 * IN_CHUNK, late), inputs(shared, 1, elements);
  ring.late_data = inputs.data;  // free when the tokens are held
  auto& sums = *reinterpret_cast<BlockSums<TILES>*>(shared);
  const int first = blockIdx.x, step = gridDim.x, count = (blocks - first + step - 1) / step, warp = threadIdx.x / 32;
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init();
  if (warp < WARPS) clear<TILES>(inputs.data, DIM + PAD, batch);
  if (SHARED > 1) cluster_sync(); else __syncthreads();
  launch_dependents();
  if (warp > WARPS) {
    const int token = threadIdx.x % 32;
    if (token < batch) early(token);
    __syncwarp();
    wait_previous();
    const auto at = [&](int, int token) { return x + (i64)token * DIM; };
    produce_inputs<DIM, SHARED>(inputs, 1, batch, at, SHARED > 1 ? cluster_rank() : 0);
  } else if (warp == WARPS) {
    if (threadIdx.x == WORKERS)
      produce_weights<IN_CHUNK>(ring, count * IN_CHUNKS, [&](int i) {
        const i64 block = first + i / IN_CHUNKS * step;
        return weights + (block * IN_CHUNKS + i % IN_CHUNKS) * (16 * IN_CHUNK);
      });
  } else {
    wait_previous();
    multiply_blocks<TILES, DIM>(
        count, ring, inputs, sums, batch,
        [&] {
          measure(moments, inputs, batch);
          also(inputs, moments);
        },
        [&](int i) { return prepare(first + i * step); },
        [&](int i, int tile, float4 sum, Folded folded) { finish(first + i * step, tile, sum, folded, moments); });
  }
}

template <int SHARED, class Early, class Prepare, class Finish>
__device__ __forceinline__ void normed_blocks(
    int blocks, const bf16* weights, int stages, const bf16* x, int batch, Early early, Prepare prepare,
    Finish finish) {
  normed_blocks<SHARED>(
      blocks, weights, stages, x, batch, early, prepare, finish, [](const Ring&, const float2*) {});
}
