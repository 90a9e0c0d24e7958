// Sampling. For a drawn row each worker weighs a slice of the vocabulary: it sums masses and counts by range of distance from
// the highest score, and finds the best tokens by score plus noise. From these the row's worker finds the range of the last
// kept token. It reads scores only if the best token is in that range, to find out whether it is kept. Sums are of integers and
// comparisons exact, so that the token equals that of sample.cu.
#pragma once
#include "output.cuh"

constexpr int OWN_FOURS = (VOCAB / 4 + WORKERS - 1) / WORKERS;  // fours of scores of a worker
static_assert(RANGES == 32, "a lane each");
static_assert(NEAR_RANGES + ((int)(REACH * FIRST_DIGITS) - NEAR_RANGES * NEAR_DIGITS) / FAR_DIGITS < RANGES, "too many ranges");

__device__ __forceinline__ i64 weighed_at(int index, int worker) { return ((i64)index * WORKERS + worker) * RANGES; }

// A row's sampling rules, and its highest score divided by the temperature.
struct Rules {
  const float* scores;
  float temperature, top_p, peak;
  i64 top_k;
  u64 key;
  __device__ __forceinline__ float value(float score) const { return __fdiv_rn(score, temperature) + 0.f; }
  __device__ __forceinline__ bool bounded() const { return top_p < 1.f || top_k > 0; }
  __device__ __forceinline__ int range(float x) const {
    const int digit = digit_of(0, x, peak, 0);
    return digit < NEAR_RANGES * NEAR_DIGITS ? digit / NEAR_DIGITS
                                             : NEAR_RANGES + (digit - NEAR_RANGES * NEAR_DIGITS) / FAR_DIGITS;
  }
  __device__ __forceinline__ float rough(float x, u64 mixed) const { return x - peak + rough_noise(mixed >> 11); }
};

__device__ __forceinline__ Rules rules_of(const Shared& shared, int index, int step, u32 highest) {
  const DrawArguments& a = shared.draw;
  const int row = shared.row[index];
  Rules rules;
  rules.scores = a.scores + (i64)index * VOCAB;
  rules.temperature = a.row_temperature[row];
  rules.peak = rules.value(from_key(highest));
  rules.top_p = a.row_top_p[row], rules.top_k = a.row_top_k[row];
  rules.key = noise_key(a.row_seed[row], DRAFTS ? shared.position[index] + 1 : a.sample_position[index] + step);
  return rules;
}

constexpr Best NO_BEST = {0u, 0u, ~0u};

// The row's highest score and the lowest token that has it, in every lane; BROKEN stays set in an id.
__device__ __forceinline__ uint2 highest_of(const uint2* best, int index) {
  uint2 highest = {0u, ~0u};
  for (int j = threadIdx.x % 32; j < WORKERS; j += 32) {
    const float2 one = load_fresh_float2(reinterpret_cast<const float2*>(best + j * TOKENS + index));
    highest = best_of(highest, uint2{__float_as_uint(one.x), __float_as_uint(one.y)});
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) highest = best_of(highest, from_lane(highest, lanes));
  return highest;
}
__device__ __forceinline__ bool is_token(uint2 highest) { return highest.y < VOCAB && from_key(highest.x) > -INFINITY; }

// A token whose score plus noise may be the best.
struct Contender {
  float x;
  int id;
};
constexpr int SCORES_AT_ONCE = 128;  // scores that a warp reads at once

// Visit a warp's share of the groups of four scores from `first` to `end`: `contends(x, id)` filters scores in reach; for each of
// the remaining ones all lanes call `meet(exact score, x)`.
template <class Contends, class Meet>
__device__ __forceinline__ void each_contender(
    const Rules& rules, int first, int end, int stride, Contender* list, Contends contends, Meet meet) {
  const int lane = threadIdx.x % 32;
  const auto read = [&](int at) { return at < end ? load_fresh(rules.scores + at * 4) : uint4{}; };
  uint4 ahead = read(first + lane);
#pragma unroll 1
  for (int at = first + lane; at - lane < end; at += stride) {
    const uint4 raw = ahead;
    ahead = read(at + stride);
    u32 count = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float x = rules.value(__uint_as_float((&raw.x)[j]));
      const bool is = at < end && rules.peak - x < REACH && contends(x, at * 4 + j);
      const u32 all = __ballot_sync(~0u, is);
      if (is) list[count + __popc(all & (1u << lane) - 1)] = {x, at * 4 + j};
      count += __popc(all);
    }
    __syncwarp();
#pragma unroll 1
    for (u32 begin = 0; begin < count; begin += 32) {
      Contender mine = {0.f, 0};
      Best exact = NO_BEST;
      if (begin + lane < count) {
        mine = list[begin + lane];
        const float noise = exact_noise(mix(rules.key + (u64)mine.id) >> 11);
        exact = {to_key(mine.x - rules.peak + noise), to_key(mine.x), (u32)mine.id};
      }
#pragma unroll 1
      for (u32 k = 0; k < min(32u, count - begin); k++) {
        const Best other = {__shfl_sync(~0u, exact.first, k), __shfl_sync(~0u, exact.second, k), __shfl_sync(~0u, exact.id, k)};
        meet(other, __shfl_sync(~0u, mine.x, k));
      }
    }
    __syncwarp();
  }
}

// A warp's memory for weighing, in place of its sums.
struct Scale {
  Bin bins[RANGES];
  Contender list[SCORES_AT_ONCE];
};
static_assert(sizeof(Scale) * WARPS <= sizeof(Shared::sums), "a scale for each warp in place of sums");
__device__ __forceinline__ Scale& own_scale(Shared& shared) {
  return reinterpret_cast<Scale*>(&shared.sums[0][0][0][0])[threadIdx.x / 32];
}

// Weigh the worker's slice of one row; by one warp.
__device__ __forceinline__ void weigh_row(Shared& shared, int index, int step) {
  const DrawArguments& a = shared.draw;
  const int lane = threadIdx.x % 32, first = blockIdx.x * OWN_FOURS;
  const uint2 highest = highest_of(a.best, index);
  if (!is_token(highest)) return;
  const Rules rules = rules_of(shared, index, step, highest.x);
  const bool bounded = rules.bounded();
  // The highest score is always kept, so others must reach its score plus noise. Scores and bound are approximate.
  const float floor = rules.rough(rules.peak, mix(rules.key + (u64)highest.y)) - 2.f * NOISE_SLACK;
  Scale& scale = own_scale(shared);
  scale.bins[lane] = Bin{};
  __syncwarp();
  Best best = NO_BEST;
  const auto contends = [&](float x, int id) {
    if (bounded) add(scale.bins[rules.range(x)], mass_of(x, rules.peak));
    const u64 mixed = mix(rules.key + (u64)id);
    return x == rules.peak || (x - rules.peak + most_noise(mixed) >= floor && rules.rough(x, mixed) >= floor);
  };
  const auto meet = [&](const Best& other, float x) {
    if (lane >= rules.range(x) && beats(other, best)) best = other;
  };
  each_contender(rules, first, min(first + OWN_FOURS, VOCAB / 4), 32, scale.list, contends, meet);
  const i64 to = weighed_at(index, blockIdx.x) + lane;
  a.weighed.best[to] = uint4{best.first, best.second, best.id, 0u};
  if (!bounded) return;
  const Bin bin = scale.bins[lane];
  const u64 mass = mass_in(bin.low, bin.middle, bin.high);
  a.weighed.share[to] = uint4{(u32)mass, (u32)(mass >> 32), bin.count, 0u};
}

// A called function, as `draw_row`: inlined, it would make its callers spill.
__device__ __noinline__ void weigh_rows(int count, int step) {
  Shared& shared = worker_memory();
  for (int index = threadIdx.x / 32; index < count; index += WARPS) {
    if (shared.drawn >> index & 1) weigh_row(shared, index, step);
    __syncwarp();
  }
}

__device__ __forceinline__ void run_weigh(const Arguments& a, const Place& at, Shared& shared) {
  if (shared.drawn) weigh_rows(num_tokens(a, shared), at.step);
}

// Sum over the thread block, in every thread.
__device__ __forceinline__ Share block_sum(Share mine, Share (&warps)[WARPS]) {
#pragma unroll
  for (int lanes = 16; lanes; lanes >>= 1) {
    mine.mass += __shfl_xor_sync(~0u, mine.mass, lanes);
    mine.count += __shfl_xor_sync(~0u, mine.count, lanes);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncwarp();
  workers_sync();
  Share all = {};
#pragma unroll
  for (int i = 0; i < WARPS; i++) all.mass += warps[i].mass, all.count += warps[i].count;
  return all;
}
__device__ __forceinline__ Best block_best(Best mine, Best (&warps)[WARPS]) {
  mine = warp_best(mine);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncwarp();
  workers_sync();
  return warp_best(warps[threadIdx.x % WARPS]);
}

// Sum all workers' shares of the lane's range, in every warp.
__device__ __forceinline__ Share share_of_range(Shared& shared, int index) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto& warps = *reinterpret_cast<Share (*)[WARPS][RANGES]>(&shared.sums[0][0][0][0]);
  Share mine = {};
#pragma unroll 8
  for (int worker = warp; worker < WORKERS; worker += WARPS) {
    const uint4 v = load_fresh(shared.draw.weighed.share + weighed_at(index, worker) + lane);
    mine.mass += (u64)v.y << 32 | v.x, mine.count += v.z;
  }
  warps[warp][lane] = mine;
  workers_sync();
  Share all = {};
#pragma unroll
  for (int i = 0; i < WARPS; i++) all.mass += warps[i][lane].mass, all.count += warps[i][lane].count;
  workers_sync();  // before others' sums
  return all;
}

// The best token of all ranges up to this one, in every lane.
__device__ __forceinline__ Best best_through(const Shared& shared, int index, int range) {
  if (range < 0) return NO_BEST;
  Best best = NO_BEST;
  for (int worker = threadIdx.x % 32; worker < WORKERS; worker += 32) {
    const uint4 v = load_fresh(shared.draw.weighed.best + weighed_at(index, worker) + range);
    if (const Best other = {v.x, v.y, v.z}; beats(other, best)) best = other;
  }
  return warp_best(best);
}

// Find the best kept token. `last` is the range of the last kept token, `best` is in it and beats `below`, which is kept. `best` is
// kept if mass and count of the range's tokens before it are within the bounds; otherwise the next best is tried.
__device__ __forceinline__ Best best_kept(Shared& shared, const Rules& rules, const Choice& last, Bounds most, Best best, Best below) {
  Sampling& sampling = shared.sampling;
  Contender* list = own_scale(shared).list;
  while (beats(best, below)) {
    Share before = {};
    Best next = below;
    const auto contends = [&](float x, int id) {
      if (rules.range(x) != last.digit || !(to_key(x) > best.second || (to_key(x) == best.second && (u32)id < best.id))) return false;
      before.mass += mass_of(x, rules.peak), before.count++;
      return next.id == ~0u || rules.rough(x, mix(rules.key + (u64)id)) >= from_key(next.first) - NOISE_SLACK;
    };
    const auto meet = [&](const Best& other, float) {
      if (beats(other, next)) next = other;
    };
    each_contender(rules, threadIdx.x / 32 * 32, VOCAB / 4, THREADS, list, contends, meet);
    __syncwarp();
    const Share all = block_sum(before, sampling.shares);
    if (last.mass + all.mass <= most.mass && last.count + all.count < most.count) return best;
    best = block_best(next, sampling.best);
    workers_sync();  // before the next one's
  }
  return below;
}

// Draw a row's token; `highest` is its highest score and the token that has it.
__device__ __noinline__ u32 draw_row(int index, int step, uint2 highest) {
  Shared& shared = worker_memory();
  const Rules rules = rules_of(shared, index, step, highest.x);
  if (!rules.bounded()) return best_through(shared, index, RANGES - 1).id;
  const Share own = share_of_range(shared, index), through = warp_prefix(own);
  const Share total = {__shfl_sync(~0u, through.mass, 31), __shfl_sync(~0u, through.count, 31)};
  const Bounds most = {mass_limit(rules.top_p, total), count_limit(rules.top_k)};
  Choice last = {};
  const u32 found = __ballot_sync(~0u, has_last(own, through, Choice{}, total, most, threadIdx.x % 32, last));
  if (!found) return NO_BEST.id;  // nothing is in reach of a score that overflowed
  const int lane = __ffs(found) - 1;
  last.mass = __shfl_sync(~0u, last.mass, lane), last.count = __shfl_sync(~0u, last.count, lane);
  last.digit = lane, last.settled = __shfl_sync(~0u, (int)last.settled, lane);
  const Best best = best_through(shared, index, lane);
  if (last.settled) return best.id;
  return best_kept(shared, rules, last, most, best, best_through(shared, index, lane - 1)).id;
}

__device__ __forceinline__ void run_sample(const Arguments& a, const Place& at, Shared& shared, const Instruction& it) {
  for (int i = 0; i < it.num_blocks; i++) {
    const int index = it.block + i * WORKERS;
    if (index >= num_tokens(a, shared)) break;
    const uint2 highest = highest_of(a.best, index);
    u32 token = highest.y;
    if (is_token(highest) && shared.drawn >> index & 1) token = draw_row(index, at.step, highest);
    if (threadIdx.x == 0) a.token[index] = token < VOCAB ? (int)token : -1;
  }
}
