// Sizes, the order of rows, and the epilogue of a layer's first maps.
//
// Heads of 64, ROTARY of them rotated (32), PAGE positions, PAGES of a row's table. x and q [B, DIM]; mixed [B, FF +
// DIM]: the inner activations, then the heads' output; keys and values [pages, HEADS, PAGE, 64]; `table` [rows,
// PAGES]; `row` and `position` [B].
#pragma once
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

// The offset in the first head, and the position.
struct Slot {
  i64 offset;
  int position;
};

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

__device__ __forceinline__ Slot slot_of(int token, const i64* row, const i64* position, const i64* table) {
  const i64 at = position[token], page = table[row[token] * PAGES + at / PAGE];
  return Slot{(page * HEADS * PAGE + at % PAGE) * HEAD, (int)at};
}

__device__ __forceinline__ void write_in(
    int block, int tile, float4 sum, Folded rows, const float2* moments, const Slot* slots, const float* cos_table,
    const float* sin_table, bf16* q, bf16* mixed, bf16* keys, bf16* values, const float* change, int batch) {
  const int t = threadIdx.x % 4;
  const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
  const Pair pair(block);
  const int which = pair.first / DIM, column = pair.first % DIM, gap = pair.second - pair.first;
  const int dim = column % HEAD, head = column / HEAD;
  const bool turns = which < 2 && dim < ROTARY;
  float c[2] = {1.f, 1.f}, s[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = tile * 8 + t * 2 + j;
    if (turns && token < batch) {
      c[j] = cos_table[slots[token].position * HALF + dim];
      s[j] = sin_table[slots[token].position * HALF + dim];
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = tile * 8 + t * 2 + j;
    if (token >= batch) continue;
    float a = normed(low[j], moments[token], rows.low), b = normed(high[j], moments[token], rows.high);
    if (block >= QKV_BLOCKS) {
      const int inner = pair.first - 3 * DIM;
      if (change) {
        a += load_fresh_f32(change + (i64)token * FF + inner);
        b += load_fresh_f32(change + (i64)token * FF + inner + 8);
      }
      bf16* out = mixed + (i64)token * MIXED + inner;
      out[0] = to_bf16(gelu_tanh(a));
      out[8] = to_bf16(gelu_tanh(b));
      continue;
    }
    if (turns) {
      const float2 both = turned(a, b, c[j], s[j]);
      a = both.x, b = both.y;
    }
    bf16* out = which == 0 ? q + (i64)token * DIM + column
                           : (which == 1 ? keys : values) + slots[token].offset + head * PAGE * HEAD + dim;
    out[0] = to_bf16(a);
    out[gap] = to_bf16(b);
  }
}
