// A draft of known quality: what is to be said behind each place of a sequence that was known beforehand.
//
// R rows, C positions of a row, N known sequences of L places. Nothing known is -1, as in the histories [R, C].
#include "common.cuh"

constexpr int WARPS = 32;
constexpr int AHEAD = 8;  // places that a lane compares before it looks whether any differed

// `count` tokens a row into drafts [R, stride], from the places of `said` [N, L] behind its newest one. Its sequence is
// the first of `known` [N, L] that holds the same up to there; the last one is like every row. A block is a row, a warp
// compares a sequence.
extern "C" __global__ void __launch_bounds__(32 * WARPS) replay(const i64* histories, const i64* newest_places,
                                                               const i64* known, const i64* said, i64* drafts,
                                                               int context, int length, int num_known, int stride,
                                                               int count) {
  __shared__ int first;
  const int row = blockIdx.x, lane = threadIdx.x % 32;
  const i64* history = histories + (i64)row * context;
  const int newest = (int)newest_places[row], stop = min(newest + 1, min(context, length));
  if (threadIdx.x == 0) first = num_known - 1;
  __syncthreads();
  for (int sequence = threadIdx.x / 32; sequence < num_known - 1; sequence += WARPS) {
    const i64* places = known + (i64)sequence * length;
    bool same = true;
    for (int end = stop; end > 0 && same; end -= 32 * AHEAD) {  // the end is where they differ soonest
#pragma unroll
      for (int step = 0; step < AHEAD; step++) {
        const int place = end - 1 - 32 * step - lane;
        same &= place < 0 || history[max(place, 0)] == places[max(place, 0)];
      }
      same = __all_sync(~0u, same);
    }
    if (same && lane == 0) atomicMin(&first, sequence);
  }
  __syncthreads();
  const int place = newest + 1 + threadIdx.x;
  if (threadIdx.x < count) drafts[(i64)row * stride + threadIdx.x] = place < length ? said[(i64)first * length + place] : -1;
}
