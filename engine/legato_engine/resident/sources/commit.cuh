// The end of a step: what the host wishes, every row's token, and whether a step follows.
#pragma once
#include "decode_loop.cuh"
#include "output.cuh"

__device__ __forceinline__ void run_listen(const Arguments& a, const Instruction& it) {
  if (it.num_blocks && threadIdx.x == 0) *a.stop = stop_wished(a.words);
}

// Every value of a row by the thread whose it is, four at a time in rising order of ids: use(scores, first id). Whole warps
// come to `after` each four.
template <class Use, class After>
__device__ __forceinline__ void each_four(const float* scores, Use use, After after) {
  constexpr int SPAN = THREADS * 4, BURST = 5;
  for (int begin = 0; begin < VOCAB; begin += SPAN * BURST) {
    uint4 raw[BURST];
    const int first = begin + threadIdx.x * 4;
#pragma unroll
    for (int i = 0; i < BURST; i++)
      if (first + i * SPAN < VOCAB) raw[i] = load_fresh(scores + first + i * SPAN);
#pragma unroll
    for (int i = 0; i < BURST; i++) {
      if (first + i * SPAN < VOCAB)
        use(float4{__uint_as_float(raw[i].x), __uint_as_float(raw[i].y), __uint_as_float(raw[i].z), __uint_as_float(raw[i].w)},
            first + i * SPAN);
      after();
    }
  }
}

// A row's sampling rules; values are its scores by their temperature.
struct Rules {
  const float* scores;
  float temperature, top_p, peak;
  i64 top_k;
  u64 key;
  __device__ __forceinline__ float value(float score) const { return __fdiv_rn(score, temperature) + 0.f; }
};

// Whether a token comes before (-1), with (0) or after the last kept one, as far as its first `length` digits say.
__device__ __forceinline__ int against(const Sampling& sampling, int length, float x, float peak, int id) {
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    if (pass >= length) break;
    const int digit = digit_of(pass, x, peak, id), last = sampling.digits[pass];
    if (digit != last) return digit < last ? -1 : 1;
  }
  return 0;
}

// Over the thread block, in every thread.
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

// First digits of the tokens that come into bins at first: those within 8 of the highest. The others cost more time there than
// everything else, and the last kept token is seldom among them.
constexpr int NEAR_DIGITS = 8 * (int)FIRST_DIGITS;

// The last kept token's digits, as sample.cu finds them; returns how many say all. Bins lie where sums are.
__device__ __forceinline__ int find_last(Shared& shared, const Rules& rules) {
  Sampling& sampling = shared.sampling;
  Bin* bins = reinterpret_cast<Bin*>(&shared.sums[0][0][0][0]);
  constexpr int OWN = BINS / THREADS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Bounds most = {0, count_limit(rules.top_k)};
  Choice before = {};
  int length = 0, digits = NEAR_DIGITS;
  while (length < PASSES) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = Bin{};
    if (threadIdx.x == 0) sampling.choice.digit = -1;
    workers_sync();
    Share seen = {};
    const auto use = [&](float4 scores, int id) {
      float x[4];
      bool is[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        x[j] = rules.value((&scores.x)[j]);
        is[j] = rules.peak - x[j] < REACH && against(sampling, length, x[j], rules.peak, id + j) == 0;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (!is[j]) continue;
        const u64 mass = mass_of(x[j], rules.peak);
        const int digit = digit_of(length, x[j], rules.peak, id + j);
        seen.mass += mass, seen.count++;
        if (digit < digits) add(bins[digit], mass);
      }
    };
    each_four(rules.scores, use, [] {});
    __syncwarp();
    const Share total = block_sum(seen, sampling.totals);
    Share own[OWN], mine = {};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const Bin bin = bins[threadIdx.x * OWN + i];
      own[i] = {mass_in(bin.low, bin.middle, bin.high), bin.count};
      mine.mass += own[i].mass, mine.count += own[i].count;
    }
    Share through = warp_prefix(mine);
    if (lane == 31) sampling.sums[warp] = through;
    __syncwarp();
    workers_sync();
    through.mass -= mine.mass, through.count -= mine.count;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const Share sum = sampling.sums[i];
      if (i < warp) through.mass += sum.mass, through.count += sum.count;
    }
    if (length == 0) most.mass = mass_limit(rules.top_p, total);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      through.mass += own[i].mass, through.count += own[i].count;
      Choice last;
      const int digit = threadIdx.x * OWN + i;
      if (has_last(own[i], through, before, total, most, digit, last)) {
        sampling.choice = last;
        sampling.digits[length] = digit;
      }
    }
    __syncwarp();
    workers_sync();
    const Choice found = sampling.choice;
    workers_sync();  // before the next pass forgets it
    const bool whole = digits == BINS;
    digits = BINS;
    if (found.digit < 0 && whole) break;  // scores are anything after a failed wait
    if (found.digit < 0) continue;        // it is not near
    before = found;
    length++;
    if (before.settled) break;
  }
  return length;
}

// A token whose rough score with noise came near the best one so far; they lie where sums are.
struct Contender {
  float rough;
  int id;
};
constexpr u32 MOST_CONTENDERS = sizeof(Shared::sums) / sizeof(Contender);

// The token with the best score and noise, of those that the first `length` digits keep, `highest` among them. Most tokens
// need no more than a bound of their noise, and only those whose rough score comes near the best one are scored exactly.
__device__ __forceinline__ Best draw_token(Shared& shared, const Rules& rules, int length, int highest) {
  Sampling& sampling = shared.sampling;
  Contender* contenders = reinterpret_cast<Contender*>(&shared.sums[0][0][0][0]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float peak = rules.peak, scale = __fdiv_rn(1.f, rules.temperature);
  // Of a bound: both slacks of rough scores, and the error of a product instead of a quotient.
  const float slack = 2.f * NOISE_SLACK + fabsf(peak) * 1e-6f;
  float best = rough_noise(mix(rules.key + (u64)highest) >> 11);
  if (threadIdx.x == 0) sampling.contenders = 0;
  workers_sync();
  const auto bound = [&](float score, u64 mixed) { return __fmaf_rn(score, scale, slack - peak) + most_noise(mixed); };
  const auto offer = [&](float score, int id) {
    const float x = rules.value(score);
    if (!(peak - x < REACH) || against(sampling, length, x, peak, id) > 0) return;
    const float rough = x - peak + rough_noise(mix(rules.key + (u64)id) >> 11);
    if (!(rough >= best - NOISE_SLACK)) return;
    best = fmaxf(best, rough);
    const u32 at = atomicAdd(&sampling.contenders, 1u);
    if (at < MOST_CONTENDERS) contenders[at] = {rough, id};
  };
  const auto use = [&](float4 scores, int id) {
    float bounds[4];
#pragma unroll
    for (int j = 0; j < 4; j++) bounds[j] = bound((&scores.x)[j], mix(rules.key + (u64)(id + j)));
    if (!(fmaxf(fmaxf(bounds[0], bounds[1]), fmaxf(bounds[2], bounds[3])) >= best)) return;
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (bounds[j] >= best) offer((&scores.x)[j], id + j);
  };
  each_four(rules.scores, use, [&] {
    __syncwarp();
    best = from_key(__reduce_max_sync(~0u, to_key(best)));
  });
  if (lane == 0) sampling.rough[warp] = to_key(best);
  __syncwarp();
  workers_sync();
  const float near = from_key(__reduce_max_sync(~0u, sampling.rough[lane % WARPS])) - NOISE_SLACK;
  Best mine = {0u, 0u, ~0u};
  const auto score = [&](float x, int id) {
    const u32 total = to_key(x - peak + exact_noise(mix(rules.key + (u64)id) >> 11)), own = to_key(x);
    const bool more = own > mine.second || (own == mine.second && (u32)id < mine.id);
    if (total > mine.first || (total == mine.first && more)) mine = {total, own, (u32)id};
  };
  const u32 count = sampling.contenders;
  for (u32 i = threadIdx.x; i < count && count <= MOST_CONTENDERS; i += THREADS)
    if (contenders[i].rough >= near) score(rules.value(load_fresh_f32(rules.scores + contenders[i].id)), contenders[i].id);
  if (count > MOST_CONTENDERS) {
    const auto again = [&](float4 scores, int id) {
      for (int j = 0; j < 4; j++) {
        const float x = rules.value((&scores.x)[j]);
        if (!(peak - x < REACH) || against(sampling, length, x, peak, id + j) > 0) continue;
        if (x - peak + rough_noise(mix(rules.key + (u64)(id + j)) >> 11) >= near) score(x, id + j);
      }
    };
    each_four(rules.scores, again, [] {});
  }
  __syncwarp();
  mine = warp_best(mine);
  if (lane == 0) sampling.best[warp] = mine;
  workers_sync();
  mine = warp_best(sampling.best[lane % WARPS]);
  workers_sync();  // before the next row's
  return mine;
}

// A row's drawn token; `best` is its highest score and the token that has it. Registers of the code around would be spilled.
__device__ __noinline__ u32 draw_row(int index, int step, uint2 best) {
  Shared& shared = worker_memory();
  const DrawArguments& a = shared.draw;
  const int row = shared.row[index];
  Rules rules;
  rules.scores = a.scores + (i64)index * VOCAB;
  rules.temperature = a.row_temperature[row];
  rules.peak = __fdiv_rn(from_key(best.x), rules.temperature);
  rules.top_p = a.row_top_p[row], rules.top_k = a.row_top_k[row];
  rules.key = noise_key(a.row_seed[row], DRAFTS ? shared.position[index] + 1 : a.sample_position[index] + step);
  const bool bounded = rules.top_p < 1.f || rules.top_k > 0;
  return draw_token(shared, rules, bounded ? find_last(shared, rules) : 0, (int)best.y).id;
}

__device__ __forceinline__ void run_sample(const Arguments& a, const Place& at, Shared& shared, const Instruction& it) {
  for (int i = 0; i < it.num_blocks; i++) {
    const int index = it.block + i * WORKERS;
    if (index >= num_tokens(a, shared)) break;
    uint2 best = {0u, ~0u};
    for (int j = threadIdx.x % 32; j < WORKERS; j += 32) {
      const float2 one = load_fresh_float2(reinterpret_cast<const float2*>(a.best + j * TOKENS + index));
      best = best_of(best, uint2{__float_as_uint(one.x), __float_as_uint(one.y)});
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) best = best_of(best, from_lane(best, lanes));
    const bool finite = best.y < VOCAB && from_key(best.x) > -INFINITY;
    if (finite && shared.drawn >> index & 1) best.y = draw_row(index, at.step, best);
    if (threadIdx.x == 0) a.token[index] = best.y < VOCAB ? (int)best.y : -1;
  }
}

#if !DRAFTS
__device__ __forceinline__ void run_commit(const Arguments& a, const Place& at, Shared& shared) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  const int token = lane < a.rows ? (int)load_fresh_u32(a.token + lane) : 0;
  const bool stop = load_fresh_u32(a.stop) != 0;
  const u32 aborted = load_relaxed(a.abort);
  const bool broken = __any_sync(~0u, token < 0);
  if (lane < a.rows) {
    shared.chosen[lane] = token;
    shared.constraint[lane] = (int)successor(a.successors, shared.constraint[lane], token);
    shared.token[lane] = min(max(token, 0), VOCAB - 1);  // after a failed wait it may be anything
    if (VALUES) {
      const uint4 value = load_fresh(a.value + lane);
      shared.value[lane] = float4{__uint_as_float(value.x), __uint_as_float(value.y), __uint_as_float(value.z),
                                  __uint_as_float(value.w)};
    }
  }
  if (lane == 0) shared.ended = aborted ? ABORTED : follows(broken, at.step + 1, a.steps, stop) ? GOES_ON : ENDED;
}
#endif
