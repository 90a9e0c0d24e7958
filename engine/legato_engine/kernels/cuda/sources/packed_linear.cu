// A map of a few tokens by packed weights: out = x * weights + bias. A thread block has 16 of its rows.
#include "skinny_gemm.cuh"

constexpr int CHUNK = chunk_of(MAP_INPUTS), CHUNKS = MAP_INPUTS / CHUNK;

// x [batch, MAP_INPUTS] and out [batch, outputs]; `bias` may be null.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) packed_linear(
    const bf16* x, const bf16* weights, const float* scales, const bf16* bias, bf16* out, int outputs, int batch, int stages) {
  unsigned char* shared = shared_memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, stride = CHUNK + PAD;
  Ring ring(shared, stages, Span<CHUNK, CHUNKS>::ELEMENTS), inputs(shared, INPUT_STAGES, columns<TILES>(batch) * stride);
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init();
  if (warp < WARPS) clear<TILES>(inputs, stride, batch);
  __syncthreads();
  launch_dependents();
  if (warp == WARPS) {
    produce_parts<1, 1, 1, MAP_INPUTS>(ring, weights, block, 0);
    return;
  }
  wait_previous();
  if (warp > WARPS) {
    produce_inputs<CHUNK>(inputs, CHUNKS, batch, [&](int i, int token) { return x + (i64)token * MAP_INPUTS + i * CHUNK; });
    return;
  }
  multiply_parts<TILES, 1, 1, MAP_INPUTS, 1>(ring, inputs, batch, [&](int, int tile, float4 sum) {
    const int row = block * 16 + lane / 4, token = tile * 8 + lane % 4 * 2;
    sum = RowScales(scales, row, row + 8).of(sum);
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
    const float2 add = bias ? float2{to_float(bias[row]), to_float(bias[row + 8])} : float2{0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (token + j >= batch) continue;
      bf16* to = out + (i64)(token + j) * outputs + row;
      to[0] = to_bf16(low[j] + add.x);
      to[8] = to_bf16(high[j] + add.y);
    }
  });
}
