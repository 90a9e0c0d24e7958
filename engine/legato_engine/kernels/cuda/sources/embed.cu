// Tokens, and the values that they carry, encoded into the residual stream.
//
// Constants: DIM width, COORD_FEATURES and SIZE_FEATURES frequencies, COORD and SIZE token ids. B tokens.
#include "stream.cuh"

// x [B, DIM]: the word of each token, or its encoded value if it is a COORD or a SIZE token.
// `source` [B]: a row of the token and payload state, or -1 for the prompt's own entry of that index.
extern "C" __global__ void __launch_bounds__(WORKERS) embed(
    const i64* source, const i64* row_token, const float* row_payload, const i64* prompt_token,
    const float* prompt_payload, const bf16* words, const bf16* coord_features, const bf16* coord_weight,
    const bf16* coord_bias, const bf16* size_features, const bf16* size_weight, const bf16* size_bias, bf16* x) {
  constexpr int OUTPUTS = 64, MOST = (COORD_FEATURES > SIZE_FEATURES ? COORD_FEATURES : SIZE_FEATURES) * 2;
  __shared__ __align__(16) bf16 features[MOST];
  const int index = blockIdx.y, first = blockIdx.x * OUTPUTS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  launch_dependents();
  wait_previous();
  const i64 row = source[index];
  const i64 token = row < 0 ? prompt_token[index] : row_token[row];
  const float* payload = row < 0 ? prompt_payload + index * 2 : row_payload + row * 2;
  bf16* out = x + (i64)index * DIM + first;
  if (token != COORD && token != SIZE) {
    if (threadIdx.x < OUTPUTS && first + threadIdx.x < DIM) out[threadIdx.x] = words[token * DIM + first + threadIdx.x];
    return;
  }
  const bool size = token == SIZE;
  const int count = size ? SIZE_FEATURES : COORD_FEATURES;
  const float a = rounded(6.283185307179586f * rounded(payload[0]));
  const float b = rounded(6.283185307179586f * rounded(payload[1]));
  for (int i = threadIdx.x; i < count; i += WORKERS) {
    const float phase = size ? rounded(a * to_float(size_features[i]) + b * to_float(size_features[count + i]))
                             : rounded(a * to_float(coord_features[i]));
    features[i] = to_bf16(cosf(phase));
    features[count + i] = to_bf16(sinf(phase));
  }
  __syncthreads();
  const bf16* weight = size ? size_weight : coord_weight;
  const bf16* bias = size ? size_bias : coord_bias;
  for (int o = warp; o < OUTPUTS && first + o < DIM; o += WARPS) {
    const bf16* weights = weight + (i64)(first + o) * count * 2;
    float sum = 0.f;
    for (int i = lane * 8; i < count * 2; i += 256) {
      const uint4 w = *reinterpret_cast<const uint4*>(weights + i), f = *reinterpret_cast<const uint4*>(features + i);
#pragma unroll
      for (int j = 0; j < 4; j++)
        sum += low_float((&w.x)[j]) * low_float((&f.x)[j]) + high_float((&w.x)[j]) * high_float((&f.x)[j]);
    }
    sum = warp_sum(sum);
    if (lane == 0) out[o] = to_bf16(sum + to_float(bias[first + o]));
  }
}
