// Histories [R, C] hold -1 for unknown tokens.
#pragma once
#include "common.cuh"

// Up to `count` draft tokens of a row, from after the latest earlier match of its newest tokens; longer matches win.
// Called by `threads` threads together, whole warps, whose barrier SYNC() is; `best_of_warps` has a word for each warp.
__device__ __forceinline__ void look_up(const i64* history, int newest, i64* drafts, int context, int count, int shortest,
                                        int longest, int* best_of_warps, int thread, int threads) {
  constexpr int AT_ONCE = 4;  // places whose reads are under way together
  int best = -1;  // matching tokens, then position
  const i64 last = history[newest];
  for (int first = thread; first < newest; first += AT_ONCE * threads) {
    i64 tokens[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) tokens[i] = first + i * threads < newest ? history[first + i * threads] : -1;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (tokens[i] < 0 || tokens[i] != last) continue;
      const int place = first + i * threads;
      int agreed = 1;
      while (agreed < longest && agreed <= place) {
        const i64 token = history[place - agreed];
        if (token < 0 || token != history[newest - agreed]) break;
        agreed++;
      }
      if (agreed >= shortest) best = max(best, agreed * context + place);
    }
  }
  __syncwarp();
  best = __reduce_max_sync(~0u, best);
  if (thread % 32 == 0) best_of_warps[thread / 32] = best;
  SYNC();
  for (int warp = 0; warp < threads / 32; warp++) best = max(best, best_of_warps[warp]);
  if (thread >= count) return;
  const int end = best % context;  // repeating periodically
  drafts[thread] = best < 0 ? -1 : history[end + 1 + thread % (newest - end)];
}
