// Attention of one token per row: a worker has a head and every SPLITS-th page of each row. What its softmax leaves
// goes to the workers of OUT, which merge the quarters.
//
// In a warp lane = 4p + e: of a stage each warp has 8 positions, and lane (p, e) has dimensions 8e.. and 32 + 8e.. of
// position p. Results depend on a row's own keys, values and position alone.
#pragma once
#include "matrix.cuh"

constexpr float SCALE = 0.125f * 1.4426950408889634f;  // 1 / sqrt(64), for powers of two

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

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

// The step's own position, whose key and value QKV wrote.
__device__ __forceinline__ void attend_newest(const Arguments& a, Softmax& track, const bf16* q, i64 slot) {
  const int lane = threadIdx.x % 32;
  const u32 query = load_fresh_u32(q + 2 * lane), key = load_fresh_u32(a.keys + slot + 2 * lane);
  const u32 value = load_fresh_u32(a.values + slot + 2 * lane);
  track.top = warp_sum(low_float(query) * low_float(key) + high_float(query) * high_float(key)) * SCALE;
  track.sum = lane < 4 ? 1.f : 0.f;
  track.out = float2{low_float(value), high_float(value)};
}

// 8 positions of a stage, of which the first `count` are there.
__device__ __forceinline__ void attend_positions(
    Softmax& track, const unsigned char* keys, const unsigned char* values, const float (&q)[16], int count) {
  const int lane = threadIdx.x % 32, p = lane / 4, e = lane % 4;
  const uint4* key = reinterpret_cast<const uint4*>(keys + p * (HEAD_DIM * 2));
  const bool odd = p % 2;  // the halves in another order: no bank conflicts
  const uint4 first = key[e + (odd ? 4 : 0)], second = key[e + (odd ? 0 : 4)];
  u32 v[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    v[i] = i < count ? *reinterpret_cast<const u32*>(values + i * (HEAD_DIM * 2) + lane * 4) : 0u;
  float score = dot8(odd ? second : first, q) + dot8(odd ? first : second, q + 8);
  score += __shfl_xor_sync(~0u, score, 1);
  score += __shfl_xor_sync(~0u, score, 2);
  score = p < count ? score * SCALE : -INFINITY;
  float top = fmaxf(score, track.top);
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
  const float scale = power_of_two(track.top - top), weight = power_of_two(score - top);
  track.top = top;
  track.sum = track.sum * scale + weight;
  track.out.x *= scale, track.out.y *= scale;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float w = __shfl_sync(~0u, weight, i * 4);
    track.out.x += w * low_float(v[i]);
    track.out.y += w * high_float(v[i]);
  }
}

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

__device__ __forceinline__ void attend_row(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, int layer, int row) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, e = lane % 4;
  const int head = blockIdx.x / SPLITS, quarter = blockIdx.x % SPLITS;
  const int position = a.position[row] + at.step, newest = position / PAGE;
  const bf16* query = a.q + row * DIM + head * HEAD_DIM;
  const uint4 low = load_fresh(query + e * 8), high = load_fresh(query + 32 + e * 8);
  Softmax track;
  if (warp == 0 && newest % SPLITS == quarter) {
    const i64 page = (i64)layer * a.layer_pages + a.pages[row * a.row_pages + newest];
    attend_newest(a, track, query, ((page * HEADS + head) * PAGE + position % PAGE) * HEAD_DIM);
  }
  float q[16];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    q[2 * i] = low_float((&low.x)[i]), q[2 * i + 1] = high_float((&low.x)[i]);
    q[8 + 2 * i] = low_float((&high.x)[i]), q[9 + 2 * i] = high_float((&high.x)[i]);
  }
  const int own = own_pages(position, quarter);
  for (int first = 0; first < own; first += STAGE_PAGES) {
    const unsigned char* stage = ring.get(a, at);
    const int which = first + warp / 2, begin = (quarter + SPLITS * which) * PAGE + warp % 2 * 8;
    const unsigned char* keys = stage + warp / 2 * PAGE_BYTES + warp % 2 * (8 * HEAD_DIM * 2);
    if (warp / 2 < STAGE_PAGES && which < own && begin < position)
      attend_positions(track, keys, keys + PAGE_BYTES / 2, q, min(8, position - begin));
    ring.release();
  }
  track.sum += __shfl_xor_sync(~0u, track.sum, 4);
  track.sum += __shfl_xor_sync(~0u, track.sum, 8);
  track.sum += __shfl_xor_sync(~0u, track.sum, 16);
  auto& parts = shared.parts[row % 2];
  parts[warp][lane] = track.out;
  if (lane == 0) parts[warp][HEAD_DIM / 2] = float2{track.top, track.sum};
  workers_sync();
  if (warp == 0) {
    float2 ends[WARPS], out = {0.f, 0.f};
    float weights[WARPS], top, sum;
#pragma unroll
    for (int i = 0; i < WARPS; i++) ends[i] = parts[i][HEAD_DIM / 2];
    merge(ends, weights, top, sum);
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const float2 part = parts[i][lane];
      out.x += weights[i] * part.x, out.y += weights[i] * part.y;
    }
    const int index = row * WORKERS + blockIdx.x;
    reinterpret_cast<float2*>(a.part)[index * (HEAD_DIM / 2) + lane] = out;
    if (lane == 0) a.ends[index] = float2{top, sum};
  }
}

__device__ __forceinline__ void run_attend(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, const Instruction& it) {
  for (int row = 0; row < a.rows; row++) attend_row(a, at, shared, ring, it.layer, row);
}

// A warp's head of each chunk, merged of its quarters: as many tokens and chunks at once as registers hold.
__device__ __forceinline__ void merge_heads(const Arguments& a, bf16 (*merged)[HEAD_DIM], int chunk, int token) {
  const int lane = threadIdx.x % 32, head = chunk * (CHUNK / HEAD_DIM) + threadIdx.x / 32;
  const int index = token * WORKERS + head * SPLITS;
  float2 ends[SPLITS], parts[SPLITS], out = {0.f, 0.f};
  float weights[SPLITS], top, sum;
#pragma unroll
  for (int i = 0; i < SPLITS; i++) {
    ends[i] = load_fresh_float2(a.ends + index + i);
    parts[i] = load_fresh_float2(reinterpret_cast<const float2*>(a.part) + (index + i) * (HEAD_DIM / 2) + lane);
  }
  merge(ends, weights, top, sum);
#pragma unroll
  for (int i = 0; i < SPLITS; i++) out.x += weights[i] * parts[i].x, out.y += weights[i] * parts[i].y;
  *reinterpret_cast<u32*>(&merged[token][2 * lane]) = pack(out.x / sum, out.y / sum);
}

__device__ __forceinline__ void run_out(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, float4 (&sum)[TILES], const Instruction& it) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = it.block * BLOCK + g;
  const float* bias = a.out_bias + it.layer * DIM + row;
  float base[2][2];
  const bf16* from = it.src == SOURCE_X0 ? a.x0 : a.x1;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = warp * 8 + t * 2 + j;
    const bool live = warp < TILES && token < a.rows;
    const bf16* x = it.src == SOURCE_EMBED ? a.embedding + (live ? (i64)shared.token[token] * DIM : 0)
                                           : from + (live ? token * DIM : 0);
    base[j][0] = live ? bias[0] + to_float(load_fresh_bf16(x + row)) : 0.f;
    base[j][1] = live ? bias[8] + to_float(load_fresh_bf16(x + row + 8)) : 0.f;
  }
  // Each warp's sums are free: the heads that it merges lie there until it multiplies them.
  auto* merged = reinterpret_cast<bf16(*)[HEAD_DIM]>(&shared.sums[warp][0][0][0]);
  static_assert(BLOCKS_AT_ONCE * TILES * 512 >= TOKENS * HEAD_DIM * 2, "the heads of a chunk");
  constexpr bool AT_ONCE = TILES == 1;  // one token's chunks: the latency of one
  Inputs in[CHUNKS];
  if (AT_ONCE && a.rows == 1) {
    if (active()) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) merge_heads(a, merged + c, c, 0);
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        in[c].of[0][half] = g == 0 && active() ? *reinterpret_cast<const uint4*>(&merged[c][half * 32 + t * 8])
                                               : uint4{0, 0, 0, 0};
  } else {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (active())
#pragma unroll 2
        for (int token = 0; token < a.rows; token++) merge_heads(a, merged, c, token);
      __syncwarp();
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          in[c].of[tile][half] = tile * 8 + g < a.rows && active()
                                     ? *reinterpret_cast<const uint4*>(&merged[tile * 8 + g][half * 32 + t * 8])
                                     : uint4{0, 0, 0, 0};
      __syncwarp();
    }
  }
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const unsigned char* stage = ring.get(a, at);
    if (active()) multiply(sum, stage, in[c]);
    ring.release();
  }
  __syncwarp();
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) shared.sums[warp][0][tile][lane] = sum[tile];
  workers_sync();
  if (warp >= TILES) return;
  const float4 all = total(shared, 0, warp);
  bf16* to = it.dst == SOURCE_X0 ? a.x0 : a.x1;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = warp * 8 + t * 2 + j;
    if (token >= a.rows) continue;
    const bf16 low = to_bf16(base[j][0] + (j ? all.y : all.x)), high = to_bf16(base[j][1] + (j ? all.w : all.z));
    to[token * DIM + row] = low, to[token * DIM + row + 8] = high;
    if (a.trace) {
      bf16* trace = a.trace + (((i64)at.step * LAYERS + it.layer) * TOKENS + token) * DIM + row;
      trace[0] = low, trace[8] = high;
    }
  }
}
