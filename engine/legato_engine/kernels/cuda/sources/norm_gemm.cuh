// Maps of a layer-normed batch, whose weights hold the norm's scale.
#pragma once
#include "block_map.cuh"

constexpr int IN_CHUNK = chunk_of(DIM), IN_CHUNKS = DIM / IN_CHUNK, SLICES = IN_CHUNK / GROUP;
#include "moments.cuh"

static_assert(SLICES <= WARPS, "a warp has one slice");

// Mean and inverse deviation of a token, by a warp, four lanes a slice. In two rounds of inputs, of x itself.
__device__ __forceinline__ float2 measured(const HeldInputs<DIM>& inputs, const bf16* x, int token) {
  const int lane = threadIdx.x % 32, slice = lane / 4;
  const bool has = slice < SLICES;
  const bf16* row = ROUNDS == 1 ? inputs.data + token * HeldInputs<DIM>::STRIDE : x + (i64)token * DIM;
  const bf16* from = row + (has ? slice : 0) * GROUP + lane % 4 * 8;
  const float2 mine = slice_moments([&](int chunk, int half) {
    const bf16* at = from + chunk * IN_CHUNK + half * 32;
    return ROUNDS == 1 ? *reinterpret_cast<const uint4*>(at) : load_fresh(at);
  });
  const auto over = [](float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
  };
  const float mean = mean_of(over(has ? mine.x : 0.f));
  return float2{mean, deviation_of(over(has ? about(mine, mean) : 0.f))};
}

// A finisher's part of all tokens' moments, and the others'. Of a cluster's SHARED thread blocks each measures every SHARED-th token,
// for all. also(inputs, token, moment) follows each token that the warp measures.
template <int SHARED, class Also>
__device__ __forceinline__ void measure(
    float2* moments, u64* begun, const HeldInputs<DIM>& inputs, const bf16* x, int batch, int finisher, Also also) {
  const int lane = threadIdx.x % 32, rank = SHARED > 1 ? cluster_rank() : 0;
  if (finisher == 0 && lane == 0) barrier_expect(begun, (batch - ceil_div(batch - rank, SHARED)) * sizeof(float2));
  for (int token = finisher * SHARED + rank; token < batch; token += FINISHERS * SHARED) {
    const float2 moment = measured(inputs, x, token);
    if (lane == rank) moments[token] = moment;
    if (SHARED > 1 && lane != rank && lane < SHARED) store_peer(moments + token, moment, begun, lane);
    also(inputs, token, moment);
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(begun);
  barrier_wait(begun, 0);
}

struct Folded {
  float2 low, high;
  RowScales scales = {};
  __device__ __forceinline__ Folded() {}
  __device__ __forceinline__ Folded(float2 low, float2 high) : low(low), high(high) {}
  // Of rows `first` and `second`.
  __device__ __forceinline__ Folded(const float2* folded, const float* scales, int first, int second)
      : low(folded[first]), high(folded[second]), scales(scales, first, second) {}
};

// Blocks of rows that all read the normed batch; each ends with finish(block, tile, sum, prepare(block, tile), moments). early(token)
// runs before the preceding kernel's results are needed; also() as in `measure`. A cluster of SHARED thread blocks reads and
// measures the batch once.
template <int SHARED, class Early, class Prepare, class Finish, class Also>
__device__ __forceinline__ void normed_blocks(
    int blocks, const bf16* weights, int stages, const bf16* x, int batch, Early early, Prepare prepare,
    Finish finish, Also also) {
  unsigned char* shared = shared_memory;
  BlockMap<TILES, DIM> map(shared, stages, batch);
  float2* moments = reinterpret_cast<float2*>(shared);
  const int first = blockIdx.x, step = gridDim.x, count = (blocks - first + step - 1) / step;
  if (SHARED > 1) cluster_sync(); else __syncthreads();
  launch_dependents();
  map.template run<SHARED>(
      count, x, [&](int i) { return stage_of<IN_CHUNK>(weights, (i64)(first + i * step) * IN_CHUNKS); }, early,
      [&](int finisher) { measure<SHARED>(moments, &map.barriers.begun, map.inputs, x, batch, finisher, also); },
      [&](int i, int tile) { return prepare(first + i * step, tile); },
      [&](int i, int tile, float4 sum, const auto& prepared) { finish(first + i * step, tile, sum, prepared, moments); });
}

template <int SHARED, class Early, class Prepare, class Finish>
__device__ __forceinline__ void normed_blocks(
    int blocks, const bf16* weights, int stages, const bf16* x, int batch, Early early, Prepare prepare,
    Finish finish) {
  normed_blocks<SHARED>(
      blocks, weights, stages, x, batch, early, prepare, finish, [](const HeldInputs<DIM>&, int, float2) {});
}
