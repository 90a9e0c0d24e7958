// Decode steps as one launch: every thread block runs its worker's instructions, step after step.
#include "commit.cuh"
#include "output.cuh"
#include "loader.cuh"
#include "residual.cuh"
#include "values.cuh"

__device__ __forceinline__ void note_time(const Arguments& a, const Place& at, int which) {
  if (a.profile == nullptr || threadIdx.x) return;
  const i64 index = ((i64)blockIdx.x * a.steps + at.step) * a.count + at.index;
  a.profile[index * 3 + which] = clock64();
}

// Run the worker's instructions of every step until the loop ends.
__device__ __forceinline__ void stage_decode(const Arguments& a, Shared& shared) {
  Ring ring{shared};
  Place at;
  Sums sums;
  int added = 0;
  const Instruction* table = instructions(shared);
  for (at.step = 0; shared.ended == GOES_ON; at.step++)
    for (at.index = 0; at.index < a.count; at.index++) {
#if VALUES || DRAFTS || TILES > 1  // a copy in registers would spill
      const Instruction& it = table[at.index];
#else
      const Instruction it = table[at.index];
#endif
      dawdle(11);
      note_time(a, at, 0);
      if (waits(shared, it)) wait_passed(shared, at);
      note_time(a, at, 1);
      switch (it.op) {
        case OP_FC1: run_fc1(a, at, shared, ring, it); break;
        case OP_QKV: run_qkv(a, at, shared, ring, it); break;
        case OP_FC2: run_fc2(a, at, ring, sums, added, it); break;
        case OP_ATTEND: run_attend(a, at, shared, ring, it); break;
        case OP_MERGE: run_merge(a, shared); break;
        case OP_OUT: run_out(a, at, shared, ring, sums, added, it); break;
        case OP_LISTEN: run_listen(a, it); break;
        case OP_HEAD: run_head(a, at, shared, ring, it); break;
        case OP_WEIGH: run_weigh(a, at, shared); break;
        case OP_SAMPLE: run_sample(a, at, shared, it); break;
#if !DRAFTS
        case OP_COMMIT: stage_commit(a, at, shared); break;
#endif
        default:
          if (is_of_values(it)) run_values(it);
          if (is_of_drafts(it)) run_drafts(it, at.step);
      }
      if (it.signal != NONE || it.op == OP_COMMIT)
        signalling_sync();
      else if (it.op != OP_FC2 && it.op != OP_LISTEN)
        workers_sync();
      note_time(a, at, 2);
    }
}

#if !DRAFTS
// Copy this worker's part of the page table; the host allocates the pages.
__device__ __forceinline__ void stage_kv(Shared& shared, const i64* row, const i64* pages, int rows, int row_pages) {
  for (int i = threadIdx.x; i < rows * OWN_PAGES; i += blockDim.x) {
    const int page = blockIdx.x % SPLITS + i % OWN_PAGES * SPLITS;
    shared.pages[i / OWN_PAGES][i % OWN_PAGES] = page < row_pages ? (int)pages[row[i / OWN_PAGES] * row_pages + page] : 0;
  }
}
#endif

// Warps of the first two warpgroups compute; those of the third load, poll and signal, and give registers to the consumers.
constexpr int ALL_THREADS = THREADS + 128;

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) steps(
    const Instruction* table, u32* counters, u32* epoch, u32* abort, int* report, const bf16* weights,
    const float2* folded, const float2* head_folded, const float* out_bias, const bf16* embedding, bf16* x0, bf16* x1,
    bf16* act, bf16* q, float* part, float2* ends, bf16* heads, uint2* best, float* scores, uint4* shares, uint4* bests,
    int* token, int* stop,
    bf16* keys, bf16* values, const float* cosines, const float* sines, const i64* row, const i64* constraint,
    i64* position, const i64* sample_position, const i64* pages, i64* row_token, const float* row_temperature,
    const float* row_top_p, const i64* row_top_k, const i64* row_seed, const float* constraints, const i64 (*successors)[2], i64* ring, i64* words,
    float2* payload_ring, float2* certainty_ring, const bf16* scalar_frequencies, const bf16* scalar_encoder,
    const bf16* scalar_encoder_bias, const bf16* scalar_fc1, const bf16* scalar_fc1_bias,
    const bf16* scalar_fc2, const bf16* scalar_fc2_bias, const bf16* pair_frequencies, const bf16* pair_encoder,
    const bf16* pair_encoder_bias, const bf16* pair_fc1, const bf16* pair_fc1_bias, const bf16* pair_fc2,
    const bf16* pair_fc2_bias, float2* row_payload, bf16* inner, float* bins, float4* value, float* logits, bf16* trace,
    i64* profile, int count, int layers, int stream_stages, int layer_pages, int row_pages, int rows, int num_steps,
    int ring_stride, int patience_ms, int zero, const Drafting* drafting) {
  Shared& shared = worker_memory();
  const Arguments a = {table, counters, epoch, abort, report, weights, folded, head_folded, out_bias, embedding,
                       x0, x1, act, q, part, ends, heads, best, scores, token, stop, keys, values, cosines, sines,
                       row, constraint, sample_position, position, pages, row_token, row_temperature, row_top_p,
                       row_top_k, row_seed, constraints, successors, ring, words, payload_ring, certainty_ring,
                       row_payload, value, logits, trace, profile, count, layers, stream_stages,
                       layer_pages, row_pages, rows, num_steps, ring_stride, patience_ms, (u32)zero, drafting};
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; i++)
      barrier_init(shared.full + i, 1), barrier_init(shared.empty + i, WARPS), shared.begun[i] = 0;
    barriers_ready();
    shared.passed = 0, shared.ended = GOES_ON, shared.epoch = *epoch;
  }
  if (threadIdx.x == 64) shared.draw = {scores, row_temperature, row_top_p, row_top_k, row_seed, sample_position, best, {shares, bests}};
  if (VALUES && threadIdx.x == 32)
    shared.values = {{scalar_frequencies, scalar_encoder, scalar_encoder_bias, scalar_fc1, scalar_fc1_bias, scalar_fc2,
                      scalar_fc2_bias},
                     {pair_frequencies, pair_encoder, pair_encoder_bias, pair_fc1, pair_fc1_bias, pair_fc2,
                      pair_fc2_bias},
                     embedding, x0, x1, token, scores, inner, bins, value, rows};
#if DRAFTS
  const DraftArguments drafts = {drafting, abort, token, stop, successors, row_temperature, value, row_payload, pages, row_pages, rows, num_steps};
  if (threadIdx.x == 0) shared.placed = 1, shared.drafts = drafts;
  if (threadIdx.x < 32) take_draws(drafts, shared), take_tokens(drafts, shared);
#else
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    const i64 mine = lane < rows ? row[lane] : 0;
    if (lane < rows) {
      shared.row[lane] = (int)mine, shared.constraint[lane] = (int)constraint[lane];
      shared.token[lane] = (int)row_token[mine], shared.position[lane] = (int)position[lane];
      if (VALUES) shared.value[lane] = float4{row_payload[mine].x, row_payload[mine].y, 1.f, 1.f};
    }
    const u32 drawn = __ballot_sync(~0u, lane < rows && row_temperature[mine] > GREEDY_TEMPERATURE);
    if (lane == 0) shared.drawn = drawn, shared.kept = VALUES ? ~0u : drawn, shared.draws = drawn != 0;
  }
#endif
  for (int i = threadIdx.x; i < count * 2; i += blockDim.x)
    reinterpret_cast<int4*>(instructions(shared))[i] = reinterpret_cast<const int4*>(table + blockIdx.x * count)[i];
#if DRAFTS
  __syncthreads();
  stage_kv(drafts, shared, threadIdx.x, blockDim.x);
#else
  stage_kv(shared, row, pages, rows, row_pages);
  __syncthreads();
  if (threadIdx.x < 32) find_units(shared, rows);
#endif
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < WARPS) {
    take_registers<224>();
    stage_decode(a, shared);
  } else {
    give_registers<56>();
    if (warp < WARPS + LOADERS) {
      if (elected()) load_stages(a, shared, warp - WARPS);
      finish_copies(shared);
    }
    if (warp == WARPS + LOADERS && threadIdx.x % 32 == 0) poll_counters(a, shared);
    if (warp == WARPS + LOADERS + 1) signal_counters(a, shared);
  }
}
