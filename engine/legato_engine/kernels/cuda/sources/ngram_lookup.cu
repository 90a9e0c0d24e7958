// A launch of lookups: a block for each row of the state.
#define SYNC() __syncthreads()
#include "ngram_lookup.cuh"

constexpr int THREADS = 256;

// To drafts [R, stride].
extern "C" __global__ void __launch_bounds__(THREADS) lookup(const i64* histories, const i64* newest_places, i64* drafts,
                                                             int context, int stride, int count, int shortest,
                                                             int longest) {
  __shared__ int best_of_warps[THREADS / 32];
  const i64 row = blockIdx.x;
  look_up(histories + row * context, (int)newest_places[row], drafts + row * stride, context, count, shortest, longest,
          best_of_warps, threadIdx.x, THREADS);
}
