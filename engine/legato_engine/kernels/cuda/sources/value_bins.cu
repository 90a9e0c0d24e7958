// Logits of values' bins, by two-layer decoders. SCALAR and PAIR are token ids.
#include "block_map.cuh"

// Which decoders any token needs; uniform over the grid.
__device__ __forceinline__ void needed(const i64* tokens, int batch, bool& scalar, bool& pair) {
  scalar = pair = false;
  for (int i = 0; i < batch; i++) {
    const i64 token = load_fresh_i64(tokens + i);
    scalar |= token == SCALAR;
    pair |= token == PAIR;
  }
}

// inner [B, 2 * INNER]: gelu of the scalar's first layer, then of the pair's.
extern "C" __global__ void __launch_bounds__(FINISHING, 1) value_inner(
    const i64* tokens, const bf16* hidden, const bf16* scalar_weights, const bf16* scalar_bias, const bf16* pair_weights,
    const bf16* pair_bias, bf16* inner, int batch, int stages) {
  constexpr int BLOCKS = INNER / 16;
  unsigned char* shared = shared_memory;
  BlockMap<TILES, DIM> map(shared, stages, batch);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  __syncthreads();
  launch_dependents();
  wait_previous();
  bool scalar, pair;
  needed(tokens, batch, scalar, pair);
  const int begin = scalar ? 0 : BLOCKS, end = pair ? 2 * BLOCKS : BLOCKS;
  const int first = begin + blockIdx.x, step = gridDim.x, count = first < end ? (end - first + step - 1) / step : 0;
  if (count == 0) return;
  const auto weights = [&](int i) {
    const int block = first + i * step;
    return (block < BLOCKS ? scalar_weights : pair_weights) + (i64)(block % BLOCKS) * (16 * DIM);
  };
  const auto biases = [&](int i, int) {
    const int block = first + i * step, at = block % BLOCKS * 16 + g;
    const bf16* bias = block < BLOCKS ? scalar_bias : pair_bias;
    return float2{to_float(bias[at]), to_float(bias[at + 8])};
  };
  map.template run<1>(
      count, hidden, weights, [](int) {}, [](int) {}, biases, [&](int i, int tile, float4 sum, float2 bias) {
        const int block = first + i * step, at = block % BLOCKS * 16 + g;
        const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int token = tile * 8 + t * 2 + j;
          if (token >= batch) continue;
          bf16* out = inner + (i64)token * 2 * INNER + block / BLOCKS * INNER + at;
          out[0] = to_bf16(gelu_tanh(low[j] + bias.x));
          out[8] = to_bf16(gelu_tanh(high[j] + bias.y));
        }
      });
}

// A decoder that no token needs leaves its own.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) value_bins(
    const i64* tokens, const bf16* inner, const bf16* scalar_weights, const bf16* scalar_bias, const bf16* pair_weights,
    const bf16* pair_bias, float* scalar_bins, float* pair_bins, int batch, int stages) {
  constexpr int PART = INNER / PARTS, CHUNK = chunk_of(PART), CHUNKS = PART / CHUNK, OWN = PARTS / CLUSTER, SCALAR_BLOCKS = SCALAR_BINS / 16;
  static_assert(SCALAR_BINS % (16 * PARTS) == 0 && PAIR_BINS % (16 * PARTS) == 0, "unsupported sizes");
  unsigned char* shared = shared_memory;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int stride = CHUNK + PAD, tokens_held = columns<TILES>(batch);
  Ring ring(shared, stages, 16 * CHUNK), inputs(shared, INPUT_STAGES, tokens_held * stride);
  auto& sums = *reinterpret_cast<PartSums<TILES, PARTS>*>(shared);
  const bool is_pair = blockIdx.x >= SCALAR_BLOCKS;
  const int index = is_pair ? blockIdx.x - SCALAR_BLOCKS : blockIdx.x;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, first = index / CLUSTER * CLUSTER;
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init();
  if (warp < WARPS) clear<TILES>(inputs, stride, batch);
  __syncthreads();
  launch_dependents();
  wait_previous();
  bool scalar, pair;
  needed(tokens, batch, scalar, pair);
  if (is_pair ? !pair : !scalar) return;
  const bf16* weights = is_pair ? pair_weights : scalar_weights;
  if (warp < WARPS) {
    multiply_parts<TILES, OWN, CLUSTER, PART, 1>(
        ring, inputs, batch, [&](int i, int tile, float4 sum) { sums.all[i][tile][lane] = sum; });
  } else if (warp == WARPS) {
    produce_parts<PARTS, OWN, CLUSTER, PART>(ring, weights, first, rank * OWN);
  } else if (warp > WARPS) {
    const bf16* source = inner + is_pair * INNER + rank * OWN * PART;
    produce_inputs<CHUNK>(inputs, OWN * CHUNKS, batch, [&](int i, int token) {
      return source + (i64)token * 2 * INNER + i * CHUNK;
    });
  }
  __syncwarp();
  add_parts<TILES, PARTS, CLUSTER>(rank, sums, [&](int tile, float4 sum) {
    const int out = (first + rank) * 16 + g;
    const bf16* bias = is_pair ? pair_bias : scalar_bias;
    float* bins = is_pair ? pair_bins : scalar_bins;
    const int width = is_pair ? PAIR_BINS : SCALAR_BINS;
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = tile * 8 + t * 2 + j;
      if (token >= batch) continue;
      bins[(i64)token * width + out] = low[j] + to_float(bias[out]);
      bins[(i64)token * width + out + 8] = high[j] + to_float(bias[out + 8]);
    }
  });
}
