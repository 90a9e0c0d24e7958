// Sizes, the order of rows, and the epilogues of a layer's maps.
//
// Heads of 64, ROTARY of them rotated (32), PAGE positions, PAGES of a row's table. x and q [B, DIM]; mixed [B, FF +
// DIM]: the inner activations, then the heads' output; keys and values [pages, HEADS, PAGE, 64], of e4m3 in units of `units` (of keys,
// of values); `table` [rows, PAGES]; `row` and `position` [B].
#pragma once
#include "kv_element.cuh"
#include "norm_gemm.cuh"

constexpr int HEAD = 64;
constexpr int HALF = ROTARY / 2;
constexpr int MIXED = DIM + FF;
static_assert(ROTARY == 32 && DIM == HEADS * HEAD && DIM % 64 == 0 && FF % 64 == 0, "unsupported sizes");

// Rows of a packed block of 16 at g and g + 8: in the rotated part of a head the two dimensions of a pair.
__device__ __forceinline__ int qkv_row(int block, int g, int& partner) {
  const int part = block % 4, head = block / 4 * HEAD;
  if (part < 2) {
    partner = head + HALF + part * 8 + g;
    return head + part * 8 + g;
  }
  partner = head + part * 16 + 8 + g;
  return head + part * 16 + g;
}

constexpr int QKV_BLOCKS = 3 * DIM / 16;

// In the map's own order.
struct Pair {
  int first, second;
  __device__ __forceinline__ explicit Pair(int block) {
    const int g = threadIdx.x % 32 / 4;
    second = block * 16 + g + 8;
    first = block < QKV_BLOCKS ? qkv_row(block, g, second) : block * 16 + g;
  }
};

// Of a token's keys and values, in the first head.
__device__ __forceinline__ i64 offset_of(int token, const i64* row, const i64* position, const i64* table) {
  const i64 at = position[token], page = table[row[token] * PAGES + at / PAGE];
  return (page * HEADS * PAGE + at % PAGE) * HEAD;
}

// What a block's rows need besides their sums, loaded before the products: what they are folded with, and the angles of the
// lane's two tokens, if its dimensions turn.
struct BlockIn {
  Folded rows;
  bool turns = false;
  float cosine[2] = {1.f, 1.f}, sine[2] = {0.f, 0.f};

  __device__ __forceinline__ BlockIn() {}
  __device__ __forceinline__ BlockIn(
      int block, int tile, const float* scales, const float2* folded, const float* cos_table, const float* sin_table, const i64* position,
      int batch) {
    const Pair pair(block);
    rows = Folded(folded, scales, pair.first, pair.second);
    const int dim = pair.first % HEAD, first = tile * 8 + threadIdx.x % 4 * 2;
    turns = pair.first < 2 * DIM && dim < ROTARY;
    if (!turns) return;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (first + j >= batch) continue;
      const i64 at = position[first + j] * HALF + dim;
      cosine[j] = cos_table[at], sine[j] = sin_table[at];
    }
  }
};

// The lane's two tokens beside each other, whose instructions fill each other's waits. `moments` are aligned to 16 bytes.
__device__ __forceinline__ void write_in(
    int block, int tile, float4 sum, const BlockIn& in, const float2* moments, const i64* offsets, bf16* q, bf16* mixed,
    Element* keys, Element* values, const float* units, const float* change, int batch) {
  const int token = tile * 8 + threadIdx.x % 4 * 2;
  const Pair pair(block);
  const float4 both = *reinterpret_cast<const float4*>(moments + token);  // of the lane's two tokens
  const float2 moment[2] = {{both.x, both.y}, {both.z, both.w}};
  sum = in.rows.scales.of(sum);
  float a[2] = {sum.x, sum.y}, b[2] = {sum.z, sum.w};
#pragma unroll
  for (int j = 0; j < 2; j++) a[j] = normed(a[j], moment[j], in.rows.low), b[j] = normed(b[j], moment[j], in.rows.high);
  if (block >= QKV_BLOCKS) {
    const int inner = pair.first - 3 * DIM;
    if (change) {
      const float* by = change + (i64)token * FF + inner;
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (token + j < batch) a[j] += load_fresh_f32(by + j * FF), b[j] += load_fresh_f32(by + j * FF + 8);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) a[j] = gelu_tanh(a[j]), b[j] = gelu_tanh(b[j]);
    bf16* out = mixed + (i64)token * MIXED + inner;
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (token + j < batch) out[j * MIXED] = to_bf16(a[j]), out[j * MIXED + 8] = to_bf16(b[j]);
    return;
  }
  if (in.turns) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float2 turn = turned(a[j], b[j], in.cosine[j], in.sine[j]);
      a[j] = turn.x, b[j] = turn.y;
    }
  }
  const int which = pair.first / DIM, column = pair.first % DIM, gap = pair.second - pair.first;
#if KV_BYTES == 1
  if (which > 0) {
    Element* const to = (which == 1 ? keys : values) + column / HEAD * (PAGE * HEAD) + column % HEAD;
    const float unit = units[which - 1];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (token + j >= batch) continue;
      Element* out = to + offsets[token + j];
      out[0] = to_element(a[j], unit);
      out[gap] = to_element(b[j], unit);
    }
    return;
  }
  bf16* const to = q + (i64)token * DIM + column;
#else
  bf16* const to = which == 0 ? q + (i64)token * DIM + column
                              : (which == 1 ? keys : values) + column / HEAD * (PAGE * HEAD) + column % HEAD;
#endif
#pragma unroll
  for (int j = 0; j < 2; j++) {
    if (token + j >= batch) continue;
    bf16* out = to + (which == 0 ? j * DIM : offsets[token + j]);
    out[0] = to_bf16(a[j]);
    out[gap] = to_bf16(b[j]);
  }
}

// 16 columns of x of a tile's tokens, which a layer's output is added to. A lane has two of them, 8 apart, of two tokens.
struct Unit {
  int column, token;
  float2 bias, old[2];
  RowScales scales;

  // `unit` counts tiles of block `first`, then of the next one. Scales and biases need no earlier kernel.
  __device__ __forceinline__ void begin(
      int unit, int first, const float* row_scales, const bf16* proj_bias, const bf16* fc2_bias) {
    const int lane = threadIdx.x % 32;
    column = (first + unit / TILES) * 16 + lane / 4, token = unit % TILES * 8 + lane % 4 * 2;
    bias = float2{to_float(proj_bias[column]) + to_float(fc2_bias[column]),
                  to_float(proj_bias[column + 8]) + to_float(fc2_bias[column + 8])};
    scales = RowScales(row_scales, column, column + 8);
  }
  __device__ __forceinline__ void load(const bf16* x, int batch) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const bf16* at = x + (i64)(token + j) * DIM + column;
      if (token + j < batch) old[j] = float2{to_float(load_fresh_bf16(at)), to_float(load_fresh_bf16(at + 8))};
    }
  }
  __device__ __forceinline__ void write(float4 sum, const float* change, bf16* x, int batch) const {
    sum = scales.of(sum);
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (token + j >= batch) continue;
      const i64 at = (i64)(token + j) * DIM + column;
      float a = low[j] + bias.x, b = high[j] + bias.y;
      if (change) a += load_fresh_f32(change + at), b += load_fresh_f32(change + at + 8);
      x[at] = to_bf16(old[j].x + a);
      x[at + 8] = to_bf16(old[j].y + b);
    }
  }
};
