// One decode step of a decoder with parallel attention and MLP: three kernels a layer.
//
// Constants: DIM width, FF inner width, HEADS heads of 64, ROTARY rotated dimensions of a head (32), PAGE positions
// per page, PAGES pages of a row's table, TILES groups of 8 tokens, PARTS that the inputs of `layer_out` are cut into,
// CLUSTER thread blocks that share them, INPUT_STAGES of their ring, X_CLUSTER thread blocks of `layer_in` that read
// its inputs once. `stages` is how many stages of weights shared memory holds. B tokens, `batch` of them real.
//
// Memory: x [B, DIM] residual stream; q [B, DIM]; mixed [B, DIM + FF]: the heads' output, then the MLP's
// inner activations; keys and values [pages, HEADS, PAGE, 64]; `table` [rows, PAGES] page ids, `row`
// and `position` [B].
#include "normed.cuh"

constexpr int HEAD = 64;
constexpr int HALF = ROTARY / 2;
constexpr int MIXED = DIM + FF;
static_assert(ROTARY == 32 && DIM == HEADS * HEAD && DIM % 64 == 0 && FF % 64 == 0, "unsupported sizes");

// Which rows a block of 16 of the joint query, key and value map holds, as packed, at g and at g + 8: in
// the rotated part of a head they are the two dimensions of a pair.
__device__ __forceinline__ int qkv_row(int block, int g, int& partner) {
  const int part = block % 4, head = block / 4 * HEAD;
  if (part < 2) {
    partner = head + HALF + part * 8 + g;
    return head + part * 8 + g;
  }
  partner = head + part * 16 + 8 + g;
  return head + part * 16 + g;
}

// Where a token's keys and values go in its first head, and its position.
struct Slot {
  i64 offset;
  int position;
};

constexpr int QKV_BLOCKS = 3 * DIM / 16;

// Row g and row g + 8 of a block of `layer_in`'s map, in the map's own order.
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

// What `layer_in` writes of a block of its map; `change` as there.
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
      bf16* out = mixed + (i64)token * MIXED + DIM + inner;
      out[0] = to_bf16(gelu_tanh(a));
      out[8] = to_bf16(gelu_tanh(b));
      continue;
    }
    if (turns) {
      const float turned = a * c[j] - b * s[j];
      b = a * s[j] + b * c[j];
      a = turned;
    }
    bf16* out = which == 0 ? q + (i64)token * DIM + column
                           : (which == 1 ? keys : values) + slots[token].offset + head * PAGE * HEAD + dim;
    out[0] = to_bf16(a);
    out[gap] = to_bf16(b);
  }
}

static_assert(PARTS % CLUSTER == 0, "a thread block of a cluster has whole parts");

// `weights` [3 DIM + FF]: the joint query, key and value map, then the MLP's first map, each times the norm's
// scale; `folded` [3 DIM + FF] as in `normed`, in the maps' own order of rows. `change` [B, FF] float32 is added
// to the MLP's first map, unless it is null.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) layer_in(
    const bf16* x, const bf16* weights, const float2* folded, const float* cos_table, const float* sin_table,
    const i64* row, const i64* position, const i64* table, bf16* q, bf16* mixed, bf16* keys, bf16* values,
    const float* change, int batch, int stages) {
  __shared__ Slot slots[TILES * 8];
  normed_blocks<X_CLUSTER>(
      QKV_BLOCKS + FF / 16, weights, stages, x, batch,
      [&](int token) { slots[token] = slot_of(token, row, position, table); },
      [&](int block) {
        const Pair pair(block);
        return Folded{folded[pair.first], folded[pair.second]};
      },
      [&](int block, int tile, float4 sum, Folded rows, const float2* moments) {
        write_in(block, tile, sum, rows, moments, slots, cos_table, sin_table, q, mixed, keys, values, change, batch);
      });
}

// x += mixed * weights + biases + change; `weights`: the heads' output map beside the MLP's second map. The
// inputs are cut into PARTS, which a cluster shares. `change` [B, DIM] float32 may be null.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) layer_out(
    const bf16* mixed, const bf16* weights, const bf16* proj_bias, const bf16* fc2_bias, bf16* x,
    const float* change, int batch, int stages) {
  constexpr int PART = MIXED / PARTS, CHUNK = chunk_of(PART), CHUNKS = PART / CHUNK, OWN = PARTS / CLUSTER;
  static_assert(MIXED % PARTS == 0 && DIM % (16 * PARTS) == 0, "unsupported sizes");
  unsigned char* shared = shared_memory;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int stride = CHUNK + PAD, tokens = places<TILES>(batch);
  Ring ring(shared, stages, 16 * CHUNK), inputs(shared, INPUT_STAGES, tokens * stride);
  auto& sums = *reinterpret_cast<PartSums<TILES, PARTS>*>(shared);
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, first = blockIdx.x / CLUSTER * CLUSTER;
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init();
  if (warp < WARPS)
    for (int i = 0; i < INPUT_STAGES; i++) clear<TILES>(inputs.data + i * inputs.elements, stride, batch);
  __syncthreads();
  launch_dependents();
  // What is added to the products, of rows g and g + 8; a warp has a tile's.
  const int out = (first + rank) * 16 + g;
  float2 bias = {0.f, 0.f}, old[2] = {};
  if (warp < WARPS) {
    if (warp < TILES)
      bias = float2{to_float(proj_bias[out]) + to_float(fc2_bias[out]),
                    to_float(proj_bias[out + 8]) + to_float(fc2_bias[out + 8])};
    wait_previous();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = warp * 8 + t * 2 + j;
      const bf16* at = x + (i64)token * DIM + out;
      if (token < batch) old[j] = float2{to_float(at[0]), to_float(at[8])};
    }
    multiply_parts<TILES, PARTS, CLUSTER, PART>(ring, inputs, sums, batch);
  } else if (threadIdx.x == WORKERS) {
    produce_weights<CHUNK>(ring, PARTS * CHUNKS, [&](int i) {
      return weights + parts_stage<PARTS, CLUSTER, PART>(i, first, rank) * (16 * CHUNK);
    });
  } else if (warp > WARPS) {
    wait_previous();
    produce_inputs<CHUNK>(inputs, OWN * CHUNKS, batch, [&](int i, int token) {
      return mixed + (i64)token * MIXED + rank * OWN * PART + i * CHUNK;
    });
  }
  __syncwarp();
  add_parts<TILES, PARTS, CLUSTER>(rank, sums, [&](int tile, float4 sum) {
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = tile * 8 + t * 2 + j;
      if (token >= batch) continue;
      bf16* at = x + (i64)token * DIM + out;
      float a = low[j] + bias.x, b = high[j] + bias.y;
      if (change) {
        a += load_fresh_f32(change + (i64)token * DIM + out);
        b += load_fresh_f32(change + (i64)token * DIM + out + 8);
      }
      at[0] = to_bf16(old[j].x + a);
      at[8] = to_bf16(old[j].y + b);
    }
  });
}
