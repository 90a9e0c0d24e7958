// The block policies of speculation.py, bit for bit: the `_rn` functions
// round once and are never fused.
//
// RULE is FIXED, ADAPTIVE or BUDGET; ROWS are the most rows of a launch, MOST_DRAFTS the most draft tokens of one. A function
// with `thread` is called by `threads` threads together; SYNC() is their barrier.
#pragma once

constexpr int FIXED = 0, ADAPTIVE = 1, BUDGET = 2;
constexpr int KV_PRESSURE = 1, STARTS = 2, VERIFIED = 4;  // flags: the last two before the first proposal, and after it

struct RequestDescriptor {
  double accepted_weight, tried_weight;  // tokens, older ones weighted less
  float ema_acceptance_rate;
  int current_block_size;
  int idle_steps;  // verifications without draft tokens in a row, at most PROBE_EVERY
  int flags;
};
static_assert(sizeof(RequestDescriptor) == 32, "four of the host's int64");

struct Rule {  // constants; those of FIXED and ADAPTIVE are float32
  double alpha, kept, high, low;
  double decay, prior_weight, common_decay, better, longer;
  double propose;  // seconds of one more token in the longest block
};

struct Counts {  // of all requests, older ones weighted less
  double accepted_weight, tried_weight;
};

// One row of a launch: at most `most` draft tokens, or -1 if it must not draft and has no policy.
struct Candidate {
  int row, most;
};

struct Auction {  // draft tokens by candidate and depth, then in the order of their gains
  double gain[ROWS * MOST_DRAFTS], committed[ROWS * MOST_DRAFTS], seconds[ROWS * MOST_DRAFTS], speed[ROWS * MOST_DRAFTS];
  unsigned short rank[ROWS * MOST_DRAFTS], longest[ROWS * MOST_DRAFTS];
  int num_rows, num_tokens, best_count;
};

__device__ __forceinline__ int capped(int block, int flags) {
  return flags & KV_PRESSURE && block > PRESSURE_BLOCK ? PRESSURE_BLOCK : block;
}

__device__ __forceinline__ int adaptive_size(const RequestDescriptor& request, const Rule& rule) {
  const float average = request.ema_acceptance_rate;
  const int block = average >= (float)rule.high ? MOST_DRAFTS : average >= (float)rule.low ? MID_BLOCK : MIN_BLOCK;
  return capped(block, request.flags);
}

__device__ __forceinline__ void begin(RequestDescriptor& request, const Rule& rule, const Counts& overall) {
  if (RULE == FIXED) request.current_block_size = MOST_DRAFTS;
  if (RULE == ADAPTIVE) {
    const bool verified = request.flags & VERIFIED;
    request.current_block_size = verified ? adaptive_size(request, rule) : capped(FIRST_BLOCK, request.flags);
  }
  if (RULE == BUDGET && request.tried_weight == 0.0) {
    request.tried_weight = rule.prior_weight;
    const double rate = __ddiv_rn(overall.accepted_weight, overall.tried_weight);
    request.accepted_weight = __dmul_rn(rate, rule.prior_weight);
  }
  request.flags &= ~STARTS;
}

// After a verification of `proposed` draft tokens.
__device__ __forceinline__ void update(RequestDescriptor& request, const Rule& rule, int accepted, int proposed) {
  if (proposed)
    request.idle_steps = 0;
  else if (request.idle_steps < PROBE_EVERY)
    request.idle_steps++;
  request.flags |= VERIFIED;
  if (RULE != BUDGET) {
    const float rate = proposed ? __fdiv_rn((float)accepted, (float)proposed) : 0.f;
    const float kept = __fmul_rn((float)rule.kept, request.ema_acceptance_rate);
    request.ema_acceptance_rate = __fadd_rn(__fmul_rn((float)rule.alpha, rate), kept);
  }
  if (RULE == ADAPTIVE) request.current_block_size = adaptive_size(request, rule);
  if (RULE == BUDGET && proposed) {
    const int tried = accepted + (accepted < proposed);
    request.accepted_weight = __dadd_rn(__dmul_rn(rule.decay, request.accepted_weight), (double)accepted);
    request.tried_weight = __dadd_rn(__dmul_rn(rule.decay, request.tried_weight), (double)tried);
    request.ema_acceptance_rate = (float)__ddiv_rn(request.accepted_weight, request.tried_weight);
  }
}

__device__ __forceinline__ void count(Counts& overall, const Rule& rule, int accepted, int proposed) {
  if (RULE != BUDGET || !proposed) return;
  const int tried = accepted + (accepted < proposed);
  overall.accepted_weight = __dadd_rn(__dmul_rn(rule.common_decay, overall.accepted_weight), (double)accepted);
  overall.tried_weight = __dadd_rn(__dmul_rn(rule.common_decay, overall.tried_weight), (double)tried);
}

__device__ __forceinline__ int budget_limit(const RequestDescriptor& request, int most) {
  const int limit = capped(MOST_DRAFTS, request.flags);
  return most < limit ? most : limit;
}

// Gains of each candidate's tokens fall with their depth. The likelier token goes first, then the lower depth, then
// the earlier candidate.
__device__ __forceinline__ bool goes_first(double gain, int depth, int index, double than, int depth2, int index2) {
  if (gain != than) return gain > than;
  return depth != depth2 ? depth < depth2 : index < index2;
}

__device__ inline void choose_count(Auction& all, const Rule& rule, const double* step_seconds) {
  double best_seconds = step_seconds[all.num_rows], best = __ddiv_rn((double)all.num_rows, best_seconds);
  double longer = __dmul_rn(best_seconds, rule.longer), better = __dmul_rn(best, rule.better);
  int best_count = 0;
  for (int k = 0; k < all.num_tokens; k++) {
    const double speed = all.speed[k], seconds = all.seconds[k];
    if (speed > (seconds > longer ? better : best)) {
      best = speed, best_seconds = seconds, best_count = k + 1;
      longer = __dmul_rn(best_seconds, rule.longer), better = __dmul_rn(best, rule.better);
    }
  }
  all.best_count = best_count;
}

__device__ inline void allot_budget(RequestDescriptor* requests, const Rule& rule, const double* step_seconds,
                                    const Candidate* candidates, int num_candidates, Auction& all, int thread,
                                    int threads) {
  for (int i = thread; i < num_candidates; i += threads) {
    const RequestDescriptor& request = requests[candidates[i].row];
    const int limit = candidates[i].most < 0 ? 0 : budget_limit(request, candidates[i].most);
    const double rate = limit ? __ddiv_rn(request.accepted_weight, request.tried_weight) : 0.0;
    double gain = 1.0;
    for (int d = 0; d < MOST_DRAFTS; d++) {
      gain = __dmul_rn(gain, rate);
      all.gain[i * MOST_DRAFTS + d] = d < limit ? gain : -1.0;  // none
    }
  }
  SYNC();
  for (int e = thread; e < num_candidates * MOST_DRAFTS; e += threads) {
    const int i = e / MOST_DRAFTS, d = e % MOST_DRAFTS;
    const double gain = all.gain[e];
    int rank = 0;
    for (int j = 0; j < num_candidates && gain >= 0.0; j++)
      for (int d2 = 0; d2 < MOST_DRAFTS; d2++) {
        const double other = all.gain[j * MOST_DRAFTS + d2];
        if (other < 0.0 || !goes_first(other, d2, j, gain, d, i)) break;
        rank++;
      }
    all.rank[e] = (unsigned short)rank;
    if (gain >= 0.0) all.committed[rank] = gain, all.longest[rank] = (unsigned short)(d + 1);
  }
  SYNC();
  if (thread == 0) {
    int num_rows = 0, num_tokens = 0, longest = 0;
    for (int i = 0; i < num_candidates; i++)
      if (candidates[i].most >= 0) {
        num_rows++;
        const int limit = budget_limit(requests[candidates[i].row], candidates[i].most);
        num_tokens += limit > 0 ? limit : 0;
      }
    double committed = (double)num_rows;
    for (int k = 0; k < num_tokens; k++) {
      committed = all.committed[k] = __dadd_rn(committed, all.committed[k]);
      longest = longest > all.longest[k] ? longest : all.longest[k];
      all.longest[k] = (unsigned short)longest;
    }
    all.num_rows = num_rows, all.num_tokens = num_tokens;
  }
  SYNC();
  for (int k = thread; k < all.num_tokens; k += threads) {
    const double drafting = __dmul_rn(rule.propose, (double)all.longest[k]);
    all.seconds[k] = __dadd_rn(step_seconds[all.num_rows + k + 1], drafting);
    all.speed[k] = __ddiv_rn(all.committed[k], all.seconds[k]);
  }
  SYNC();
  if (thread == 0 && all.num_rows) choose_count(all, rule, step_seconds);
  SYNC();
  for (int i = thread; i < num_candidates; i += threads) {
    if (candidates[i].most < 0) continue;
    RequestDescriptor& request = requests[candidates[i].row];
    int block = 0;
    for (int d = 0; d < MOST_DRAFTS; d++)
      block += all.gain[i * MOST_DRAFTS + d] >= 0.0 && all.rank[i * MOST_DRAFTS + d] < all.best_count;
    request.current_block_size = block ? block : request.idle_steps >= PROBE_EVERY;
  }
}

// Sets the rows' flags and block sizes; returns nothing for rows that must not draft.
__device__ inline void allot(RequestDescriptor* requests, const Rule& rule, const Counts& overall,
                             const double* step_seconds, const Candidate* candidates, int num_candidates,
                             bool under_pressure, Auction* all, int thread, int threads) {
  for (int i = thread; i < num_candidates; i += threads) {
    if (candidates[i].most < 0) continue;
    RequestDescriptor& request = requests[candidates[i].row];
    request.flags = (request.flags & ~KV_PRESSURE) | (under_pressure ? KV_PRESSURE : 0);
    if (request.flags & STARTS) begin(request, rule, overall);
  }
  SYNC();
  if (RULE == BUDGET) allot_budget(requests, rule, step_seconds, candidates, num_candidates, *all, thread, threads);
  SYNC();
}
