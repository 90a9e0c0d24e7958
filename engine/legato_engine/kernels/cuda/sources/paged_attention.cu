// Attention of a step's tokens to paged keys and values, which tokens of one row read once.
//
// LINE_WARPS warps of a thread block share a line. PAGE is a multiple of 16, DIM and MIXED the strides of queries and output, SPLITS
// thread blocks (a cluster) of a group's head. HEADS are
// of keys and values; each serves SHARE successive heads of a query, which are SHARE successive tokens to this kernel.
//
// A group is up to 8 successive tokens of one row. Tensor cores take tiles of 16 positions: S^T = K Q^T with
// positions as rows, then O^T += V^T P^T with dimensions as rows; tokens are columns, which never mix. So a token has
// the same bits alone and in any group.
//
// Positions are taken in steps of a tile, or of two of e4m3. Step i goes to track i % 32, track v to line v % 8, of
// whose four tracks it is number v / 8. A line is (first + second) + (third + fourth), a head's result the sum of its
// lines in order: the same bits however warps share tracks. Each warp fills a ring of its own, and holds the pages of
// 32 of its line's tiles; old positions are copied while the preceding kernel still runs.
#include "paged_attention.cuh"

constexpr int MOST = 8;   // tokens of a group
constexpr int WARPS = LINE_WARPS * LINES;
constexpr int OWN = TURNS / (SPLITS * LINE_WARPS);  // tracks of a warp
static_assert(LINE_WARPS == 1 || SPLITS == 1 && LINE_WARPS == 2, "a line has one warp, or two that share it");
static_assert(PAGE % TILE == 0 && HEADS * SHARE * HEAD <= DIM, "unsupported sizes");
constexpr int KNOWN = 32 / STEP_TILES;  // steps whose pages a warp knows
constexpr bool LONG = PAGES * PAGE > STEP * LINES * KNOWN;
constexpr int AT_ONCE = HEAD == 64 && (SPLITS == 2 || (SPLITS == 4 && (LONG || NARROW))) ? 2 : 1;  // blocks of a multiprocessor

// At positions `least` to `last`; the step itself writes from `old` on.
struct Group {
  int first, size, least, last, old;
  __device__ int count(int line) const { return last / STEP < line ? 0 : (last / STEP - line) / LINES + 1; }
};

// `count` steps of a line. Lane i holds the page of tile i from step `known` on.
struct Pair {
  int index, head, last, old, count, known, page;
  i64 row;
};

// One token per lane; padding has no group.
struct Batch {
  bool real;
  int row, last, old, pairs;
  int order;  // of the lane's group, from 1
  __device__ Batch(const i64* rows, const i64* position, const i64* fresh, int tokens) {
    const int lane = threadIdx.x % 32;
    last = lane < tokens ? (int)position[lane / SHARE] : 0;
    old = lane < tokens ? (int)fresh[lane / SHARE] : 1;
    const int named = lane < tokens ? (int)rows[lane / SHARE] : -1;
    real = old <= last;
    row = real ? named : -1;
    const int before = __shfl_up_sync(~0u, row, 1);
    const u32 upto = ~0u >> (31 - lane), runs = __ballot_sync(~0u, lane == 0 || row != before);
    const int run = 31 - __clz(runs & upto);
    const u32 starts = __ballot_sync(~0u, real && (lane - run) % MOST == 0);
    order = __popc(starts & upto);
    pairs = __popc(starts) * HEADS;
  }
  __device__ Group group(int index) const {
    const int lane = threadIdx.x % 32;
    Group g;
    const u32 members = __ballot_sync(~0u, real && order == index + 1);
    const bool member = members >> lane & 1;
    g.first = __ffs(members) - 1;
    g.size = __popc(members);
    g.least = __reduce_min_sync(~0u, member ? last : 0x7fffffff);
    g.last = __reduce_max_sync(~0u, member ? last : 0);
    g.old = __reduce_min_sync(~0u, member ? old : 0x7fffffff);
    return g;
  }
  __device__ Pair pair(int index, const i64* table) const {
    const int line = threadIdx.x / 32 % LINES;
    const Group g = group(min(index, pairs - 1) / HEADS);
    Pair p;
    p.index = index;
    p.head = index % HEADS;
    p.last = g.last;
    p.old = g.old;
    p.count = g.count(line);
    p.row = __shfl_sync(~0u, row, g.first);
    p.known = 0;
    p.page = page(p, 0, table);
    return p;
  }
  // Of the warp's line.
  __device__ int page(const Pair& p, int first, const i64* table) const {
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32 % LINES;
    const int at = (line + (first + lane / STEP_TILES) * LINES) * STEP + lane % STEP_TILES * TILE;
    return p.index < pairs && at <= p.last ? (int)table[p.row * PAGES + at / PAGE] : 0;
  }
};

// Where a token's head begins in rows of `stride`.
__device__ __forceinline__ i64 place(int token, int head, int stride) {
  return (i64)(token / SHARE) * stride + (head * SHARE + token % SHARE) * HEAD;
}

// q [B, DIM]; keys and values [pages, HEADS, PAGE, HEAD], of e4m3 in units of `scales`; table [rows, PAGES]; out [B,
// MIXED]. `fresh` [B]: the step writes keys and values from this position on; beyond the token's own it marks
// padding, whose output is zeros. `tokens` is B * SHARE, at most 32.
extern "C" __global__ void __launch_bounds__(WARPS * 32, AT_ONCE) attend(
    const bf16* q, const Element* keys, const Element* values, const float* scales, const i64* rows,
    const i64* position, const i64* fresh, const i64* table, bf16* out, int tokens, int stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32, line = warp % LINES, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = SPLITS > 1 ? cluster_rank() : 0, most = min(tokens, MOST);
  Stage* rings = reinterpret_cast<Stage*>(shared);
  Stage* ring = rings + warp * stages;
  u64* full = reinterpret_cast<u64*>(rings + WARPS * stages) + warp * stages;
  Part* beside = reinterpret_cast<Part*>(reinterpret_cast<u64*>(rings + WARPS * stages) + WARPS * stages);
  // In a cluster the second buffer is for lines of this block's tokens.
  auto parts = [&](int of, int buffer) {
    if (SPLITS > 1) return reinterpret_cast<Part*>(rings + of * stages) + buffer * most;
    return beside + (buffer * WARPS + of) * most;
  };
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < stages; i++) barrier_init(full + i, 32);
    barriers_ready();
  }
  __syncwarp();
  launch_dependents();

  const int turn_begin = (SPLITS > 1 ? rank : warp / LINES) * OWN, turn_end = turn_begin + OWN;
  const int begin = blockIdx.x / SPLITS, step = gridDim.x / SPLITS;
  const Batch batch(rows, position, fresh, tokens);
  const u64 policy = stream_policy();
  const float unit = NARROW ? scale_of(HEAD) * scales[0] : scale_of(HEAD), value_unit = NARROW ? scales[1] : 1.f;

  // The producer's place.
  Pair ahead = batch.pair(begin, table), following;
  if (SPLITS == 1) following = batch.pair(begin + step, table);
  int ahead_turn = turn_begin, ahead_step = turn_begin, put = 0;
  // The pages of steps from `next_known` on, prefetched.
  int next_known = KNOWN, next_page = LONG ? batch.page(ahead, KNOWN, table) : 0;
  // The next step, unless none is left or it may not be read yet.
  auto produce = [&](bool waited) {
    while (ahead_step >= ahead.count) {
      if (ahead.index >= batch.pairs) return false;
      if (++ahead_turn == turn_end) {
        if (SPLITS > 1) {
          ahead.index = batch.pairs;
          return false;
        }
        ahead = following;
        following = batch.pair(ahead.index + step, table);
        ahead_turn = turn_begin;
        if (LONG) next_known = KNOWN, next_page = batch.page(ahead, KNOWN, table);
      }
      ahead_step = ahead_turn;
    }
    if (ahead.index >= batch.pairs) return false;
    const int at = (line + ahead_step * LINES) * STEP;
    if (!waited && at + STEP > ahead.old) return false;
    if (LONG && ahead_step / KNOWN * KNOWN != ahead.known) {
      const int known = ahead_step / KNOWN * KNOWN;
      ahead.page = known == next_known ? next_page : batch.page(ahead, known, table);
      ahead.known = known;
      next_known = known + KNOWN < ahead.count ? known + KNOWN : 0;
      next_page = batch.page(ahead, next_known, table);
    }
#pragma unroll
    for (int tile = 0; tile < STEP_TILES; tile++) {
      const int page = __shfl_sync(~0u, ahead.page, ahead_step * STEP_TILES + tile);  // modulo 32
      const int slot = (at + tile * TILE) % PAGE;
      const i64 from = (((i64)page * HEADS + ahead.head) * PAGE + slot) * HEAD + lane * RUN;
#pragma unroll
      for (int i = 0; i < TILE * RUNS / 32; i++) {
        const int here = tile * TILE + i * (32 / RUNS) + lane / RUNS, to = run_at(here, lane);
        const int bytes = at + here <= ahead.last ? 16 : 0;
        copy_run(ring[put].keys + to, keys + from + i * 32 * RUN, bytes, policy);
        copy_run(ring[put].values + to, values + from + i * 32 * RUN, bytes, policy);
      }
    }
    barrier_arrive_copied(full + put);
    if (++put == stages) put = 0;
    ahead_step += TURNS;
    return true;
  };
  int filled = 0;
  while (filled < stages && produce(false)) filled++;
  wait_previous();
  while (filled < stages && produce(true)) filled++;

  const u32 padding = __ballot_sync(~0u, lane < tokens && !batch.real);
  for (u32 left = warp == 0 ? padding : 0u; left; left &= left - 1)
    for (int head = blockIdx.x; head < HEADS; head += gridDim.x)
      for (int dim = lane * 2; dim < HEAD; dim += 64)
        *reinterpret_cast<u32*>(out + place(__ffs(left) - 1, head, MIXED) + dim) = 0u;

  auto group_of = [&](int index) { return batch.group(min(index, batch.pairs - 1) / HEADS); };
  auto load_query = [&](int index, const Group& group) {
    Query query = {};
    if (index < batch.pairs && g < group.size) {
      const bf16* from = q + place(group.first + g, index % HEADS, DIM) + t * 16;
#pragma unroll
      for (int i = 0; i < HALVES; i++) {
        query.low[i] = as_cached(load_fresh(from + i * 64));
        query.high[i] = as_cached(load_fresh(from + i * 64 + 8));
      }
    }
    return query;
  };
  int take = 0, buffer = 0;
  u32 phase = 0;
  Group group = group_of(begin);
  Query query = load_query(begin, group);
  for (int index = begin, round = 0; index < batch.pairs; index += step, round++) {
    const int count = group.count(line);
    const int left_last = __shfl_sync(~0u, batch.last, group.first + 2 * t);
    const int right_last = __shfl_sync(~0u, batch.last, group.first + 2 * t + 1);
    const int left = 2 * t < group.size ? left_last + 1 : 0, right = 2 * t + 1 < group.size ? right_last + 1 : 0;
    Parts own, early;
    for (int turn = turn_begin; turn < turn_end; turn++) {
      Parts track;
      for (int i = turn; i < count; i += TURNS) {
        const int first = (line + i * LINES) * STEP;
        barrier_wait(full + take, phase);
        if (group.least < group.last && first + STEP > group.least + 1) clean(ring[take].values);
        attend_step(track, ring[take], query, unit, left - first, right - first);
        __syncwarp();
        produce(true);
        if (++take == stages) take = 0, phase ^= 1;
      }
      if (OWN == 4 && turn == turn_begin + 2) {
        early = own;
        own = track;
      } else {
        own = turn == turn_begin ? track : merged(own, track);
      }
    }
    if (OWN == 4) own = merged(early, own);
    own.store(parts(warp, buffer), group.size);
    if constexpr (SPLITS > 1) {
      // A block adds up every SPLITS-th token's lines over the cluster.
      cluster_sync();
      // Half a warp has a token: two are in flight.
      const int l = lane % 16;
      for (int token = lane / 16 * SPLITS + rank; token < group.size; token += 2 * SPLITS) {
        const Part& part = parts(warp, 0)[token];
        Part& whole = parts(warp, 1)[token / SPLITS];
#pragma unroll
        for (int dim = l * 4; dim < HEAD; dim += 64) {
          Quad of[SPLITS];
#pragma unroll
          for (int i = 0; i < SPLITS; i++) of[i] = Quad{load_peer(part.out + dim, i), load_peer2(&part.top, i)};
          Quad sum = merged(of[0], of[1]);
          if constexpr (SPLITS == 4) sum = merged(sum, merged(of[2], of[3]));
          *reinterpret_cast<float4*>(whole.out + dim) = sum.out;
          if (dim == 0) *reinterpret_cast<float2*>(&whole.top) = sum.end;
        }
      }
      __syncwarp();
      cluster_arrive();  // the peers' results have been read
    }
    const Group later = group_of(index + step);
    query = load_query(index + step, later);
    __syncthreads();
    // A warp per token, another each time.
    const int token = (warp + round) % WARPS * SPLITS + rank;
    if (token < group.size) {
#pragma unroll
      for (int dim = lane * 2; dim < HEAD; dim += 64) {
        auto slice = [&](int of) {
          const Part& part = SPLITS > 1 ? parts(of, 1)[token / SPLITS] : parts(of, buffer)[token];
          return Slice{*reinterpret_cast<const float2*>(part.out + dim), *reinterpret_cast<const float2*>(&part.top)};
        };
        Slice lines[LINES];
#pragma unroll
        for (int i = 0; i < LINES; i++) lines[i] = LINE_WARPS == 1 ? slice(i) : merged(slice(i), slice(i + LINES));
        const float2 value = result_of(lines);
        bf16* target = out + place(group.first + token, index % HEADS, MIXED) + dim;
        *reinterpret_cast<u32*>(target) = pack(value.x * value_unit, value.y * value_unit);
      }
    }
    group = later;
    if (SPLITS == 1) {
      buffer ^= 1;
    } else {
      cluster_wait();  // no block exits while a peer reads its memory
      if (index + step < batch.pairs) {
        __syncthreads();  // nor refills its ring while a warp reads it
        ahead = batch.pair(index + step, table);
        ahead_turn = ahead_step = turn_begin;
        if (LONG) next_known = KNOWN, next_page = batch.page(ahead, KNOWN, table);
        for (filled = 0; filled < stages && produce(true);) filled++;
      }
    }
  }
}
