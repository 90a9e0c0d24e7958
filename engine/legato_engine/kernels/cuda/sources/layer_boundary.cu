// One layer's `layer_out` and the next one's `layer_in`, for up to 8 tokens. All thread blocks must run at once, one on a
// multiprocessor, because they wait for each other. The next map's weights are copied while
// thread blocks wait for each other's part of x. The first map begins with the inner activations, while attention
// still runs.
#include "layer_maps.cuh"

constexpr int PART = MIXED / PARTS, OUT_CHUNK = chunk_of(PART), OUT_CHUNKS = PART / OUT_CHUNK;
using InStages = Span<IN_CHUNK, IN_CHUNKS>;
using OutStages = Span<OUT_CHUNK, OUT_CHUNKS>;
constexpr int STAGE = InStages::ELEMENTS > OutStages::ELEMENTS ? InStages::ELEMENTS : OutStages::ELEMENTS;
static_assert(TILES == 1 && PARTS > 1 && PARTS <= WARPS, "unsupported sizes");
static_assert(DIM <= PART, "the heads' output is in the last part");

// Blocks that have written their part of x, and all that `layer_in` writes. Zero between steps, but for the last
// layer's second.
struct Progress {
  u32 x[32], in[32];
};

struct BoundarySums {
  union {
    WarpSums<1> parts[PARTS];
    struct {
      BlockSums<1> blocks;
      float2 slices[WARPS][8];
    };
  };
};

// Of 16 columns. `ready` counts the `writers` that have written all of `mixed` but the heads' output.
__device__ __forceinline__ void add_out(
    Ring& ring, BoundarySums& sums, const bf16* mixed, const float* scales, const bf16* proj_bias, const bf16* fc2_bias, bf16* x,
    const u32* ready, u32 writers, int batch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool active = has_inputs<OUT_CHUNK>(warp);
  Unit own;
  if (warp == 0) own.begin(0, blockIdx.x, scales, proj_bias, fc2_bias);
  if (threadIdx.x == 0) wait_for(ready, writers);
  workers_sync();
  const bf16* from = mixed + (i64)g * MIXED + (active ? warp * GROUP + t * 8 : 0);
  Tokens<1> tokens[OUT_CHUNKS];
  const auto load = [&](int part, int chunk) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      tokens[chunk].of[0][half] =
          g < batch ? load_fresh(from + part * PART + chunk * OUT_CHUNK + half * 32) : uint4{0, 0, 0, 0};
  };
#pragma unroll
  for (int chunk = 0; chunk < OUT_CHUNKS; chunk++) load(0, chunk);
  if (warp == 0) own.load(x, batch);
  Reader<true, OUT_CHUNK, OutStages::SIZE> reader;
  reader.begin(ring, active);
#pragma unroll 1
  for (int part = 0; part < PARTS; part++) {
    float4 sum[1] = {};
#pragma unroll
    for (int stage = 0; stage < OutStages::STAGES; stage++) {
      const int begin = stage * OutStages::SIZE, chunks = OutStages::chunks(stage);
      reader.multiply(
          ring, sum, [&](int i) -> const Tokens<1>& { return tokens[begin + i]; }, chunks, active,
          stage + 1 < OutStages::STAGES || part + 1 < PARTS);
      if (part >= PARTS - 2) continue;
#pragma unroll
      for (int chunk = begin; chunk < begin + chunks; chunk++) load(part + 1, chunk);
    }
    sums.parts[part].of[warp][0][lane] = sum[0];
    if (part != PARTS - 2) continue;
    wait_previous();
#pragma unroll
    for (int chunk = 0; chunk < OUT_CHUNKS; chunk++) load(PARTS - 1, chunk);
  }
  workers_sync();
  if (warp < PARTS) sums.parts[warp].of[0][0][lane] = sums.parts[warp].total(0);
  workers_sync();
  if (warp > 0) return;
  float4 all = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int part = 0; part < PARTS; part++) add(all, sums.parts[part].of[0][0][lane]);
  own.write(all, nullptr, x, batch);
}

// By one warp; four lanes a token.
__device__ __forceinline__ void add_slices(float2* moments, const float2 (&slices)[WARPS][8]) {
  const int token = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const float2 a = slices[2 * q][token], b = slices[2 * q + 1][token];
  const auto over = [](float low, float high) {
    float x = __fadd_rn(low, high);
    x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
    return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
  };
  const bool has[2] = {2 * q < SLICES, 2 * q + 1 < SLICES};
  const float mean = mean_of(over(has[0] ? a.x : 0.f, has[1] ? b.x : 0.f));
  const float deviation = deviation_of(over(has[0] ? about(a, mean) : 0.f, has[1] ? about(b, mean) : 0.f));
  if (q == 0) moments[token] = float2{mean, deviation};
  __syncwarp();
}

// Layer index - 1 ends, unless `weights_out` is null; layer `index` begins, unless `weights_in` is.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) layer_boundary(
    bf16* mixed, const bf16* weights_out, const float* scales_out, const bf16* proj_bias, const bf16* fc2_bias, bf16* x,
    const bf16* weights_in, const float* scales_in, const float2* folded, const float* cos_table, const float* sin_table,
    const i64* row, const i64* position, const i64* table, bf16* q, Element* keys, Element* values, const float* units,
    Progress* progress, int index, int last, int batch, int stages) {
  constexpr int BLOCKS = QKV_BLOCKS + FF / 16;
  __shared__ i64 offsets[8];
  __shared__ __align__(16) float2 moments[8];
  unsigned char* shared = shared_memory;
  Ring ring(shared, stages, STAGE);
  auto& barriers = SumBarriers::at(shared);
  auto& sums = *reinterpret_cast<BoundarySums*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x, step = gridDim.x;
  const bool adds = weights_out && first < DIM / 16;
  const int count = weights_in ? ceil_div(BLOCKS - first, step) : 0;
  if (threadIdx.x == WORKERS) ring.init(), barriers.init(1);
  __syncthreads();
  launch_dependents();
  Progress* const now = progress + index;
  if (warp > WARPS) {
    if (!count) return;
    const auto prepare = [&](int i, int) {
      return BlockIn(first + i * step, 0, scales_in, folded, cos_table, sin_table, position, batch);
    };
    const auto finish = [&](int i, int, float4 sum, const BlockIn& in) {
      if (i == 0) add_slices(moments, sums.slices);
      write_in(first + i * step, 0, sum, in, moments, offsets, q, mixed, keys, values, units, nullptr, batch);
    };
    wait_previous();
    finish_blocks<TILES, 1>(count, 0, sums.blocks, barriers, [] {}, prepare, finish);
    __syncwarp();
    if (lane == 0) signal(now->in);
    return;
  }
  if (warp == WARPS) {
    if (adds)
      produce_weights<OUT_CHUNK, OUT_CHUNKS>(ring, PARTS, [&](int i, int) {
        return stage_of<OUT_CHUNK>(weights_out, ((i64)first * PARTS + i) * OUT_CHUNKS);
      });
    produce_weights<IN_CHUNK, IN_CHUNKS>(ring, count, [&](int i, int) {
      return stage_of<IN_CHUNK>(weights_in, (i64)(first + i * step) * IN_CHUNKS);
    });
    return;
  }
  if (warp == WARPS - 1 && lane < batch) offsets[lane] = offset_of(lane, row, position, table);
  if (adds)
    add_out(ring, sums, mixed, scales_out, proj_bias, fc2_bias, x, now[-1].in, step, batch);
  else
    wait_previous();
  // No thread block reads these counters now.
  if (blockIdx.x == 0 && index == 0 && threadIdx.x == 0) progress[last - 1].in[0] = 0;
  if (blockIdx.x == 0 && index == last)
    for (int i = threadIdx.x; i < last; i += WORKERS) {
      progress[i].x[0] = 0;
      if (i < last - 1) progress[i].in[0] = 0;
    }
  if (!count) return;
  if (adds && warp == 0) {
    __syncwarp();
    if (lane == 0) signal(now->x);
  }
  if (weights_out) {
    if (threadIdx.x == 0) wait_for(now->x, DIM / 16);
    workers_sync();
  }
  const bool active = has_inputs<IN_CHUNK>(warp);
  const bf16* from = x + (i64)g * DIM + (active ? warp * GROUP + t * 8 : 0);
  Tokens<1> held[IN_CHUNKS];
#pragma unroll
  for (int chunk = 0; chunk < IN_CHUNKS; chunk++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      held[chunk].of[0][half] = g < batch ? load_fresh(from + chunk * IN_CHUNK + half * 32) : uint4{0, 0, 0, 0};
  Reader<true, IN_CHUNK, InStages::SIZE> reader;
  reader.begin(ring, active);
#pragma unroll 1
  for (int block = 0; block < count; block++) {
    float4 sum[1] = {};
#pragma unroll
    for (int stage = 0; stage < InStages::STAGES; stage++)
      reader.multiply(
          ring, sum, [&](int i) -> const Tokens<1>& { return held[stage * InStages::SIZE + i]; }, InStages::chunks(stage), active,
          stage + 1 < InStages::STAGES || block + 1 < count);
    if (block == 0) {
      const float2 slice = slice_moments([&](int chunk, int half) { return held[chunk].of[0][half]; });
      if (t == 0) sums.slices[warp][g] = slice;
    }
    sums.blocks.hand_over(block, sum, barriers);
  }
}
