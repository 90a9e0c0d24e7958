// Embeddings of tokens, or of their values. *_FEATURES are frequencies, SCALAR and PAIR token ids.
#include "skinny_gemm.cuh"
#include "value_math.cuh"

// `source` [B]: a row of the state, or -1 for the prompt's own entry.
extern "C" __global__ void __launch_bounds__(WORKERS) embed(
    const i64* source, const i64* row_token, const float* row_payload, const i64* prompt_token,
    const float* prompt_payload, const bf16* words, const bf16* scalar_features, const bf16* scalar_weight,
    const bf16* scalar_bias, const bf16* pair_features, const bf16* pair_weight, const bf16* pair_bias, bf16* x) {
  constexpr int OUTPUTS = 64, MOST = (SCALAR_FEATURES > PAIR_FEATURES ? SCALAR_FEATURES : PAIR_FEATURES) * 2;
  __shared__ __align__(16) bf16 features[MOST];
  const int index = blockIdx.y, first = blockIdx.x * OUTPUTS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  launch_dependents();
  wait_previous();
  const i64 row = source[index];
  const i64 token = row < 0 ? prompt_token[index] : row_token[row];
  const float* payload = row < 0 ? prompt_payload + index * 2 : row_payload + row * 2;
  bf16* out = x + (i64)index * DIM + first;
  if (token != SCALAR && token != PAIR) {
    if (threadIdx.x < OUTPUTS && first + threadIdx.x < DIM) out[threadIdx.x] = words[token * DIM + first + threadIdx.x];
    return;
  }
  const bool pair = token == PAIR;
  const int count = pair ? PAIR_FEATURES : SCALAR_FEATURES;
  const bf16* frequencies = pair ? pair_features : scalar_features;
  const Angles angles(payload[0], payload[1]);
  for (int i = threadIdx.x; i < count; i += WORKERS) {
    const float frequency = to_float(frequencies[i]);
    const float phase = pair ? angles.phase(frequency, to_float(frequencies[count + i])) : angles.phase(frequency);
    store_feature(features, count, i, phase);
  }
  __syncthreads();
  const bf16* weight = pair ? pair_weight : scalar_weight;
  const bf16* bias = pair ? pair_bias : scalar_bias;
  for (int o = warp; o < OUTPUTS && first + o < DIM; o += WARPS) {
    const bf16* weights = weight + (i64)(first + o) * count * 2;
    float sum = 0.f;
    for (int i = lane * 8; i < count * 2; i += 256)
      add_products(sum, *reinterpret_cast<const uint4*>(weights + i), *reinterpret_cast<const uint4*>(features + i));
    sum = warp_sum(sum);
    if (lane == 0) out[o] = to_bf16(__fadd_rn(sum, to_float(bias[first + o])));
  }
}
