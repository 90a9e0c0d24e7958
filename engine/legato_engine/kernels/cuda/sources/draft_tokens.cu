// S rows of a launch, B tokens of its largest batch, R rows of the state, C positions, V vectors of 16 bytes, BLOCK
// draft tokens of a row at most. A row's tokens are adjacent: the newest, then its draft tokens.
#include "common.cuh"

#define SYNC() __syncthreads()
#include "block_policy.cuh"

constexpr int THREADS = 256;
constexpr int UNDER_PRESSURE = 1, EXACT = 2;  // of a launch

// Pages that begin, block sizes [S], and the index of the proposal to run. `rooms` are the most draft tokens that a row
// has pages for, or -1 if it must not draft. An EXACT launch drafts `rooms` tokens by the proposal `control[1]`.
extern "C" __global__ void __launch_bounds__(THREADS)
    allot_blocks(const i64* rows, const i64* rooms, const i64* control, const i64* entries, const i64* pages, i64* table,
                 const i64* newest, const i64* last, RequestDescriptor* requests, const Rule* rules, const Counts* overall,
                 const double* step_seconds, const int* proposals, i64* blocks, int* proposal, int num_rows, int num_grown,
                 int scratch) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Candidate candidates[ROWS];
  __shared__ int longest;
  const int thread = threadIdx.x;
  const bool exact = control[0] & EXACT;
  for (int i = thread; i < num_grown; i += THREADS) table[entries[i]] = pages[i];
  for (int i = thread; i < num_rows; i += THREADS) {
    const i64 row = rows[i];
    const bool drafts = !exact && row != scratch && rooms[i] >= 0 && newest[row] <= last[row];
    candidates[i].row = (int)row;
    candidates[i].most = drafts ? (int)min(rooms[i], last[row] - newest[row]) : -1;
  }
  if (thread == 0) longest = 0;
  __syncthreads();
  allot(requests, *rules, *overall, step_seconds, candidates, num_rows, control[0] & UNDER_PRESSURE,
        reinterpret_cast<Auction*>(memory), thread, THREADS);
  for (int i = thread; i < num_rows; i += THREADS) {
    const int most = candidates[i].most;
    int block = most < 0 ? 0 : min(requests[candidates[i].row].current_block_size, most);
    if (exact) block = max((int)rooms[i], 0);
    blocks[i] = block;
    atomicMax(&longest, block);
  }
  __syncthreads();
  if (thread == 0) *proposal = exact ? (int)control[1] : proposals[longest];
}

// The tokens of a launch: each row's newest and the known ones of its block, from drafts [R, BLOCK]; others are padding.
// `samples` is the position of the token sampled from each, `scheduled` its row in the launch; starts and counts [S] are
// a row's first token and their number. `choices` [B + 1, 3] has the batch for a number of tokens and of groups of
// GROUP tokens of one row. An EXACT launch feeds whole blocks, whatever was drafted.
extern "C" __global__ void __launch_bounds__(THREADS)
    place(const i64* rows, const i64* control, const i64* blocks, const i64* drafts, const i64* newest, const i64* last, const int* choices,
          i64* token_rows, i64* lanes, i64* sources, i64* tokens, i64* positions, i64* firsts, i64* sample_rows,
          i64* samples, i64* scheduled, i64* starts, i64* counts, int* choice, int num_rows, int max_tokens, int scratch) {
  __shared__ int sums[THREADS / 32], groups;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const bool exact = control[0] & EXACT;
  int placed = 0;
  if (thread == 0) groups = 0;
  for (int base = 0; base < num_rows; base += THREADS) {
    const int i = base + thread;
    const i64 row = i < num_rows ? rows[i] : scratch, first = newest[row];
    int num = 0;
    if (row != scratch && first <= last[row]) {
      const int most = (int)min(blocks[i], last[row] - first);
      while (num < most && (exact || (drafts[row * BLOCK + num] >= 0 && drafts[row * BLOCK + num] < VOCAB))) num++;
      num++;
    }
    int through = num;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    int begin = placed + through - num;
    for (int w = 0; w < THREADS / 32; w++) {
      if (w < warp) begin += sums[w];
      placed += sums[w];
    }
    if (i < num_rows) starts[i] = begin, counts[i] = num;
    if (num) atomicAdd(&groups, (num + GROUP - 1) / GROUP);
    for (int j = 0; j < num; j++) {
      const int b = begin + j;
      token_rows[b] = sample_rows[b] = row;
      lanes[b] = j, scheduled[b] = i;
      sources[b] = j ? -1 : row;
      tokens[b] = j && !exact ? drafts[row * BLOCK + j - 1] : 0;
      positions[b] = first + j, firsts[b] = first, samples[b] = first + j + 1;
    }
    __syncthreads();
  }
  for (int b = placed + thread; b < max_tokens; b += THREADS) {
    token_rows[b] = sample_rows[b] = scratch;
    lanes[b] = scheduled[b] = tokens[b] = positions[b] = samples[b] = 0;
    sources[b] = -1, firsts[b] = 1;
  }
  if (thread == 0) *choice = choices[placed * 3 + min(max(groups, 1), 3) - 1];
}

__device__ __forceinline__ int num_accepted(const i64* drafts, const i64* sampled, i64 row, int start, int num_drafts) {
  int accepted = 0;
  while (accepted < num_drafts && sampled[start + accepted] == drafts[row * BLOCK + accepted]) accepted++;
  return accepted;
}

// Accepts a row's sampled tokens up to and including the first that was not drafted, to history [R, C]; the last one's
// position, token and residual stream go to the row, and its descriptor learns. Returned and proposed counts and
// descriptors [S] are outputs. A block is a row.
extern "C" __global__ void __launch_bounds__(128)
    settle(const i64* rows, const i64* rooms, const i64* starts, const i64* counts, const i64* drafts, const i64* samples,
           const i64* sampled, const uint4* hidden, i64* history, i64* newest, i64* row_token, uint4* row_hidden,
           RequestDescriptor* requests, const Rule* rules, Counts* overall, i64* returned, i64* proposed,
           RequestDescriptor* learnt, int num_rows, int context, int vectors, int scratch) {
  __shared__ int accepted_of[ROWS];
  const int i = blockIdx.x, thread = threadIdx.x;
  if (RULE == BUDGET && i == 0) {  // in the order of the launch
    for (int r = thread; r < num_rows; r += 128)
      if (rows[r] != scratch && counts[r])
        accepted_of[r] = num_accepted(drafts, sampled, rows[r], (int)starts[r], (int)counts[r] - 1);
    __syncthreads();
    if (thread == 0) {
      Counts all = *overall;
      for (int r = 0; r < num_rows; r++)
        if (rows[r] != scratch && counts[r] && rooms[r] >= 0) count(all, *rules, accepted_of[r], (int)counts[r] - 1);
      *overall = all;
    }
  }
  const i64 row = rows[i];
  if (row == scratch || !counts[i]) {
    if (thread == 0) returned[i] = proposed[i] = 0, learnt[i] = requests[row];
    return;
  }
  const int start = (int)starts[i], num_drafts = (int)counts[i] - 1;
  const int accepted = num_accepted(drafts, sampled, row, start, num_drafts);
  if (thread <= accepted) history[row * context + samples[start + thread]] = sampled[start + thread];
  if (thread == 0) {
    const i64 token = sampled[start + accepted];
    newest[row] = samples[start + accepted];
    row_token[row] = token < 0 ? 0 : token;
    returned[i] = accepted + 1;
    proposed[i] = num_drafts;
    if (rooms[i] >= 0) update(requests[row], *rules, accepted, num_drafts);
    learnt[i] = requests[row];
  }
  for (int v = thread; v < vectors; v += 128)
    row_hidden[row * vectors + v] = hidden[(i64)(start + accepted) * vectors + v];
}
