// The control step of a decode loop, as specified by kernels/decode_loop.py; one thread block.
#include "decode_loop.cuh"

typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(cudaGraphConditionalHandle handle,
                                                                      unsigned int value);

constexpr int THREADS = 128;

// `ring` [steps, units] and `words` (steps done; whether to stop) are page-locked memory of the host, which reads
// a step's `outputs` there once `words[0]` counts it. After token `successors[c][0]`, or any, constraint c becomes
// `successors[c][1]`. The 64-bit handle of the WHILE node passes as two int32.
extern "C" __global__ void __launch_bounds__(THREADS)
    control(const i64* rows, i64* positions, i64* firsts, i64* samples, const i64* tokens, i64* constraints,
            const i64 (*successors)[2], const int4* outputs, const i64* limit, i64* step, int4* ring,
            volatile i64* words, int batch, int units, int scratch, int low, int high) {
  const i64 now = *step;
  bool broken = false;
  for (int at = threadIdx.x; at < units; at += THREADS) ring[now * units + at] = outputs[at];
  for (int b = threadIdx.x; b < batch; b += THREADS) {
    const i64 token = tokens[b];
    constraints[b] = successor(successors, constraints[b], token);
    if (rows[b] == scratch) continue;
    positions[b]++, firsts[b]++, samples[b]++;
    broken |= token < 0;
  }
  __threadfence_system();
  broken = __syncthreads_or(broken);
  if (threadIdx.x) return;
  *step = now + 1;
  publish_count(words, now + 1);
  const auto handle = (cudaGraphConditionalHandle)(unsigned)high << 32 | (unsigned)low;
  cudaGraphSetConditional(handle, follows(broken, now + 1, *limit, stop_wished(words)));
}
