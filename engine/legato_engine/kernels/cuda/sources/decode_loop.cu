// The control step of a decode loop, as specified by kernels/decode_loop.py; one thread block.
#include "decode_loop.cuh"

typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(cudaGraphConditionalHandle handle,
                                                                      unsigned int value);

constexpr int THREADS = 128;

// `ring` [steps, stride] and `words` (steps done; whether to stop) are page-locked memory of the host, which reads
// tokens once `words[0]` counts their step. The 64-bit handle of the WHILE node passes as two int32.
extern "C" __global__ void __launch_bounds__(THREADS)
    control(const i64* rows, i64* positions, i64* firsts, i64* samples, const i64* tokens, const i64* limit, i64* step,
            volatile i64* ring, volatile i64* words, int batch, int stride, int scratch, int low, int high) {
  const i64 now = *step;
  bool broken = false;
  for (int b = threadIdx.x; b < batch; b += THREADS) {
    const i64 token = tokens[b];
    publish_token(ring, stride, now, b, token);
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
