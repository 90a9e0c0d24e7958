// The control steps of decode loops, as specified by kernels/decode_loop.py; one thread block.
#include "decode_loop.cuh"

typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(cudaGraphConditionalHandle handle,
                                                                      unsigned int value);

constexpr int THREADS = 128;

// Publishes the outputs of step `now`, units of 16 bytes.
__device__ __forceinline__ void publish(const int4* outputs, int4* ring, i64 now, int units) {
  for (int at = threadIdx.x; at < units; at += THREADS) ring[now * units + at] = outputs[at];
}

// Counts the step, whose outputs a fence has published, and decides; one thread.
__device__ __forceinline__ void decide(bool ends, i64 now, const i64* limit, i64* step, volatile i64* words, int low,
                                       int high) {
  *step = now + 1;
  publish_count(words, now + 1);
  const auto handle = (cudaGraphConditionalHandle)(unsigned)high << 32 | (unsigned)low;
  cudaGraphSetConditional(handle, follows(ends, now + 1, *limit, stop_requested(words)));
}

// `ring` [steps, units] and `words` (steps done; whether to stop) are page-locked memory of the host, which reads
// a step's `outputs` there once `words[0]` counts it. After token `successors[c][0]`, or any, constraint c becomes
// `successors[c][1]`. The 64-bit handle of the WHILE node passes as two int32.
extern "C" __global__ void __launch_bounds__(THREADS)
    control(const i64* rows, i64* positions, i64* firsts, i64* samples, const i64* tokens, i64* constraints,
            const i64 (*successors)[2], const int4* outputs, const i64* limit, i64* step, int4* ring,
            volatile i64* words, int batch, int units, int scratch, int low, int high) {
  const i64 now = *step;
  bool broken = false;
  publish(outputs, ring, now, units);
  for (int b = threadIdx.x; b < batch; b += THREADS) {
    const i64 token = tokens[b];
    constraints[b] = successor(successors, constraints[b], token);
    if (rows[b] == scratch) continue;
    positions[b]++, firsts[b]++, samples[b]++;
    broken |= token < 0;
  }
  __threadfence_system();
  broken = __syncthreads_or(broken);
  if (threadIdx.x == 0) decide(broken, now, limit, step, words, low, high);
}

// After a drafting step: by row of the launch, the most draft tokens, the end of the positions that it may write, its
// first token, and the tokens that it has returned; by row of the state, the newest position and the last one to feed.
extern "C" __global__ void __launch_bounds__(THREADS)
    control_drafts(const i64* rows, const i64* rooms, const i64* reaches, const i64* starts, const i64* counts,
                   const i64* newest, const i64* last, const i64* tokens, i64* constraints, const i64 (*successors)[2],
                   const int4* outputs, const i64* limit, i64* step, int4* ring, volatile i64* words, int num_rows,
                   int units, int scratch, int low, int high) {
  const i64 now = *step;
  bool ends = false, any = false;
  publish(outputs, ring, now, units);
  for (int i = threadIdx.x; i < num_rows; i += THREADS) {
    const i64 row = rows[i], count = counts[i];
    if (row == scratch || !count) continue;
    any = true;
    i64 constraint = constraints[i], token = 0;
    for (i64 t = 0; t < count; t++) token = tokens[starts[i] + t], constraint = successor(successors, constraint, token);
    constraints[i] = constraint;
    ends |= row_ends(newest[row], last[row], rooms[i], reaches[i], token);
  }
  __threadfence_system();
  any = __syncthreads_or(any);
  ends = __syncthreads_or(ends) || !any;
  if (threadIdx.x == 0) decide(ends, now, limit, step, words, low, high);
}
