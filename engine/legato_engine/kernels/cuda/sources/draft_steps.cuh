// Draft tokens around a step: how many each row may have, where they lie, and which were right. S rows of a launch, B
// tokens of its largest batch, R rows of the state, C positions, MOST_DRAFTS draft tokens of a row at most. A row's
// tokens are adjacent: the newest, then its draft tokens.
//
// Functions are called by `threads` threads of a block together, whole warps; SYNC() is their barrier.
#pragma once
#include "common.cuh"

#include "block_policy.cuh"

constexpr int UNDER_PRESSURE = 1, EXACT = 2;  // of a launch

// A launch's rows by index: of the state, the most draft tokens that each has pages for (-1: it must not draft), the end
// of the positions that it may write, and, once they are placed, its first token and their number.
struct DraftRows {
  const i64 *row, *room, *reach;
  i64 *start, *fed;
};

// By row of the state: history [R, C], the newest position and the last one to feed, drafts [R, MOST_DRAFTS], requests.
struct DraftHistory {
  i64 *tokens, *newest;
  const i64* last;
  i64 *drafts, *row_token;
  RequestDescriptor* requests;
};

// The fields of each token of a step.
struct PlacedTokens {
  i64 *row, *lane, *source, *token, *position, *first, *sample_row, *sample, *scheduled;
};

// By row of a launch, for the host: counts of returned and of fed draft tokens, descriptors.
struct DraftOutputs {
  i64 *returned, *proposed;
  RequestDescriptor* learnt;
};

// Block sizes [S], and the longest of them to all threads' `longest`, which is 0 before. With `exact` rows draft as many
// tokens as they have room for. `all` is for the BUDGET rule alone.
__device__ inline void allot_rows(const DraftRows& rows, const DraftHistory& state, const Rule& rule, const Counts& overall,
                                  const double* step_seconds, i64* blocks, int num_rows, int scratch, bool exact,
                                  bool under_pressure, Candidate* candidates, Auction* all, int* longest, int thread,
                                  int threads) {
  for (int i = thread; i < num_rows; i += threads) {
    const i64 row = rows.row[i], left = state.last[row] - state.newest[row];
    const bool drafts = !exact && row != scratch && rows.room[i] >= 0 && left >= 0;
    candidates[i].row = (int)row;
    candidates[i].most = drafts ? (int)min(rows.room[i], left) : -1;
  }
  SYNC();
  allot(state.requests, rule, overall, step_seconds, candidates, num_rows, under_pressure, all, thread, threads);
  for (int i = thread; i < num_rows; i += threads) {
    const int most = candidates[i].most;
    int block = most < 0 ? 0 : min(state.requests[candidates[i].row].current_block_size, most);
    if (exact) block = max((int)rows.room[i], 0);
    blocks[i] = block;
    atomicMax(longest, block);
  }
  SYNC();
}

// The tokens of a launch: each row's newest and the known ones of its block; others, up to `max_tokens`, are padding.
// `sample` is the position of the token sampled from each, `scheduled` its row in the launch. Returns their number; all
// threads add theirs to `groups`: of up to `group` tokens of one row. With `exact` whole blocks are fed, whatever was
// drafted. `sums` has a word for each warp.
__device__ inline int place_rows(const DraftRows& rows, const DraftHistory& state, const i64* blocks,
                                 const PlacedTokens& to, int num_rows, int max_tokens, int scratch, bool exact, int group,
                                 int* sums, int* groups, int thread, int threads) {
  const int warp = thread / 32, lane = thread % 32;
  int placed = 0;
  for (int base = 0; base < num_rows; base += threads) {
    const int i = base + thread;
    const i64 row = i < num_rows ? rows.row[i] : scratch, first = state.newest[row];
    const i64* drafts = state.drafts + row * MOST_DRAFTS;
    int num = 0;
    if (row != scratch && first <= state.last[row]) {
      const int most = (int)min(blocks[i], state.last[row] - first);
      while (num < most && (exact || (drafts[num] >= 0 && drafts[num] < VOCAB))) num++;
      num++;
    }
    int through = num;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    if (lane == 31) sums[warp] = through;
    SYNC();
    int begin = placed + through - num;
    for (int w = 0; w < threads / 32; w++) {
      if (w < warp) begin += sums[w];
      placed += sums[w];
    }
    if (i < num_rows) rows.start[i] = begin, rows.fed[i] = num;
    if (num) atomicAdd(groups, (num + group - 1) / group);
    for (int j = 0; j < num; j++) {
      const int b = begin + j;
      to.row[b] = to.sample_row[b] = row;
      to.lane[b] = j, to.scheduled[b] = i;
      to.source[b] = j ? -1 : row;
      to.token[b] = j && !exact ? drafts[j - 1] : 0;
      to.position[b] = first + j, to.first[b] = first, to.sample[b] = first + j + 1;
    }
    SYNC();
  }
  for (int b = placed + thread; b < max_tokens; b += threads) {
    to.row[b] = to.sample_row[b] = scratch;
    to.lane[b] = to.scheduled[b] = to.token[b] = to.position[b] = to.sample[b] = 0;
    to.source[b] = -1, to.first[b] = 1;
  }
  return placed;
}

template <class Sampled>
__device__ __forceinline__ int num_accepted(const i64* drafts, const Sampled* sampled, i64 row, int start, int num_drafts) {
  int accepted = 0;
  while (accepted < num_drafts && sampled[start + accepted] == drafts[row * MOST_DRAFTS + accepted]) accepted++;
  return accepted;
}

// Accepts row i's sampled tokens up to and including the first that was not drafted; its history, newest position and
// token, and descriptor learn of them. Returns how many draft tokens were right, or -1 if it had no token to feed.
template <class Sampled>
__device__ __forceinline__ int settle_row(const DraftRows& rows, const DraftHistory& state, const i64* samples,
                                          const Sampled* sampled, const Rule& rule, const DraftOutputs& to, int i,
                                          int context, int scratch, int thread) {
  const i64 row = rows.row[i];
  if (row == scratch || !rows.fed[i]) {
    if (thread == 0) to.returned[i] = to.proposed[i] = 0, to.learnt[i] = state.requests[row];
    return -1;
  }
  const int start = (int)rows.start[i], num_drafts = (int)rows.fed[i] - 1;
  const int accepted = num_accepted(state.drafts, sampled, row, start, num_drafts);
  if (thread <= accepted) state.tokens[row * context + samples[start + thread]] = sampled[start + thread];
  if (thread == 0) {
    const i64 token = sampled[start + accepted];
    state.newest[row] = samples[start + accepted];
    state.row_token[row] = token < 0 ? 0 : token;
    to.returned[i] = accepted + 1;
    to.proposed[i] = num_drafts;
    if (rows.room[i] >= 0) update(state.requests[row], rule, accepted, num_drafts);
    to.learnt[i] = state.requests[row];
  }
  return accepted;
}
