// A map of a few tokens by packed weights: x * weights + bias. A thread block has MAP_BLOCKS times 16 of its rows, and reads the tokens once.
//
// If GATE, rows g of 16 are of the map's first half and rows g + 8 the same ones of its second half.
#include "skinny_gemm.cuh"

constexpr int CHUNK = chunk_of(MAP_INPUTS), CHUNKS = MAP_INPUTS / CHUNK;

// x [batch, MAP_INPUTS]; out [batch, outputs], or if `gated` half as many: silu of a row's first half times the second. `bias` may be
// null. The result is added to `onto`, unless null, which may be `out`.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) packed_linear(
    const bf16* x, const bf16* weights, const float* scales, const bf16* bias, const bf16* onto, bf16* out, int outputs, int gated,
    int batch, int stages) {
  unsigned char* shared = shared_memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x * MAP_BLOCKS, stride = CHUNK + PAD;
  Ring ring(shared, stages, Span<CHUNK, CHUNKS>::ELEMENTS), inputs(shared, INPUT_STAGES, columns<TILES>(batch) * stride);
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init();
  if (warp < WARPS) clear<TILES>(inputs, stride, batch);
  __syncthreads();
  launch_dependents();
  if (warp == WARPS) {
    produce_parts<1, 1, MAP_BLOCKS, MAP_INPUTS>(ring, weights, block, 0);
    return;
  }
  wait_previous();
  if (warp > WARPS) {
    produce_inputs<CHUNK>(inputs, CHUNKS, batch, [&](int i, int token) { return x + (i64)token * MAP_INPUTS + i * CHUNK; });
    return;
  }
  multiply_parts<TILES, 1, MAP_BLOCKS, MAP_INPUTS, 1>(ring, inputs, batch, [&](int beside, int tile, float4 sum) {
    const int at = block + beside, token = tile * 8 + lane % 4 * 2;
    const int row = GATE ? at * 8 + lane / 4 : at * 16 + lane / 4, other = row + (GATE ? outputs / 2 : 8);
    sum = RowScales(scales, row, other).of(sum);
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
    const float2 add = bias ? float2{to_float(bias[row]), to_float(bias[other])} : float2{0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (token + j >= batch) continue;
      float first = low[j] + add.x, second = high[j] + add.y;
      if (GATE && gated) {
        out[(i64)(token + j) * (outputs / 2) + row] = to_bf16(silu(first) * second);
        continue;
      }
      const i64 from = (i64)(token + j) * outputs;
      if (onto) first += to_float(onto[from + row]), second += to_float(onto[from + other]);
      out[from + row] = to_bf16(first);
      out[from + other] = to_bf16(second);
    }
  });
}
