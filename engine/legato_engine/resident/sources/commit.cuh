// The end of a step: what the host wishes, every row's token, and whether a step follows.
#pragma once
#include "decode_loop.cuh"
#include "output.cuh"

__device__ __forceinline__ void run_listen(const Arguments& a, const Instruction& it) {
  if (it.num_blocks && threadIdx.x == 0) *a.stop = stop_wished(a.words);
}

// Every value of a row, by the thread whose it is: four at a time in rising order of ids.
template <class Use>
__device__ __forceinline__ void each_score(const float* scores, Use use) {
  constexpr int SPAN = THREADS * 4, BURST = 5;
  for (int begin = threadIdx.x * 4; begin < VOCAB; begin += SPAN * BURST) {
    uint4 raw[BURST];
#pragma unroll
    for (int i = 0; i < BURST; i++)
      if (begin + i * SPAN < VOCAB) raw[i] = load_fresh(scores + begin + i * SPAN);
#pragma unroll
    for (int i = 0; i < BURST; i++)
      if (begin + i * SPAN < VOCAB)
#pragma unroll
        for (int j = 0; j < 4; j++) use(__uint_as_float((&raw[i].x)[j]), begin + i * SPAN + j);
  }
}

// A row's sampling rules; values are its scores by their temperature.
struct Rules {
  float* scores;
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

// The last kept token's digits, as sample.cu finds them; returns how many say all. Bins lie where sums are.
__device__ __noinline__ int find_last(Shared& shared, const Rules& rules) {
  Sampling& sampling = shared.sampling;
  Bin* bins = reinterpret_cast<Bin*>(&shared.sums[0][0][0][0]);
  constexpr int OWN = BINS / THREADS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Bounds most = {0, count_limit(rules.top_k)};
  Choice before = {};
  int length = 0;
  while (length < PASSES) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = Bin{};
    workers_sync();
    each_score(rules.scores, [&](float score, int id) {
      const float x = rules.value(score);
      if (rules.peak - x < REACH && against(sampling, length, x, rules.peak, id) == 0)
        add(bins[digit_of(length, x, rules.peak, id)], mass_of(x, rules.peak));
    });
    __syncwarp();
    workers_sync();
    Share own[OWN], mine = {};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const Bin bin = bins[threadIdx.x * OWN + i];
      own[i] = {(u64)bin.mass[1] << 32 | bin.mass[0], bin.count};
      mine.mass += own[i].mass, mine.count += own[i].count;
    }
    Share through = warp_prefix(mine);
    if (lane == 31) sampling.sums[warp] = through;
    workers_sync();
    through.mass -= mine.mass, through.count -= mine.count;
    Share total = {};
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const Share sum = sampling.sums[i];
      if (i < warp) through.mass += sum.mass, through.count += sum.count;
      total.mass += sum.mass, total.count += sum.count;
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
    workers_sync();
    before = sampling.choice;
    length++;
    if (before.settled) break;
  }
  return length;
}

// The token with the best score and noise, of those that the first `length` digits keep.
__device__ __noinline__ Best draw_token(Shared& shared, const Rules& rules, int length) {
  Sampling& sampling = shared.sampling;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float peak = rules.peak;
  const auto stays = [&](float x, int id) {
    return peak - x < REACH && against(sampling, length, x, peak, id) <= 0;
  };
  float rough = -INFINITY;
  each_score(rules.scores, [&](float score, int id) {
    const float x = rules.value(score);
    if (stays(x, id)) rough = fmaxf(rough, x - peak + rough_noise(mix(rules.key + (u64)id) >> 11));
  });
  __syncwarp();
  const u32 highest = __reduce_max_sync(~0u, to_key(rough));
  if (lane == 0) sampling.rough[warp] = highest;
  workers_sync();
  const float near = from_key(__reduce_max_sync(~0u, sampling.rough[lane % WARPS])) - NOISE_SLACK;
  Best best = {0u, 0u, ~0u};
  if (rough >= near)
    each_score(rules.scores, [&](float score, int id) {
      const float x = rules.value(score);
      if (!stays(x, id)) return;
      const u64 bits = mix(rules.key + (u64)id) >> 11;
      if (!(x - peak + rough_noise(bits) >= near)) return;
      const u32 total = to_key(x - peak + exact_noise(bits)), own = to_key(x);
      if (total > best.first || (total == best.first && own > best.second)) best = {total, own, (u32)id};
    });
  __syncwarp();
  best = warp_best(best);
  if (lane == 0) sampling.best[warp] = best;
  workers_sync();
  best = warp_best(sampling.best[lane % WARPS]);
  workers_sync();  // before the next row's
  return best;
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
    const float highest = from_key(best.x);
    if (best.y < VOCAB && highest > -INFINITY && shared.drawn >> index & 1) {
      const int row = shared.row[index];
      Rules rules;
      rules.scores = a.scores + (i64)index * VOCAB;
      rules.temperature = a.row_temperature[row];
      rules.peak = __fdiv_rn(highest, rules.temperature);
      rules.top_p = a.row_top_p[row], rules.top_k = a.row_top_k[row];
      rules.key = noise_key(a.row_seed[row], DRAFTS ? shared.position[index] + 1 : a.sample_position[index] + at.step);
      const bool bounded = rules.top_p < 1.f || rules.top_k > 0;
      best.y = draw_token(shared, rules, bounded ? find_last(shared, rules) : 0).id;
    }
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
