// Histories [R, C] hold -1 for unknown tokens.
#include "common.cuh"

constexpr int THREADS = 256;

// Up to `count` tokens to drafts [R, stride], from after the latest earlier match of the newest tokens; longer
// matches win. A block is a row.
extern "C" __global__ void __launch_bounds__(THREADS) lookup(const i64* histories, const i64* newest_places, i64* drafts,
                                                             int context, int stride, int count, int shortest,
                                                             int longest) {
  __shared__ int best_of_warps[THREADS / 32];
  const int row = blockIdx.x, thread = threadIdx.x;
  const i64* history = histories + (i64)row * context;
  const int newest = (int)newest_places[row];
  int best = -1;  // matching tokens, then position
  for (int place = thread; place < newest; place += THREADS) {
    int agreed = 0;
    while (agreed < longest && agreed <= place) {
      const i64 token = history[place - agreed];
      if (token < 0 || token != history[newest - agreed]) break;
      agreed++;
    }
    if (agreed >= shortest) best = max(best, agreed * context + place);
  }
  best = __reduce_max_sync(~0u, best);
  if (thread % 32 == 0) best_of_warps[thread / 32] = best;
  __syncthreads();
  for (int warp = 0; warp < THREADS / 32; warp++) best = max(best, best_of_warps[warp]);
  if (thread >= count) return;
  const int end = best % context;  // repeating periodically
  drafts[(i64)row * stride + thread] = best < 0 ? -1 : history[end + 1 + thread % (newest - end)];
}
