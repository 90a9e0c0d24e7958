// Attention of the tokens. A worker has a head, and units of tokens and quarters of their rows' pages: every
// SPLITS-th. What the softmax of a token's quarters leaves is merged by its worker, or by the workers of OUT.
//
// In a warp lane = 4p + e: of a stage each warp has 8 positions, and lane (p, e) has dimensions 8e.. and 32 + 8e.. of
// position p. Results depend on a token's own query, keys, values and position alone.
#pragma once
#include "matrix.cuh"

constexpr float SCALE = 0.125f * 1.4426950408889634f;  // 1 / sqrt(64), for powers of two

// A warp's softmax: `out` of dimensions 2 lane and 2 lane + 1; `sum` is of the lane's own positions.
struct Softmax {
  float top = -INFINITY, sum = 0.f;
  float2 out = {0.f, 0.f};
};

__device__ __forceinline__ float dot8(const uint4& k, const float* q) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 pair = (&k.x)[i];
    sum += low_float(pair) * q[2 * i] + high_float(pair) * q[2 * i + 1];
  }
  return sum;
}

constexpr int STAGES_AT_ONCE = 4;  // whose scores registers hold

// A lane's part of a query. In odd positions its halves are in the other order, as are their keys' reads: so no
// two lanes read from one bank.
struct Query {
  float of[16];
  __device__ __forceinline__ Query(const uint4& low, const uint4& high) {
    const bool odd = threadIdx.x / 4 % 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 first = odd ? (&high.x)[i] : (&low.x)[i], second = odd ? (&low.x)[i] : (&high.x)[i];
      of[2 * i] = low_float(first), of[2 * i + 1] = high_float(first);
      of[8 + 2 * i] = low_float(second), of[9 + 2 * i] = high_float(second);
    }
  }
};

// 8 positions of a stage that are this warp's, of which the first `count` are there.
struct Positions {
  const unsigned char* keys;
  int count;
  __device__ __forceinline__ float score(const Query& q) const {
    const int p = threadIdx.x % 32 / 4, e = threadIdx.x % 4 + p % 2 * 4;
    const uint4* key = reinterpret_cast<const uint4*>(keys + p * (HEAD_DIM * 2));
    const uint4 first = key[e], second = key[e ^ 4];
    float sum = dot8(first, q.of) + dot8(second, q.of + 8);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return p < count ? sum * SCALE : -INFINITY;
  }
  template <bool WHOLE>
  __device__ __forceinline__ void add(Softmax& track, float weight) const {
    const unsigned char* values = keys + PAGE_BYTES / 2 + threadIdx.x % 32 * 4;
    u32 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = WHOLE || i < count ? *reinterpret_cast<const u32*>(values + i * (HEAD_DIM * 2)) : 0u;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float w = __shfl_sync(~0u, weight, i * 4);
      track.out.x = __fmaf_rn(w, low_float(v[i]), track.out.x);
      track.out.y = __fmaf_rn(w, high_float(v[i]), track.out.y);
    }
  }
};

// A softmax goes on to a new top.
__device__ __forceinline__ float raise(Softmax& track, float top) {
  const float base = top == -INFINITY ? 0.f : top, scale = power_of_two(track.top - base);
  track.top = top;
  track.sum *= scale, track.out.x *= scale, track.out.y *= scale;
  return base;
}

// Of a warp's 8 positions from `begin` on, those of the row that this step's QKV wrote, which the ring does not have: they
// are put where it would have them, so that a token has the same bits with its row's tokens in one step or in several.
struct Written {
  int first = 0, end = 0;  // of the 8
  u32 keys[8], values[8];  // dimensions 2 lane and 2 lane + 1
  // `slot`: of the first of the 8 positions.
  __device__ __forceinline__ void load(const Arguments& a, i64 slot, int fresh, int position, int begin) {
    first = max(0, fresh - begin), end = min(8, position - begin);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (first <= i && i < end) {
        const i64 at = slot + i * HEAD_DIM + threadIdx.x % 32 * 2;
        keys[i] = load_fresh_u32(a.keys + at), values[i] = load_fresh_u32(a.values + at);
      }
  }
  __device__ __forceinline__ void store(unsigned char* to) const {
    to += threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (first <= i && i < end) {
        *reinterpret_cast<u32*>(to + i * (HEAD_DIM * 2)) = keys[i];
        *reinterpret_cast<u32*>(to + PAGE_BYTES / 2 + i * (HEAD_DIM * 2)) = values[i];
      }
    order_shared_copies();  // the next copy to the stage comes after these
    __syncwarp();
  }
};

// A unit's positions before its token's own, from the ring.
__device__ __forceinline__ void attend_cached(
    const Arguments& a, Place& at, const Shared& shared, Ring& ring, Softmax& track, const Query& q, int layer, int index,
    const Unit& unit) {
  const int position = position_of(shared, unit.token, at.step), quarter = unit.quarter;
  const int warp = threadIdx.x / 32, own = own_pages(position, quarter);
  for (int first = 0; first < own; first += STAGES_AT_ONCE * STAGE_PAGES) {
    const int stages = min(STAGES_AT_ONCE, (own - first + STAGE_PAGES - 1) / STAGE_PAGES);
    Positions here[STAGES_AT_ONCE];
    float scores[STAGES_AT_ONCE], top = track.top;
    Ring ahead = ring;
#pragma unroll
    for (int i = 0; i < STAGES_AT_ONCE; i++) {
      scores[i] = -INFINITY;
      here[i].count = 0;
      if (i >= stages) continue;
      const int which = first + i * STAGE_PAGES + warp / 2, begin = (quarter + SPLITS * which) * PAGE + warp % 2 * 8;
#if DRAFTS
      const int fresh = first_position(shared, unit.token, at.step);
      const bool writes = warp / 2 < STAGE_PAGES && which < own && begin + 8 > fresh && position > max(fresh, begin);
      Written written;
      if (writes) {
        const i64 page = (i64)layer * a.layer_pages + shared.pages[index][which];
        const i64 slot = ((page * HEADS + blockIdx.x / SPLITS) * PAGE + warp % 2 * 8) * HEAD_DIM;
        written.load(a, slot, fresh, position, begin);
      }
#endif
      here[i].keys = ahead.get(a, at) + warp / 2 * PAGE_BYTES + warp % 2 * (8 * HEAD_DIM * 2);
      ahead.next();
#if DRAFTS
      if (writes) written.store(const_cast<unsigned char*>(here[i].keys));
#endif
      if (warp / 2 < STAGE_PAGES && which < own) here[i].count = max(0, min(8, position - begin));
      if (here[i].count) scores[i] = here[i].score(q);
      top = fmaxf(top, scores[i]);
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    const float base = raise(track, top);
#pragma unroll
    for (int i = 0; i < STAGES_AT_ONCE; i++) {
      const float weight = power_of_two(scores[i] - base);
      track.sum += weight;
      if (here[i].count == 8)
        here[i].add<true>(track, weight);
      else if (here[i].count)
        here[i].add<false>(track, weight);
    }
    for (int i = 0; i < stages; i++) ring.release(a, __float_as_uint(track.out.x));
  }
}

// What a unit reads of this step: its query, and the key and value of its own position, which QKV wrote.
struct Fresh {
  uint4 low, high;
  u32 query, key, value;
  bool newest;
  __device__ __forceinline__ void load(const Arguments& a, const Shared& shared, int layer, int step, int index) {
    const int lane = threadIdx.x % 32, e = lane % 4, head = blockIdx.x / SPLITS;
    const Unit unit(index, num_tokens(a, shared));
    const int position = position_of(shared, unit.token, step), page = position / PAGE;
    const bf16* q = a.q + unit.token * DIM + head * HEAD_DIM;
    low = load_fresh(q + e * 8), high = load_fresh(q + 32 + e * 8);
    newest = threadIdx.x < 32 && page % SPLITS == unit.quarter;
    if (!newest) return;
    const i64 place = (i64)layer * a.layer_pages + shared.pages[index][page / SPLITS];
    const i64 slot = ((place * HEADS + head) * PAGE + position % PAGE) * HEAD_DIM + 2 * lane;
    query = load_fresh_u32(q + 2 * lane), key = load_fresh_u32(a.keys + slot), value = load_fresh_u32(a.values + slot);
  }
  __device__ __forceinline__ void add(Softmax& track) const {
    const float score = warp_sum(low_float(query) * low_float(key) + high_float(query) * high_float(key)) * SCALE;
    const float base = raise(track, fmaxf(track.top, score)), weight = power_of_two(score - base);
    if (threadIdx.x % 32 < 4) track.sum += weight;
    track.out.x = __fmaf_rn(weight, low_float(value), track.out.x);
    track.out.y = __fmaf_rn(weight, high_float(value), track.out.y);
  }
};

// Weights of parts whose softmaxes have these tops.
template <int N>
__device__ __forceinline__ void merge(const float2 (&ends)[N], float (&weights)[N], float& top, float& sum) {
  top = ends[0].x;
#pragma unroll
  for (int i = 1; i < N; i++) top = fmaxf(top, ends[i].x);
  const float base = top == -INFINITY ? 0.f : top;
  sum = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) {
    weights[i] = power_of_two(ends[i].x - base);
    sum += weights[i] * ends[i].y;
  }
}

template <int N>
__device__ __forceinline__ float2 weighed(const float (&weights)[N], const float2 (&parts)[N]) {
  float2 out = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < N; i++) {
    out.x = __fmaf_rn(weights[i], parts[i].x, out.x);
    out.y = __fmaf_rn(weights[i], parts[i].y, out.y);
  }
  return out;
}

// A unit's softmax, of its warps'; dimensions 2 lane and 2 lane + 1.
struct Part {
  float2 out, end;
  __device__ __forceinline__ Part() {}
  __device__ __forceinline__ Part(const Shared& shared, int unit) {
    const auto* parts = reinterpret_cast<const float2(*)[WARPS][32]>(&shared.sums[0][0][0][0]);
    float2 ends[WARPS], of[WARPS];
    float weights[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; i++) ends[i] = shared.ends[unit][i], of[i] = parts[unit][i][threadIdx.x % 32];
    merge(ends, weights, end.x, end.y);
    out = weighed(weights, of);
  }
};

// Two values of a head, of its quarters.
__device__ __forceinline__ u32 merged_pair(const Part (&parts)[SPLITS]) {
  float2 ends[SPLITS], of[SPLITS];
  float weights[SPLITS], top, sum;
#pragma unroll
  for (int i = 0; i < SPLITS; i++) ends[i] = parts[i].end, of[i] = parts[i].out;
  merge(ends, weights, top, sum);
  const float2 out = weighed(weights, of);
  return pack(__fdividef(out.x, sum), __fdividef(out.y, sum));
}

__device__ __forceinline__ void run_attend(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, const Instruction& it) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto* parts = reinterpret_cast<float2(*)[WARPS][32]>(&shared.sums[0][0][0][0]);
  static_assert(sizeof(shared.sums) >= sizeof(float2) * TOKENS * WARPS * 32, "the parts of all units");
  Fresh next;
  next.load(a, shared, it.layer, at.step, 0);
  for (int index = 0; index < num_tokens(a, shared); index++) {
    const Fresh fresh = next;
    if (index + 1 < num_tokens(a, shared)) next.load(a, shared, it.layer, at.step, index + 1);
    const Unit unit(index, num_tokens(a, shared));
    const Query q(fresh.low, fresh.high);
    Softmax track;
    attend_cached(a, at, shared, ring, track, q, it.layer, index, unit);
    if (fresh.newest) fresh.add(track);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes <<= 1) track.sum += __shfl_xor_sync(~0u, track.sum, lanes);
    parts[index][warp][lane] = track.out;
    if (lane == 0) shared.ends[index][warp] = float2{track.top, track.sum};
  }
  workers_sync();
  const int whole = num_tokens(a, shared) / SPLITS;
  for (int job = warp; job < whole + num_tokens(a, shared) % SPLITS; job += WARPS) {
    if (job < whole) {
      Part quarters[SPLITS];
#pragma unroll
      for (int i = 0; i < SPLITS; i++) quarters[i] = Part(shared, job * SPLITS + i);
      const int row = Unit(job * SPLITS, num_tokens(a, shared)).token;
      bf16* to = a.heads + row * DIM + blockIdx.x / SPLITS * HEAD_DIM + 2 * lane;
      *reinterpret_cast<u32*>(to) = merged_pair(quarters);
    } else {
      const int row = whole * (SPLITS - 1) + job;
      const Part part(shared, row);
      const int place = row * WORKERS + blockIdx.x;
      reinterpret_cast<float2*>(a.part)[place * 32 + lane] = part.out;
      if (lane == 0) a.ends[place] = part.end;
    }
  }
}
