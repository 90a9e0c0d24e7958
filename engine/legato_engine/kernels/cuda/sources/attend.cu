// Attention of single tokens to paged keys and values.
//
// Constants: HEADS heads of 64, PAGE positions per page (a multiple of 16), PAGES pages of a row's table,
// DIM = HEADS * 64, MIXED the stride of the output, SPLITS thread blocks (a cluster) per head of a token.
//
// Positions are taken in steps of 16. Step i goes to track i % 32. A head's result is the sum of its
// tracks in a fixed order: so it has the same bits however the tracks are spread. Track v belongs to warp
// v % 8; a thread block has all of a head's tracks, or with SPLITS a fourth or a half of them.
// Each warp keeps a ring of its own full, across heads; old positions are copied while the kernel in front
// still runs.
#include "common.cuh"

constexpr int HEAD = 64;
constexpr int WARPS = 8;
constexpr int STEP = 16;
constexpr int TRACKS = 32;
constexpr int GROUPS = TRACKS / WARPS;  // of tracks that a warp has in all thread blocks together
constexpr int OWN = GROUPS / SPLITS;    // and in one
constexpr float SCALE = 0.125f * 1.4426950408889634f;  // 1 / sqrt(64), for powers of two
static_assert(PAGE % STEP == 0 && HEADS * HEAD == DIM, "unsupported sizes");
static_assert(PAGES * PAGE <= STEP * WARPS * 32, "a lane knows the page of one step");

// What a softmax over some positions leaves: its sum of values is still to be divided by `sum`.
struct Part {
  float out[HEAD];
  float top, sum;
};

struct Stage {
  bf16 keys[STEP * HEAD], values[STEP * HEAD];
};

// One head of one token, as a warp sees it: `count` steps, lane i knows the page of its i-th.
struct Pair {
  int index, token, head, last, old, count;
  i64 page;
};

// The tokens of the batch, one per lane.
struct Batch {
  int last, old, pairs;
  i64 row;
  __device__ Batch(const i64* rows, const i64* position, const i64* fresh, int batch) {
    const int lane = threadIdx.x % 32;
    const bool real = lane < batch;
    last = real ? (int)position[lane] : 0;
    old = real ? (int)fresh[lane] : 0;
    row = real ? rows[lane] : 0;
    pairs = batch * HEADS;
  }
  __device__ Pair pair(int index, const i64* table) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Pair p;
    p.index = index;
    p.token = min(index, pairs - 1) / HEADS;
    p.head = index % HEADS;
    p.last = __shfl_sync(~0u, last, p.token);
    p.old = __shfl_sync(~0u, old, p.token);
    p.count = max(0, (p.last / STEP - warp) / WARPS + 1);
    if (p.last / STEP < warp) p.count = 0;
    const i64 r = __shfl_sync(~0u, row, p.token);
    const int at = (warp + lane * WARPS) * STEP;
    p.page = at <= p.last ? table[r * PAGES + at / PAGE] : 0;
    return p;
  }
};

// Adds a part, weighted for the common `all`; a part without positions adds nothing.
__device__ __forceinline__ void add_part(float2& value, float& total, float top, float all, float sum, const float* out) {
  const float weight = top == -INFINITY ? 0.f : exp2f(top - all);
  total += weight * sum;
  value.x += weight * out[0];
  value.y += weight * out[1];
}

// q [B, DIM]; keys and values [pages, HEADS, PAGE, 64]; row, position [B]; table [rows, PAGES]; out [B, MIXED].
// `fresh` [B]: from this position on, keys and values are written by the step itself. At most 32 tokens.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) attend(
    const bf16* q, const bf16* keys, const bf16* values, const i64* rows, const i64* position, const i64* fresh,
    const i64* table, bf16* out, int tokens, int stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sub = lane / 8, column = lane % 8 * 8;
  Stage* ring = reinterpret_cast<Stage*>(shared) + warp * stages;
  u64* full = reinterpret_cast<u64*>(shared + sizeof(Stage) * WARPS * stages) + warp * stages;
  __shared__ __align__(16) Part parts[2][GROUPS][WARPS], groups[2][GROUPS];
  if (lane == 0) {
    for (int i = 0; i < stages; i++) barrier_init(full + i, 1);
    barriers_ready();
  }
  __syncwarp();
  launch_dependents();

  const int rank = SPLITS > 1 ? cluster_rank() : 0, group_begin = rank * OWN, group_end = group_begin + OWN;
  const int begin = blockIdx.x / SPLITS, step = gridDim.x / SPLITS;
  const Batch batch(rows, position, fresh, tokens);
  const u64 policy = stream_policy();

  // The producer's place: step `ahead_step` of this warp in track group `ahead_group` of a pair.
  Pair ahead = batch.pair(begin, table), following = batch.pair(begin + step, table);
  int ahead_group = group_begin, ahead_step = group_begin, put = 0;
  // Copies the next step into the slot that is free, unless none is left or it may not be read yet.
  auto produce = [&](bool waited) {
    while (ahead_step >= ahead.count) {
      if (ahead.index >= batch.pairs) return false;
      if (++ahead_group == group_end) {
        ahead = following;
        following = batch.pair(ahead.index + step, table);
        ahead_group = group_begin;
      }
      ahead_step = ahead_group;
    }
    if (ahead.index >= batch.pairs) return false;
    const int at = (warp + ahead_step * WARPS) * STEP;
    if (!waited && at + STEP > ahead.old) return false;
    const i64 page = __shfl_sync(~0u, ahead.page, ahead_step);
    if (lane == 0) {
      const i64 from = ((page * HEADS + ahead.head) * PAGE + at % PAGE) * HEAD;
      barrier_expect(full + put, sizeof(Stage));
      copy_bulk(ring[put].keys, keys + from, sizeof(ring[put].keys), full + put, policy);
      copy_bulk(ring[put].values, values + from, sizeof(ring[put].values), full + put, policy);
    }
    if (++put == stages) put = 0;
    ahead_step += GROUPS;
    return true;
  };
  int filled = 0;
  while (filled < stages && produce(false)) filled++;
  wait_previous();
  while (filled < stages && produce(true)) filled++;

  auto load_query = [&](int index) {
    return index < batch.pairs ? load_fresh(q + (i64)index * HEAD + column) : uint4{0, 0, 0, 0};
  };
  int take = 0, buffer = 0;
  u32 phase = 0;
  uint4 packed = load_query(begin);
  for (int index = begin; index < batch.pairs; index += step) {
    const uint4 later = load_query(index + step);
    const int token = index / HEADS, last = __shfl_sync(~0u, batch.last, token);
    const int count = last / STEP < warp ? 0 : (last / STEP - warp) / WARPS + 1;
    float query[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      query[2 * j] = low_float((&packed.x)[j]) * SCALE;
      query[2 * j + 1] = high_float((&packed.x)[j]) * SCALE;
    }
    for (int group = group_begin; group < group_end; group++) {
      float mixed[8] = {}, top = -INFINITY, sum = 0.f;
      for (int i = group; i < count; i += GROUPS) {
        const int first = (warp + i * WARPS) * STEP;
        barrier_wait(full + take, phase);
        float score[STEP / 4], most = top;
#pragma unroll
        for (int k = 0; k < STEP / 4; k++) {
          const int here = k * 4 + sub;
          const uint4 pairs = *reinterpret_cast<const uint4*>(ring[take].keys + here * HEAD + column);
          float dot = 0.f;
#pragma unroll
          for (int j = 0; j < 4; j++)
            dot += query[2 * j] * low_float((&pairs.x)[j]) + query[2 * j + 1] * high_float((&pairs.x)[j]);
          score[k] = dot;
        }
#pragma unroll
        for (int lanes = 4; lanes; lanes >>= 1)
#pragma unroll
          for (int k = 0; k < STEP / 4; k++) score[k] += __shfl_xor_sync(~0u, score[k], lanes);
#pragma unroll
        for (int k = 0; k < STEP / 4; k++) {
          if (first + k * 4 + sub > last) score[k] = -INFINITY;
          most = fmaxf(most, score[k]);
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
        const float scale = exp2f(top - most);  // a step's first position is always seen: `most` is finite
        top = most;
        sum *= scale;
#pragma unroll
        for (int j = 0; j < 8; j++) mixed[j] *= scale;
#pragma unroll
        for (int k = 0; k < STEP / 4; k++) {
          const int here = k * 4 + sub;
          // What lies behind the last position may be anything, and 0 times infinity is no number.
          const uint4 pairs = first + here <= last
                                  ? *reinterpret_cast<const uint4*>(ring[take].values + here * HEAD + column)
                                  : uint4{0, 0, 0, 0};
          const float p = exp2f(score[k] - top);
          sum += p;
#pragma unroll
          for (int j = 0; j < 4; j++) {
            mixed[2 * j] += p * low_float((&pairs.x)[j]);
            mixed[2 * j + 1] += p * high_float((&pairs.x)[j]);
          }
        }
        __syncwarp();
        produce(true);
        if (++take == stages) take = 0, phase ^= 1;
      }
#pragma unroll
      for (int lanes = 8; lanes <= 16; lanes <<= 1) {
        sum += __shfl_xor_sync(~0u, sum, lanes);
#pragma unroll
        for (int j = 0; j < 8; j++) mixed[j] += __shfl_xor_sync(~0u, mixed[j], lanes);
      }
      Part& part = parts[buffer][group][warp];
      if (sub == 0) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) *reinterpret_cast<float2*>(part.out + column + j) = float2{mixed[j], mixed[j + 1]};
        if (lane == 0) part.top = top, part.sum = sum;
      }
    }
    // A group's tracks are added up in their order, a warp a group; then the groups.
    __syncthreads();
    if (warp < OWN) {
      const Part* tracks = parts[buffer][group_begin + warp];
      float all = -INFINITY, total = 0.f;
      float2 value = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < WARPS; i++) all = fmaxf(all, tracks[i].top);
#pragma unroll
      for (int i = 0; i < WARPS; i++) add_part(value, total, tracks[i].top, all, tracks[i].sum, tracks[i].out + lane * 2);
      Part& group = groups[buffer][group_begin + warp];
      *reinterpret_cast<float2*>(group.out + lane * 2) = value;
      if (lane == 0) group.top = all, group.sum = total;
    }
    if (SPLITS > 1) cluster_sync(); else __syncthreads();
    if (rank == 0 && warp == WARPS - 1) {
      float2 ends[GROUPS], values[GROUPS], value = {0.f, 0.f};
      float all = -INFINITY, total = 0.f;
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        const Part& group = groups[buffer][i];
        const float *end = &group.top, *from = group.out + lane * 2;
        ends[i] = SPLITS > 1 ? load_peer2(end, i / OWN) : *reinterpret_cast<const float2*>(end);
        values[i] = SPLITS > 1 ? load_peer2(from, i / OWN) : *reinterpret_cast<const float2*>(from);
        all = fmaxf(all, ends[i].x);
      }
#pragma unroll
      for (int i = 0; i < GROUPS; i++) add_part(value, total, ends[i].x, all, ends[i].y, &values[i].x);
      bf16* target = out + (i64)token * MIXED + index % HEADS * HEAD + lane * 2;
      *reinterpret_cast<u32*>(target) = pack(value.x / total, value.y / total);
    }
    if (SPLITS > 1) cluster_sync();  // nobody leaves, nor writes again, while a peer reads
    buffer ^= 1;
    packed = later;
  }
}
