// Attention by tensor cores. A worker has a head and a quarter of every row's pages: every SPLITS-th. MERGE merges the softmax
// partials of a token's quarters; each worker of the head merges every SPLITS-th token.
//
// A unit's tokens share the reads of pages as columns of the same products: with DRAFTS the tokens of a row, else those of rows
// that have leading pages in common. Common pages come first; each row's tracks continue from there with the row's own pages. Each
// page is processed by one warp; warps alternate by pages. A token's result depends on its own query, keys, values and position
// only: positions in a page that it must not see have weight 0.
//
// In a warp lane = 4g + t. A lane has the scores of the unit's token g, at positions 2t, 2t + 1, 2t + 8, 2t + 9 of a page, and the
// sums of values of tokens 2t and 2t + 1, in dimensions 8g.. .
#pragma once
#include "matrix.cuh"
#include "softmax_parts.cuh"
#include "units.cuh"

constexpr int OWN_LINES = LINES / SPLITS;  // of a worker
static_assert(OWN_LINES * TURNS == WARPS, "a warp has a track");
static_assert(STAGE_PAGES <= WARPS, "a page of a stage for each warp");

// Dimensions 16t.. of the query of token g; zero without such a token.
struct Queries {
  uint4 low, high;
  __device__ __forceinline__ void load(const Arguments& a, const Unit& unit) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bool live = g < unit.count;
    const bf16* from = a.q + (unit.token + (live ? g : 0)) * DIM + blockIdx.x / SPLITS * HEAD_DIM + t * 16;
    low = live ? load_fresh(from) : uint4{0, 0, 0, 0}, high = live ? load_fresh(from + 8) : uint4{0, 0, 0, 0};
  }
};

// A page in the ring, from position `begin` on.
struct Page {
  const unsigned char* keys;
  int begin;

  // Products of query g with the keys at positions 8 `half` + 2t and the next one. Even positions are read from their first piece
  // on and odd ones from their second, which avoids bank conflicts. Both halves of the queries are multiplied with either piece,
  // as rows g and g + 8 of a product, and each position uses the matching ones.
  __device__ __forceinline__ float2 multiply(const Queries& q, int half) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint4* key = reinterpret_cast<const uint4*>(keys) + (half * 8 + g) * (HEAD_DIM / 8) + 2 * t;
    const bool odd = g % 2;
    const uint4 first = key[odd], second = key[!odd];
    float4 sums = {0.f, 0.f, 0.f, 0.f}, more = {0.f, 0.f, 0.f, 0.f};
    mma(sums, q.low.x, q.high.x, q.low.y, q.high.y, first.x, first.y);
    mma(more, q.low.x, q.high.x, q.low.y, q.high.y, second.x, second.y);
    mma(sums, q.low.z, q.high.z, q.low.w, q.high.w, first.z, first.w);
    mma(more, q.low.z, q.high.z, q.low.w, q.high.w, second.z, second.w);
    return float2{sums.x + more.z, more.y + sums.w};
  }

  // Dimensions 8g.. of the values at a position. Unwritten positions must be zero: weight 0 times NaN is not 0.
  __device__ __forceinline__ uint4 value(int position) const {
    const uint4* values = reinterpret_cast<const uint4*>(keys + PAGE_BYTES / 2) + threadIdx.x % 32 / 4;
    return values[position * (HEAD_DIM / 8)];
  }
};

// A unit's pages of the quarter belong to WARPS tracks in turns, by their index in the row. Which warp has a track changes no
// result. The assignment rotates by unit: otherwise the same warps would have one page more in every unit.
__device__ __forceinline__ int track_of(int index) { return threadIdx.x / 32 - 5 * index & WARPS - 1; }

// Softmax partials of each track of a token; the memory has sums of products at other times.
using Parts = float2[WARPS][HEAD_DIM / 2];
__device__ __forceinline__ Parts* parts_of(Shared& shared) {
  static_assert(sizeof(shared.sums) >= sizeof(Parts) * TOKENS, "the parts of all tokens");
  return reinterpret_cast<Parts*>(&shared.sums[0][0][0][0]);
}

// A warp's online softmax of the unit's tokens: the highest score of token g, the sums of weights of tokens 2t and 2t + 1.
struct Softmax {
  float top = -INFINITY;
  float2 sum = {0.f, 0.f};
  float4 out[4] = {};  // .x and .y: dimension 8g + 2i of tokens 2t and 2t + 1; .z and .w: dimension 8g + 2i + 1

  // `own`: token g's position, the last that it attends to; -1 without such a token.
  __device__ __forceinline__ void add(const Queries& q, const Page& page, int own) {
    const int t = threadIdx.x % 4;
    const float2 near = page.multiply(q, 0), far = page.multiply(q, 1);
    float scores[4] = {near.x, near.y, far.x, far.y};
    float highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int position = page.begin + i / 2 * 8 + t * 2 + i % 2;
      scores[i] = position <= own ? scores[i] : -INFINITY;
      highest = fmaxf(highest, scores[i]);
    }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    highest = fmaxf(top, highest * scale_of(HEAD_DIM));
    const float base = base_of(highest), scale = power_of_two(top - base);
    top = highest;
    u32 weights[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
      weights[i] = pack(weight_of(scores[2 * i], scale_of(HEAD_DIM), base), weight_of(scores[2 * i + 1], scale_of(HEAD_DIM), base));
    const float left = __shfl_sync(~0u, scale, t * 8), right = __shfl_sync(~0u, scale, t * 8 + 4);
    // The sum is one more dimension, whose values are all 1.
    constexpr u32 ONES = 0x3f803f80u;
    float4 all = {sum.x * left, sum.y * right, 0.f, 0.f};
    mma(all, ONES, ONES, ONES, ONES, weights[0], weights[1]);
    sum = float2{all.x, all.y};
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = page.value(i / 2 * 8 + t * 2 + i % 2);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 a = (&v[0].x)[i], b = (&v[1].x)[i], c = (&v[2].x)[i], d = (&v[3].x)[i];
      out[i] = float4{out[i].x * left, out[i].y * right, out[i].z * left, out[i].w * right};
      mma(out[i], __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
          __byte_perm(c, d, 0x7632), weights[0], weights[1]);
    }
  }

  // Load the partials of one token from `store`.
  __device__ __forceinline__ void load(Shared& shared, int token, int track) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (g == 0) top = shared.ends[token][track].x;
    if (t) return;
    sum.x = shared.ends[token][track].y;
    const Parts& parts = parts_of(shared)[token];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 own = parts[track][g * 4 + i];
      out[i].x = own.x, out[i].z = own.y;
    }
  }

  // Store the partials, for the merge of the worker's warps or for the rows' own pages.
  __device__ __forceinline__ void store(Shared& shared, const Unit& unit, int track) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Parts* parts = parts_of(shared);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (t * 2 < unit.count) parts[unit.token + t * 2][track][g * 4 + i] = float2{out[i].x, out[i].z};
      if (t * 2 + 1 < unit.count) parts[unit.token + t * 2 + 1][track][g * 4 + i] = float2{out[i].y, out[i].w};
    }
    if (t == 0 && g < unit.count) shared.ends[unit.token + g][track].x = top;
    if (g == 0 && t * 2 < unit.count) shared.ends[unit.token + t * 2][track].y = sum.x;
    if (g == 0 && t * 2 + 1 < unit.count) shared.ends[unit.token + t * 2 + 1][track].y = sum.y;
  }
};

// Keys and values of this step in a page, which QKV wrote after the page was copied. They are written to the copy in the ring, with
// zero values at later positions, whose memory is undefined. A lane has dimensions 2 lane and 2 lane + 1. A row's tokens are in one
// page of a quarter, because a step has fewer tokens than the other quarters have positions.
struct Written {
  __device__ __forceinline__ static void put(unsigned char* to, int i, u32 key, u32 value) {
    *reinterpret_cast<u32*>(to + i * (HEAD_DIM * 2)) = key;
    *reinterpret_cast<u32*>(to + PAGE_BYTES / 2 + i * (HEAD_DIM * 2)) = value;
  }
  static constexpr int MOST = DRAFTS ? UNIT_TOKENS : 1;  // that registers hold; a row of several units may have more
  int page, first, end;  // by the quarter's count of pages; of the page's positions
  i64 from;              // the page's first position
  u32 keys[MOST], values[MOST];
  __device__ __forceinline__ void load(
      const Arguments& a, const Shared& shared, int layer, int index, int fresh, int last, int own, int track) {
    static_assert(TOKENS < (SPLITS - 1) * PAGE, "of a quarter one page");
    page = own - 1;
    const int begin = (blockIdx.x % SPLITS + SPLITS * page) * PAGE;
    first = max(0, fresh - begin), end = own ? min(PAGE, last + 1 - begin) : 0;
    if (page % WARPS != track) end = 0;
    if (first >= end) return;
    const i64 place = (i64)layer * a.layer_pages + shared.pages[index][page];
    from = (place * HEADS + blockIdx.x / SPLITS) * PAGE * HEAD_DIM + threadIdx.x % 32 * 2;
#pragma unroll
    for (int i = 0; i < MOST; i++)
      if (first + i < end) {
        const i64 at = from + (first + i) * HEAD_DIM;
        keys[i] = load_fresh_u32(a.keys + at), values[i] = load_fresh_u32(a.values + at);
      }
  }
  __device__ __forceinline__ void store(const Arguments& a, unsigned char* to) const {
    to += threadIdx.x % 32 * 4;
    for (int i = end; i < PAGE; i++) *reinterpret_cast<u32*>(to + i * (HEAD_DIM * 2) + PAGE_BYTES / 2) = 0;
    to += first * (HEAD_DIM * 2);
#pragma unroll
    for (int i = 0; i < MOST; i++)
      if (first + i < end) put(to, i, keys[i], values[i]);
    if (DRAFTS && TOKENS > MOST)
#pragma unroll 1
      for (int i = MOST; first + i < end; i++) {
        const i64 at = from + (first + i) * HEAD_DIM;
        put(to, i, load_fresh_u32(a.keys + at), load_fresh_u32(a.values + at));
      }
    order_shared_copies();  // the next copy to the stage comes after these
    __syncwarp();
  }
};

// Pages of a unit from `begin` to `end`, as load_pages copies them; `mine`: the warp's track.
__device__ __forceinline__ void attend_pages(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, const Queries& q, Softmax& track, int layer, int index,
    int mine, const Unit& unit, int begin, int end) {
  const int g = threadIdx.x % 32 / 4, quarter = blockIdx.x % SPLITS;
  const int position = g < unit.count ? position_of(shared, unit.token + g, at.step) : -1;
  const int last = last_position(shared, unit, at.step);
  Written written;
  written.load(a, shared, layer, index, first_position(shared, unit.token, at.step), last, end, mine);
  // Visit the warp's pages; other warps process those between. The warp of a stage's first page also releases the stage for the
  // warps that have no page of it.
  u32 stage = 0;
  for (u32 i = mine - begin & WARPS - 1; i < end - begin; i += WARPS) {
    const u32 place = i % STAGE_PAGES, others = min((u32)STAGE_PAGES - 1, end - begin - 1 - (i - place));
    ring.skip(i / STAGE_PAGES - stage), stage = i / STAGE_PAGES;
    const int which = begin + i;
    const Page page = {ring.get_ahead(a, at) + place * PAGE_BYTES, (quarter + SPLITS * which) * PAGE};
    if (which == written.page && written.first < written.end) written.store(a, const_cast<unsigned char*>(page.keys));
    track.add(q, page, position);
    ring.release_for(a, __float_as_uint(track.out[0].x), place ? 1 : WARPS - others);
  }
  ring.skip((u32)(end - begin + STAGE_PAGES - 1) / STAGE_PAGES - stage);
}

// Attend to pages that rows have in common.
__device__ __forceinline__ void attend_common(const Arguments& a, Place& at, Shared& shared, Ring& ring, int layer) {
  for (int index = 0; index < shared.num_units; index++) {
    const Unit unit = unit_of(shared, index);
    if (!unit.common) continue;
    const int mine = track_of(index);
    Queries q;
    q.load(a, unit);
    Softmax track;
    attend_pages(a, at, shared, ring, q, track, layer, unit.token, mine, unit, 0, unit.common);
    track.store(shared, unit, mine);
  }
  __syncwarp();
  workers_sync();
}

// Attend to all pages, in the order of load_common_pages and load_own_pages. Queries are prefetched.
__device__ __forceinline__ void attend(const Arguments& a, Place& at, Shared& shared, Ring& ring, int layer) {
  const int owners = num_owners(a, shared);
  Unit next = owner_of(shared, 0);
  Queries ahead;
  ahead.load(a, next);  // of rows that are there even if no owner is: a branch costs the other builds registers
  if (shares_pages(a, shared)) attend_common(a, at, shared, ring, layer);
  for (int index = 0; index < owners; index++) {
    const Queries q = ahead;
    const Unit unit = next;
    next = owner_of(shared, index + 1);
    if (index + 1 < owners) ahead.load(a, next);
    const int mine = track_of(index), end = pages_of(shared, unit, at.step);
    Softmax track;
    // Pages in common have left a track, which goes on if the warp has pages of the row's own.
    const bool begins = DRAFTS || unit.common == 0, has_pages = (mine - unit.common & WARPS - 1) < end - unit.common;
    if (!begins && has_pages) track.load(shared, unit.token, mine);
    attend_pages(a, at, shared, ring, q, track, layer, index, mine, unit, unit.common, end);
    if (begins || has_pages) track.store(shared, unit, mine);
  }
}

__device__ __forceinline__ void run_attend(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, const Instruction& it) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  attend(a, at, shared, ring, it.layer);
  workers_sync();
  // A quarter has OWN_LINES lines. Its pages belong to lines in turns, as to tracks.
  const Parts* parts = parts_of(shared);
  for (int i = warp; i < num_tokens(a, shared) * OWN_LINES; i += WARPS) {
    const int token = i / OWN_LINES, line = i % OWN_LINES, place = (token * WORKERS + blockIdx.x) * OWN_LINES + line;
    Slice tracks[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const int from = turn * OWN_LINES + line;
      tracks[turn] = Slice{parts[token][from][lane], shared.ends[token][from]};
    }
    const Slice whole = line_of(tracks);
    reinterpret_cast<float2*>(a.part)[place * 32 + lane] = whole.out;
    if (lane == 0) a.ends[place] = whole.end;
  }
}

__device__ __forceinline__ void run_merge(const Arguments& a, const Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x / SPLITS;
  for (int token = blockIdx.x % SPLITS + warp * SPLITS; token < num_tokens(a, shared); token += WARPS * SPLITS) {
    Slice lines[LINES];
#pragma unroll
    for (int i = 0; i < LINES; i++) {
      const int place = (token * WORKERS + head * SPLITS + i % SPLITS) * OWN_LINES + i / SPLITS;
      lines[i].end = load_fresh_float2(a.ends + place);
      lines[i].out = load_fresh_float2(reinterpret_cast<const float2*>(a.part) + place * 32 + lane);
    }
    const float2 out = result_of(lines);
    *reinterpret_cast<u32*>(a.heads + place_of(token, head * HEAD_DIM + 2 * lane)) = pack(out.x, out.y);
  }
}
