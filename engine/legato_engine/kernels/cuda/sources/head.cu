// A map of the normed residual stream to VOCAB float32 logits.
#include "norm_gemm.cuh"

// `folded` as in `normed`.
extern "C" __global__ void __launch_bounds__(FINISHING, 1) head(
    const bf16* x, const bf16* weights, const float* scales, const float2* folded, float* logits, int batch, int stages) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  normed_blocks<1>(
      VOCAB / 16, weights, stages, x, batch, [](int) {},
      [&](int block, int) { return Folded(folded, scales, block * 16 + g, block * 16 + g + 8); },
      [&](int block, int tile, float4 sum, Folded rows, const float2* moments) {
        const int out = block * 16 + g;
        sum = rows.scales.of(sum);
        const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int token = tile * 8 + t * 2 + j;
          if (token >= batch) continue;
          logits[(i64)token * VOCAB + out] = normed(low[j], moments[token], rows.low);
          logits[(i64)token * VOCAB + out + 8] = normed(high[j], moments[token], rows.high);
        }
      });
}
