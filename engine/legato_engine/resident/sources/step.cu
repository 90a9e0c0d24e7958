// Decode steps as one launch: every thread block runs its worker's instructions, step after step.
#include "output.cuh"
#include "producer.cuh"
#include "residual.cuh"

__device__ __forceinline__ void note_time(const Arguments& a, const Place& at, int which) {
  if (a.profile == nullptr || threadIdx.x) return;
  const i64 index = ((i64)blockIdx.x * a.steps + at.step) * a.count + at.index;
  a.profile[index * 3 + which] = clock64();
}

__device__ __forceinline__ void compute(const Arguments& a, Shared& shared) {
  Ring ring{shared};
  Place at;
  Held held;
  Sums sums;
  const Instruction* table = instructions(shared);
  for (at.step = 0; at.step < a.steps; at.step++)
    for (at.index = 0; at.index < a.count; at.index++) {
      const Instruction it = table[at.index];
      note_time(a, at, 0);
      if (it.wait != NONE) wait_passed(shared, at);
      note_time(a, at, 1);
      switch (it.op) {
        case OP_NORM: run_norm(a, shared, held, it); break;
        case OP_FC1: run_fc1(a, at, shared, ring, held, it); break;
        case OP_QKV: run_qkv(a, at, shared, ring, held, it); break;
        case OP_FC2: run_fc2(a, at, ring, sums, it); break;
        case OP_ATTEND: run_attend(a, at, shared, ring, it); break;
        case OP_OUT: run_out(a, at, shared, ring, sums, it); break;
        case OP_HEAD: run_head(a, at, shared, ring, held, it); break;
        case OP_SELECT: run_select(a, at, shared); break;
      }
      if (it.signal != NONE)
        telling_sync();
      else if (it.op != OP_FC2 && it.op != OP_NORM)
        workers_sync();
      note_time(a, at, 2);
    }
}

// Warps of the first two warpgroups compute; of the third each has a task of its own. Registers go from these to
// those.
constexpr int ALL_THREADS = THREADS + 128;

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) steps(
    const Instruction* table, u32* counters, u32* abort, int* report, const bf16* weights, const float2* folded,
    const float2* head_folded, const float* out_bias, const bf16* embedding, bf16* x0, bf16* x1, bf16* act, bf16* q,
    bf16* heads, float* part, float2* ends, uint2* best, bf16* keys, bf16* values, const int* pages,
    const int* position, const float* cosines, const float* sines, const int* first_token, int* tokens, float* logits,
    bf16* trace, i64* profile, int count, int stream_stages, int layer_pages, int row_pages, int rows, int num_steps,
    int patience_ms) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Arguments a = {table, counters, abort, report, weights, folded, head_folded, out_bias, embedding, x0, x1, act,
                       q, heads, part, ends, best, keys, values, pages, position, cosines, sines, first_token, tokens,
                       logits, trace, profile, count, stream_stages, layer_pages, row_pages, rows, num_steps,
                       patience_ms};
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; i++) barrier_init(shared.full + i, 1), barrier_init(shared.empty + i, WARPS);
    barriers_ready();
    shared.passed = 0;
  }
  for (int i = threadIdx.x; i < rows; i += blockDim.x) shared.token[i] = first_token[i], shared.position[i] = position[i];
  for (int i = threadIdx.x; i < count * 4; i += blockDim.x)
    reinterpret_cast<int4*>(instructions(shared))[i] = reinterpret_cast<const int4*>(table + blockIdx.x * count)[i];
  for (int i = threadIdx.x; i < rows * OWN_PAGES; i += blockDim.x) {
    const Unit unit(i / OWN_PAGES, rows);
    const int page = unit.quarter + i % OWN_PAGES * SPLITS;
    shared.pages[i / OWN_PAGES][i % OWN_PAGES] = page < row_pages ? pages[unit.row * row_pages + page] : 0;
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < WARPS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    compute(a, shared);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp < WARPS + PRODUCERS) produce(a, shared, warp - WARPS);
    if (warp == WARPS + PRODUCERS && threadIdx.x % 32 == 0) watch(a, shared);
    if (warp == WARPS + PRODUCERS + 1) tell(a, shared);
  }
}
