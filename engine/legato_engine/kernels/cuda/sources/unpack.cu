// Packed weights as row-major bf16, for products of many tokens. MAP_CHUNK inputs are a stage.
#include "skinny_gemm.cuh"

// Of row blocks from `first` on, a thread block each with one stage, of `stages`: columns `begin` to `end` of the map go to `out` [rows,
// end - begin]. Packed row r is row order[r] - 16 * first of `out`, or without an `order` r - 16 * first. `scales` are those of the map's own rows.
extern "C" __global__ void __launch_bounds__(WORKERS) unpack(
    const bf16* weights, const float* scales, const int* order, bf16* out, int first, int stages, int begin, int end) {
  const int block = first + blockIdx.x, stage = begin / MAP_CHUNK + blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  launch_dependents();
  wait_previous();
  const int column = stage * MAP_CHUNK + warp * GROUP - begin;
  if (!has_inputs<MAP_CHUNK>(warp) || column < 0 || column >= end - begin) return;
  PackedWeights packed;
  packed.load<MAP_CHUNK>(stage_of<MAP_CHUNK>(weights, (i64)block * stages + stage));
  const Weights found = packed.widened();
#pragma unroll
  for (int high = 0; high < 2; high++) {
    const int row = block * 16 + high * 8 + g;
    const int own = order ? order[row] : row;
    bf16* const to = out + (i64)(own - 16 * first) * (end - begin) + column + t * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 v = high ? found.high[half] : found.low[half];
      float scale = 1.f, minimum = 0.f;
#if WEIGHTS == 1 || WEIGHTS == 2
      scale = scales[own];
#elif WEIGHTS >= 3
      scale = high ? packed.scales.of(half).y : packed.scales.of(half).x;
#endif
#if WEIGHTS == 6
      minimum = high ? packed.scales.minima(half).y : packed.scales.minima(half).x;
#endif
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32& pair = (&v.x)[i];
        if (WEIGHTS != BF16) pair = pack(__fmaf_rn(low_float(pair), scale, minimum), __fmaf_rn(high_float(pair), scale, minimum));
      }
      *reinterpret_cast<uint4*>(to + half * 32) = v;
    }
  }
}
