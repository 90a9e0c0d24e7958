// A draft of known quality: what is to be said behind each place of a sequence that was known beforehand.
//
// R rows, C positions of a row, N known sequences of L places. Nothing known is -1, as in the histories [R, C].
#include "common.cuh"

constexpr int WARPS = 32;

// `count` tokens a row into drafts [R, stride], from the places of `said` [N, L] behind its newest one. Its sequence is
// the first of `known` [N, L] that holds the same up to there; the last one is like every row. A block is a row: each
// warp compares the end of a sequence, where they differ soonest, and all of them the rest of what is left.
extern "C" __global__ void __launch_bounds__(32 * WARPS) replay(const i64* histories, const i64* newest_places,
                                                               const i64* known, const i64* said, i64* drafts,
                                                               int context, int length, int num_known, int stride,
                                                               int count) {
  __shared__ bool is_like[WARPS];
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64* history = histories + (i64)row * context;
  const int newest = (int)newest_places[row], stop = min(newest + 1, min(context, length));
  int found = num_known - 1;
  for (int from = 0; from < num_known - 1 && found == num_known - 1; from += WARPS) {
    const int mine = from + warp, end = stop - 1 - lane;
    const bool same = mine < num_known - 1 && (end < 0 || history[end] == known[(i64)mine * length + end]);
    const bool all_same = __all_sync(~0u, same);
    __syncthreads();
    if (lane == 0) is_like[warp] = all_same;
    __syncthreads();
    for (int i = 0; i < WARPS && found == num_known - 1; i++) {
      if (!is_like[i]) continue;
      bool rest = true;
      for (int place = threadIdx.x; place < stop; place += 32 * WARPS)
        rest &= history[place] == known[(i64)(from + i) * length + place];
      if (__syncthreads_and(rest)) found = from + i;
    }
  }
  const int place = newest + 1 + threadIdx.x;
  if (threadIdx.x < count)
    drafts[(i64)row * stride + threadIdx.x] = place < length ? said[(i64)found * length + place] : -1;
}
