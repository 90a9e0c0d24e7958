// The launches around a forward that verifies draft tokens: see draft_steps.cuh. V vectors of 16 bytes.
#define SYNC() __syncthreads()
#include "draft_steps.cuh"

constexpr int THREADS = 256;

// Pages that begin, block sizes [S], and the index of the proposal to run. An EXACT launch drafts `rooms` tokens by the
// proposal `control[1]`.
extern "C" __global__ void __launch_bounds__(THREADS)
    allot_blocks(const i64* rows, const i64* rooms, const i64* control, const i64* entries, const i64* pages, i64* table,
                 i64* newest, const i64* last, RequestDescriptor* requests, const Rule* rules, const Counts* overall,
                 const double* step_seconds, const int* proposals, i64* blocks, int* proposal, int num_rows, int num_grown,
                 int scratch) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Candidate candidates[ROWS];
  __shared__ int longest;
  const int thread = threadIdx.x;
  const bool exact = control[0] & EXACT;
  const DraftRows launch = {rows, rooms, nullptr, nullptr, nullptr};
  const DraftHistory state = {nullptr, newest, last, nullptr, nullptr, requests};
  for (int i = thread; i < num_grown; i += THREADS) table[entries[i]] = pages[i];
  if (thread == 0) longest = 0;
  allot_rows(launch, state, *rules, *overall, step_seconds, blocks, num_rows, scratch, exact, control[0] & UNDER_PRESSURE,
             candidates, reinterpret_cast<Auction*>(memory), &longest, thread, THREADS);
  if (thread == 0) *proposal = exact ? (int)control[1] : proposals[longest];
}

// Places the tokens of a launch. `choices` [B + 1, 3] has the batch for a number of tokens and of groups of GROUP tokens
// of one row.
extern "C" __global__ void __launch_bounds__(THREADS)
    place(const i64* rows, const i64* control, const i64* blocks, i64* drafts, i64* newest, const i64* last, const int* choices,
          i64* token_rows, i64* lanes, i64* sources, i64* tokens, i64* positions, i64* firsts, i64* sample_rows,
          i64* samples, i64* scheduled, i64* starts, i64* counts, int* choice, int num_rows, int max_tokens, int scratch) {
  __shared__ int sums[THREADS / 32], groups;
  if (threadIdx.x == 0) groups = 0;
  __syncthreads();
  const DraftRows launch = {rows, nullptr, nullptr, starts, counts};
  const DraftHistory state = {nullptr, newest, last, drafts, nullptr, nullptr};
  const PlacedTokens to = {token_rows, lanes, sources, tokens, positions, firsts, sample_rows, samples, scheduled};
  const int placed = place_rows(launch, state, blocks, to, num_rows, max_tokens, scratch, control[0] & EXACT, GROUP, sums,
                                &groups, threadIdx.x, THREADS);
  if (threadIdx.x == 0) *choice = choices[placed * 3 + min(max(groups, 1), 3) - 1];
}

// Settles rows, a block each; the residual stream of each one's last token goes to the row.
extern "C" __global__ void __launch_bounds__(128)
    settle(const i64* rows, const i64* rooms, i64* starts, i64* counts, i64* drafts, const i64* samples,
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
  const DraftRows launch = {rows, rooms, nullptr, starts, counts};
  const DraftHistory state = {history, newest, nullptr, drafts, row_token, requests};
  const DraftOutputs to = {returned, proposed, learnt};
  const int accepted = settle_row(launch, state, samples, sampled, *rules, to, i, context, scratch, thread);
  if (accepted < 0) return;
  const i64 row = rows[i];
  for (int v = thread; v < vectors; v += 128)
    row_hidden[row * vectors + v] = hidden[(i64)(starts[i] + accepted) * vectors + v];
}
