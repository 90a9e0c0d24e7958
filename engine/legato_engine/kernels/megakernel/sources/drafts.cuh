// Several tokens of a row in a step. SETTLE verifies draft tokens and proposes the next, PLACE decides how many of them the
// next step feeds, and COMMIT copies the result to shared memory. The first step's tokens are placed before the launch, by the
// kernels of kernels/cuda/drafting.py: the same functions on the same memory.
#pragma once
#include "commit.cuh"

#if !DRAFTS
__device__ __forceinline__ void run_drafts(const Instruction&, int) {}
#else
#define SYNC() workers_sync()
#define ROWS TOKENS
#include "draft_steps.cuh"
#include "ngram_lookup.cuh"
#include "units.cuh"

// Inputs and outputs of a step's end, in device memory except for the host's ring.
struct Drafting {
  DraftRows rows;
  i64* constraint;  // by row of the launch
  PlacedTokens placed;
  DraftHistory state;
  const Rule* rule;
  Counts* overall;
  const double* step_seconds;
  i64* blocks;
  DraftOutputs out;
  volatile i64 *returned_ring, *proposed_ring, *learnt_ring;  // at the stride of tokens
  i64 scratch, context, max_tokens, shortest, longest;
  int* follows;  // whether a step follows
};

__device__ __forceinline__ bool aborted(const DraftArguments& a) { return load_relaxed(a.abort) != 0; }

// Find whether any row of the launch is drawn; by one warp.
__device__ __forceinline__ void take_draws(const DraftArguments& a, Shared& shared) {
  const int lane = (int)kept_lane();
  const i64 row = lane < a.rows ? a.drafting->rows.row[lane] : a.drafting->scratch;
  const bool any = __any_sync(~0u, row != a.drafting->scratch && a.row_temperature[row] > GREEDY_TEMPERATURE);
  if (lane == 0) shared.draws = any;
}

// Read the placed tokens, which padding follows; by one warp.
__device__ __forceinline__ void take_tokens(const DraftArguments& a, Shared& shared) {
  const Drafting& d = *a.drafting;
  const int lane = (int)kept_lane();
  const bool within = lane < TOKENS && lane < d.max_tokens;
  const i64 row = within ? load_fresh_i64(d.placed.row + lane) : d.scratch;
  const bool live = row != d.scratch;
  float temperature = 0.f;
  if (live) {
    const i64 source = load_fresh_i64(d.placed.source + lane), drafted = load_fresh_i64(d.placed.token + lane);
    const i64 index = load_fresh_i64(d.placed.scheduled + lane);
    const i64 position = load_fresh_i64(d.placed.position + lane), first = load_fresh_i64(d.placed.first + lane);
    temperature = a.row_temperature[row];
    shared.row[lane] = (int)row, shared.position[lane] = (int)position, shared.first[lane] = (int)first;
    shared.token[lane] = (int)(source < 0 ? drafted : load_fresh_i64(d.state.row_token + row));
    shared.constraint[lane] = (int)load_fresh_i64(d.constraint + index);
    if (VALUES) {  // draft tokens have none
      const float2 payload = source < 0 ? float2{0.f, 0.f} : load_fresh_float2(a.row_payload + row);
      shared.value[lane] = float4{payload.x, payload.y, 1.f, 1.f};
    }
  }
  const u32 all = __ballot_sync(~0u, live), drawn = __ballot_sync(~0u, live && temperature > GREEDY_TEMPERATURE);
  if (lane == 0) shared.count = __popc(all), shared.drawn = drawn, shared.kept = VALUES ? ~0u : drawn;
  // A unit begins with a row's tokens, and after a full one.
  const i64 before = __shfl_up_sync(~0u, row, 1);
  const u32 rows = __ballot_sync(~0u, live && (lane == 0 || before != row));
  const int first = 31 - __clz(rows & (2u << lane) - 1);
  const u32 units = __ballot_sync(~0u, live && (lane - first) % UNIT_TOKENS == 0);
  const u32 later = units & ~((2u << lane) - 1);
  const int end = later ? __ffs(later) - 1 : __popc(all);
  if (units >> lane & 1) shared.unit[__popc(units & (1u << lane) - 1)] = packed(Unit{lane, end - lane, 0});
  if (lane == 0) shared.num_units = __popc(units);
  if (lane == 0 && !units) shared.unit[0] = packed(Unit{0, 1, 0});  // is prefetched
}

// Pages of the units; `take_tokens` came before.
__device__ __forceinline__ void stage_kv(const DraftArguments& a, Shared& shared, int thread, int threads) {
  for (int i = thread; i < shared.num_units * OWN_PAGES; i += threads) {
    const i64 row = shared.row[unit_of(shared, i / OWN_PAGES).token];
    const int page = blockIdx.x % SPLITS + i % OWN_PAGES * SPLITS;
    shared.pages[i / OWN_PAGES][i % OWN_PAGES] = page < a.row_pages ? (int)a.pages[row * a.row_pages + page] : 0;
  }
}

// After a wait that was given up nothing is what it should be: rows stay as they were.
__device__ __forceinline__ void stage_spec_verify(const DraftArguments& a, Shared& shared, int first, int count) {
  const Drafting& d = *a.drafting;
  if (aborted(a)) return;
  for (int k = 0; k < count; k++) {
    const int i = first + k * WORKERS;
    if (i >= a.rows) break;
    const int fed = (int)load_fresh_i64(d.rows.fed + i), start = (int)load_fresh_i64(d.rows.start + i);
    const int accepted = settle_row(
        d.rows, d.state, d.placed.sample, a.token, *d.rule, d.out, i, (int)d.context, (int)d.scratch, threadIdx.x);
    __syncwarp();
    workers_sync();
    if (accepted < 0) continue;
    const i64 row = d.rows.row[i];
    if (threadIdx.x == 0) {
      i64 constraint = d.constraint[i];
      for (int t = start; t <= start + accepted; t++) constraint = successor(a.successors, constraint, a.token[t]);
      d.constraint[i] = constraint;
      if (VALUES) {
        const float4 value = load_fresh_float4(a.value + start + accepted);
        a.row_payload[row] = float2{value.x, value.y};
      }
    }
    if (d.rows.room[i] > 0)
      look_up(d.state.tokens + row * d.context, (int)load_fresh_i64(d.state.newest + row), d.state.drafts + row * MOST_DRAFTS,
              (int)d.context, MOST_DRAFTS, (int)d.shortest, (int)d.longest, shared.sums_of_warps, threadIdx.x, THREADS);
    __syncwarp();
    workers_sync();  // before the next row's
  }
}

__device__ __forceinline__ void run_place(const DraftArguments& a, Shared& shared, int step) {
  const Drafting& d = *a.drafting;
  Candidate* candidates = reinterpret_cast<Candidate*>(&shared.sums[0][0][0][0]);
  Auction* auction = reinterpret_cast<Auction*>(candidates + TOKENS);
  static_assert(sizeof(Candidate) * TOKENS + sizeof(Auction) <= sizeof(shared.sums), "an auction in place of sums");
  static_assert(sizeof(Candidate) * TOKENS % 8 == 0, "an auction is of doubles");
  if (aborted(a)) return;
  const int thread = threadIdx.x, scratch = (int)d.scratch;
  if (thread < 32) {
    bool any = false, ends = false;
    if (thread < a.rows && d.rows.row[thread] != scratch && load_fresh_i64(d.out.returned + thread)) {
      const i64 row = d.rows.row[thread], count = load_fresh_i64(d.out.returned + thread);
      const i64 token = (int)load_fresh_u32(a.token + d.rows.start[thread] + count - 1);
      any = true;
      ends = row_ends(load_fresh_i64(d.state.newest + row), d.state.last[row], d.rows.room[thread], d.rows.reach[thread], token);
    }
    any = __any_sync(~0u, any), ends = __any_sync(~0u, ends) || !any;
    const bool goes_on = follows(ends, step + 1, a.steps, load_fresh_u32(a.stop) != 0);
    if (thread == 0) *d.follows = goes_on, shared.longest = shared.groups = 0, shared.goes_on = goes_on;
    if (RULE == BUDGET && thread == 0) {  // in the order of the launch
      Counts all = *d.overall;
      for (int i = 0; i < a.rows; i++) {
        const int returned = (int)load_fresh_i64(d.out.returned + i);
        if (returned && d.rows.room[i] >= 0) count(all, *d.rule, returned - 1, (int)load_fresh_i64(d.out.proposed + i));
      }
      *d.overall = all;
    }
  }
  __syncwarp();
  workers_sync();
  if (!shared.goes_on) return;
  allot_rows(d.rows, d.state, *d.rule, *d.overall, d.step_seconds, d.blocks, a.rows, scratch, false,
             false, candidates, auction, &shared.longest, thread, THREADS);
  __syncwarp();
  place_rows(d.rows, d.state, d.blocks, d.placed, a.rows, min(TOKENS, (int)d.max_tokens), scratch, false, 1,
             shared.sums_of_warps, &shared.groups, thread, THREADS);
}

__device__ __forceinline__ void stage_commit(const DraftArguments& a, Shared& shared, int step) {
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x, fed = shared.count;
    const bool gone = aborted(a), goes_on = !gone && load_fresh_u32(a.drafting->follows) != 0;
    if (lane < fed) shared.chosen[lane] = (int)load_fresh_u32(a.token + lane);
    __syncwarp();
    if (goes_on) take_tokens(a, shared);
    if (lane == 0) shared.chosen_count = fed, shared.ended = gone ? ABORTED : goes_on ? GOES_ON : ENDED;
  }
  __syncwarp();
  workers_sync();
  if (shared.ended != GOES_ON) return;
  stage_kv(a, shared, threadIdx.x, THREADS);
  __syncwarp();
  workers_sync();
  if (threadIdx.x == 0) store_release_shared(&shared.placed, step + 2);
}

// A called function with few registers: inlined, it would make the other instructions spill.
__device__ __noinline__ void run_drafts(const Instruction& it, int step) {
  Shared& shared = worker_memory();
  switch (it.op) {
    case OP_SETTLE: stage_spec_verify(shared.drafts, shared, it.block, it.num_blocks); break;
    case OP_PLACE:
      if (it.num_blocks) run_place(shared.drafts, shared, step);
      break;
    case OP_COMMIT: stage_commit(shared.drafts, shared, step); break;
  }
}

// Publish a step's outputs by token and by row.
__device__ __forceinline__ void publish_drafts(const Arguments& a, const Shared& shared, int step) {
  const Drafting& d = *a.drafting;
  const int lane = threadIdx.x % 32;
  if (lane < shared.chosen_count) {
    publish_token(a.ring, a.ring_stride, step, lane, shared.chosen[lane]);
    if (VALUES) publish_value(a, step, lane, load_fresh_float4(a.value + lane));
  }
  if (lane >= a.rows) return;
  publish_token(d.returned_ring, a.ring_stride, step, lane, load_fresh_i64(d.out.returned + lane));
  publish_token(d.proposed_ring, a.ring_stride, step, lane, load_fresh_i64(d.out.proposed + lane));
  for (int word = 0; word < 4; word++)
    publish_token(d.learnt_ring, a.ring_stride, step, lane * 4 + word,
                  load_fresh_i64(reinterpret_cast<const i64*>(d.out.learnt + lane) + word));
}
#endif
