// The draft of known quality: the prepared tokens that follow a sequence which was recognised by its tokens.
//
// R rows, C positions of a row, N known sequences of L positions. Unknown tokens are -1, as in the histories [R, C].
#include "common.cuh"

constexpr int WARPS = 32;

// Write `count` tokens a row to drafts [R, stride], from `prepared` [N, L] after the row's newest position. The sequence
// is the first of `known` [N, L] with the same tokens up to there; the last one matches every row. One block per row:
// each warp compares the end of one sequence, where sequences differ soonest, then all warps compare the rest.
extern "C" __global__ void __launch_bounds__(32 * WARPS) oracle(const i64* histories, const i64* newest_positions,
                                                               const i64* known, const i64* prepared, i64* drafts,
                                                               int context, int length, int num_known, int stride,
                                                               int count) {
  __shared__ bool matches[WARPS];
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64* history = histories + (i64)row * context;
  const int newest = (int)newest_positions[row], stop = min(newest + 1, min(context, length));
  int found = num_known - 1;
  for (int from = 0; from < num_known - 1 && found == num_known - 1; from += WARPS) {
    const int mine = from + warp, end = stop - 1 - lane;
    const bool same = mine < num_known - 1 && (end < 0 || history[end] == known[(i64)mine * length + end]);
    const bool all_same = __all_sync(~0u, same);
    __syncthreads();
    if (lane == 0) matches[warp] = all_same;
    __syncthreads();
    for (int i = 0; i < WARPS && found == num_known - 1; i++) {
      if (!matches[i]) continue;
      bool rest = true;
      for (int position = threadIdx.x; position < stop; position += 32 * WARPS)
        rest &= history[position] == known[(i64)(from + i) * length + position];
      if (__syncthreads_and(rest)) found = from + i;
    }
  }
  const int position = newest + 1 + threadIdx.x;
  if (threadIdx.x < count)
    drafts[(i64)row * stride + threadIdx.x] = position < length ? prepared[(i64)found * length + position] : -1;
}
