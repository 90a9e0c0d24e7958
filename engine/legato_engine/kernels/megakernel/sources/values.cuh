// Values inside a step: embeddings of tokens with values, and decoding of the values of sampled tokens.
//
// A decoder's weights are read only in steps in which some row's token needs it, which loaders cannot know ahead: consumers read
// them past the ring, as kernels/cuda/packing.py packs them. Blocks and activations of both decoders are consecutive: the
// scalar's, then the pair's.
//
// Sums run in the order of the captured kernels (embed.cu, value_bins.cu), so that the bits are equal. VALUE_PARTS: parts (split K)
// of a decoder's second layer.
#pragma once
#include "commit.cuh"
#include "value_math.cuh"

#if !VALUES
__device__ __forceinline__ void run_values(const Instruction&) {}
#else
constexpr u32 NEEDS_SCALAR = 1, NEEDS_PAIR = 2;
constexpr int INNER_BLOCKS = INNER / BLOCK, SCALAR_BLOCKS = SCALAR_BINS / BLOCK, BIN_BLOCKS = (SCALAR_BINS + PAIR_BINS) / BLOCK;
constexpr int VALUE_PART = INNER / VALUE_PARTS;  // inputs of each
constexpr int FEATURES = 2 * (SCALAR_FEATURES > PAIR_FEATURES ? SCALAR_FEATURES : PAIR_FEATURES);
static_assert(TOKENS * FEATURES * sizeof(bf16) <= sizeof(Shared::sums), "features in place of sums");
static_assert(SCALAR_FEATURES % 4 == 0 && PAIR_FEATURES % 4 == 0, "unsupported sizes");
static_assert(INNER % (VALUE_PARTS * INNER_CHUNK) == 0 && BLOCKS_AT_ONCE % VALUE_PARTS == 0, "unsupported sizes");

// Embed the tokens of one kind: a warp computes two of the worker's outputs for all of them.
template <int INPUTS>
__device__ __forceinline__ void embed_values(
    const Shared& shared, const bf16* features, const bf16* weights, const bf16* bias, bf16* x, int rows, int id, int block) {
  constexpr int LOADS = (INPUTS + 255) / 256, OWN = BLOCK / WARPS;
  const int lane = threadIdx.x % 32, first = block * BLOCK + threadIdx.x / 32 * OWN;
  uint4 w[OWN][LOADS];
  bool any = false;
  for (int token = 0; token < rows; token++) any |= shared.token[token] == id;
  if (!any) return;
#pragma unroll
  for (int o = 0; o < OWN; o++)
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int input = i * 256 + lane * 8;
      w[o][i] = input < INPUTS ? *reinterpret_cast<const uint4*>(weights + (i64)(first + o) * INPUTS + input) : uint4{};
    }
  for (int token = 0; token < rows; token++) {
    if (shared.token[token] != id) continue;
    const uint4* of = reinterpret_cast<const uint4*>(features + token * FEATURES);
#pragma unroll
    for (int o = 0; o < OWN; o++) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < LOADS; i++)
        if (i * 256 + lane * 8 < INPUTS) add_products(sum, w[o][i], of[i * 32 + lane]);
      sum = warp_sum(sum);
      if (lane == 0) x[place_of(token, first + o)] = to_bf16(__fadd_rn(sum, to_float(bias[first + o])));
    }
  }
}

__device__ __forceinline__ void run_embed(int dst, int block) {
  Shared& shared = worker_memory();
  const ValueArguments& a = shared.values;
  bf16* features = reinterpret_cast<bf16*>(&shared.sums[0][0][0][0]);
  bf16* x = dst == SOURCE_X0 ? a.x0 : a.x1;
  for (int i = threadIdx.x; i < num_tokens(a, shared) * BLOCK; i += THREADS) {
    const int id = shared.token[i / BLOCK], output = block * BLOCK + i % BLOCK;
    if (id != SCALAR && id != PAIR) x[place_of(i / BLOCK, output)] = a.embedding[(i64)id * DIM + output];
  }
  for (int i = threadIdx.x; i < FEATURES / 2; i += THREADS) {
    const float scalar = i < SCALAR_FEATURES ? to_float(a.scalar.frequencies[i]) : 0.f;
    const float first = i < PAIR_FEATURES ? to_float(a.pair.frequencies[i]) : 0.f;
    const float second = i < PAIR_FEATURES ? to_float(a.pair.frequencies[PAIR_FEATURES + i]) : 0.f;
    for (int token = 0; token < num_tokens(a, shared); token++) {
      const bool pair = shared.token[token] == PAIR;
      const int count = pair ? PAIR_FEATURES : SCALAR_FEATURES;
      if ((!pair && shared.token[token] != SCALAR) || i >= count) continue;
      const Angles angles(shared.value[token].x, shared.value[token].y);
      store_feature(features + token * FEATURES, count, i, pair ? angles.phase(first, second) : angles.phase(scalar));
    }
  }
  __syncwarp();
  workers_sync();
  embed_values<2 * SCALAR_FEATURES>(
      shared, features, a.scalar.encoder, a.scalar.encoder_bias, x, num_tokens(a, shared), SCALAR, block);
  embed_values<2 * PAIR_FEATURES>(shared, features, a.pair.encoder, a.pair.encoder_bias, x, num_tokens(a, shared), PAIR, block);
}

// The warp's part of a chunk of a packed map: rows 0 to 7 of its 32 first and 32 other inputs, then rows 8 to 15.
struct Past {
  uint4 of[4];
  __device__ __forceinline__ void load(const bf16* chunk, u64 policy) {
    const bf16* from = chunk + threadIdx.x / 32 * (BLOCK * GROUP) + threadIdx.x % 32 * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) of[i] = load_stream(from + i * 256, policy);
  }
  __device__ __forceinline__ void add_to(Sums& sums, const Inputs& in) const {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 &low = of[half], &high = of[2 + half], &x = in.of[tile][half];
        mma(sums.of[tile], low.x, high.x, low.y, high.y, x.x, x.y);
        mma(sums.of[tile], low.z, high.z, low.w, high.w, x.z, x.w);
      }
  }
};

// Multiply a block of a map with COUNT chunks of WIDTH inputs; `load(chunk, inputs)` loads the tokens' inputs.
template <int WIDTH, int COUNT, class Load>
__device__ __forceinline__ void multiply_past(const bf16* block, u64 policy, Sums& sums, Load load) {
  constexpr int AT_ONCE = COUNT % 2 == 0 ? 2 : 1;  // few registers: see `run_values`
  if (threadIdx.x / 32 * GROUP >= WIDTH) return;
#pragma unroll 1
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    Past past[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) past[i].load(block + (i64)(first + i) * (BLOCK * WIDTH), policy);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      Inputs in;
      load(first + i, in);
      past[i].add_to(sums, in);
    }
  }
}

// Add the sums of a block over all warps, part by part in order; with few registers (see `run_values`).
template <int NUM_PARTS>
__device__ __forceinline__ float4 total_of_parts(const Shared& shared, int block, int tile) {
  float4 all = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int part = 0; part < NUM_PARTS; part++) {
    const float4 more = total(shared, block * NUM_PARTS + part, tile);
    all.x += more.x, all.y += more.y, all.z += more.z, all.w += more.w;
  }
  return all;
}

// Compute the worker's blocks of a layer whose decoders are needed, as many at a time as the sums of their parts fit:
// `of(block)` is a block's decoder, `multiply(block, part, sums)` computes sums, `finish(block, tile, sum)` stores them.
template <int NUM_PARTS, class Of, class Multiply, class Finish>
__device__ __forceinline__ void each_block(
    Shared& shared, int begin, int num_blocks, Of of, Multiply multiply, Finish finish) {
  constexpr int AT_ONCE = BLOCKS_AT_ONCE / NUM_PARTS;
  const int warp = threadIdx.x / 32;
  for (int first = 0; first < num_blocks; first += AT_ONCE) {
    const int count = AT_ONCE > 1 ? min(AT_ONCE, num_blocks - first) : 1;
    u32 mine = 0;
    for (int i = 0; i < count; i++)
      if (shared.needed & of(begin + (first + i) * WORKERS)) mine |= 1u << i;
    if (!mine) continue;
#pragma unroll 1
    for (int i = 0; i < count * NUM_PARTS; i++) {
      if (!(mine >> i / NUM_PARTS & 1)) continue;
      Sums sums;
      sums.clear();
      multiply(begin + (first + i / NUM_PARTS) * WORKERS, i % NUM_PARTS, sums);
      sums.store(shared, i);
    }
    workers_sync();
    for (int i = warp; i < count * TILES; i += WARPS)
      if (mine >> i / TILES & 1)
        finish(begin + (first + i / TILES) * WORKERS, i % TILES, total_of_parts<NUM_PARTS>(shared, i / TILES, i % TILES));
    workers_sync();
  }
}

// Store a lane's sums of a block, of rows g and g + 8 and tokens 2t and 2t + 1 of a tile, by `store(token, row, low, high)`.
template <class Store>
__device__ __forceinline__ void each_sum(const ValueArguments& a, const Shared& shared, int block, int tile, const float4& sum, Store store) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = tile * 8 + t * 2 + j;
    if (token < num_tokens(a, shared)) store(token, block * BLOCK + g, j ? sum.y : sum.x, j ? sum.w : sum.z);
  }
}

__device__ __forceinline__ u32 decoder_of_bins(int block) { return block < SCALAR_BLOCKS ? NEEDS_SCALAR : NEEDS_PAIR; }
__device__ __forceinline__ const bf16* bin_weights(const ValueArguments& a, int block) {
  const bool pair = block >= SCALAR_BLOCKS;
  return (pair ? a.pair.fc2 : a.scalar.fc2) + (i64)(block - pair * SCALAR_BLOCKS) * (BLOCK * INNER);
}

// Prefetch the weights of BINS while the workers wait for each other.
__device__ __forceinline__ void fetch_bins(const ValueArguments& a, const Shared& shared) {
  constexpr int PIECE = BLOCK * INNER_CHUNK * 2, PIECES = INNER / INNER_CHUNK;
  for (int i = threadIdx.x; blockIdx.x + i / PIECES * WORKERS < BIN_BLOCKS; i += THREADS) {
    const int block = blockIdx.x + i / PIECES * WORKERS;
    if (!(shared.needed & decoder_of_bins(block))) continue;
    const bf16* from = bin_weights(a, block) + i % PIECES * (PIECE / 2);
    prefetch_bulk(from, PIECE);
  }
}

__device__ __forceinline__ void run_inner(int src, int begin, int num_blocks) {
  Shared& shared = worker_memory();
  const ValueArguments& a = shared.values;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x, token = lane < num_tokens(a, shared) ? (int)load_fresh_u32(a.token + lane) : -1;
    const bool scalar = __any_sync(~0u, token == SCALAR), pair = __any_sync(~0u, token == PAIR);
    if (lane < num_tokens(a, shared)) shared.chosen[lane] = token;
    if (lane == 0) shared.needed = (scalar ? NEEDS_SCALAR : 0) | (pair ? NEEDS_PAIR : 0);
  }
  __syncwarp();
  workers_sync();
  if (!shared.needed) return;
  const u64 policy = stream_policy();
  each_block<1>(
      shared, begin, num_blocks, [](int block) { return block < INNER_BLOCKS ? NEEDS_SCALAR : NEEDS_PAIR; },
      [&](int block, int, Sums& sums) {
        const bool pair = block >= INNER_BLOCKS;
        const bf16* weights = (pair ? a.pair.fc1 : a.scalar.fc1) + (i64)(block - pair * INNER_BLOCKS) * (BLOCK * DIM);
        multiply_past<CHUNK, CHUNKS>(
            weights, policy, sums, [&](int chunk, Inputs& in) { in.load(residual(a, src), group_of(chunk), active() ? num_tokens(a, shared) : 0); });
      },
      [&](int block, int tile, float4 sum) {
        const bool pair = block >= INNER_BLOCKS;
        const bf16* bias = (pair ? a.pair.fc1_bias : a.scalar.fc1_bias) - pair * INNER;
        each_sum(a, shared, block, tile, sum, [&](int token, int row, float low, float high) {
          bf16* out = a.inner + place_of(token, row);
          out[0] = to_bf16(gelu_tanh(low + to_float(bias[row])));
          out[8] = to_bf16(gelu_tanh(high + to_float(bias[row + 8])));
        });
      });
  fetch_bins(a, shared);
}

__device__ __forceinline__ void run_bins(int begin, int num_blocks) {
  Shared& shared = worker_memory();
  const ValueArguments& a = shared.values;
  if (!shared.needed) return;
  const u64 policy = stream_policy();
  each_block<VALUE_PARTS>(
      shared, begin, num_blocks, [](int block) { return decoder_of_bins(block); },
      [&](int block, int part, Sums& sums) {
        const int first = ((block >= SCALAR_BLOCKS) * INNER + part * VALUE_PART) / GROUP + threadIdx.x / 32;
        multiply_past<INNER_CHUNK, VALUE_PART / INNER_CHUNK>(
            bin_weights(a, block) + part * (BLOCK * VALUE_PART), policy, sums,
            [&](int chunk, Inputs& in) { in.load(a.inner, first + chunk * (INNER_CHUNK / GROUP), num_tokens(a, shared)); });
      },
      [&](int block, int tile, float4 sum) {
        const bool pair = block >= SCALAR_BLOCKS;
        const bf16* bias = (pair ? a.pair.fc2_bias : a.scalar.fc2_bias) - pair * SCALAR_BINS;
        each_sum(a, shared, block, tile, sum, [&](int token, int row, float low, float high) {
          float* out = a.bins + (i64)token * (SCALAR_BINS + PAIR_BINS) + row;
          out[0] = low + to_float(bias[row]), out[8] = high + to_float(bias[row + 8]);
        });
      });
}

// Decode the values of tokens that the worker sampled; words have zeros and certainties of one.
__device__ __forceinline__ void run_value(int begin, int count) {
  Shared& shared = worker_memory();
  const ValueArguments& a = shared.values;
  const int axis = threadIdx.x / 32;
  for (int i = 0; i < count; i++) {
    const int index = begin + i * WORKERS;
    if (index >= num_tokens(a, shared)) break;
    const int token = shared.chosen[index];
    const float *bins = a.bins + (i64)index * (SCALAR_BINS + PAIR_BINS), *scores = a.scores + (i64)index * VOCAB;
    const float end = load_fresh_f32(scores + END), own = load_fresh_f32(scores + max(token, 0));
    if (axis < 2) {
      const Value read = read_value(token, axis, bins, bins + SCALAR_BINS);
      if (threadIdx.x % 32 == 0) shared.read[axis] = float2{read.value, read.near};
    }
    __syncwarp();
    workers_sync();
    if (threadIdx.x == 0) {
      const float2 first = shared.read[0], second = shared.read[1];
      const bool valued = token == SCALAR || token == PAIR;
      const float exists = valued ? existence(end, own) : 1.f;
      a.value[index] = float4{first.x, second.x, exists, first.y * second.y};
    }
    workers_sync();  // before the next token's
  }
}

// A called function with few registers: inlined, it would make the other instructions spill. For the same reason it reads the
// number of tokens anew wherever it needs it.
__device__ __noinline__ void run_values(const Instruction& it) {
  switch (it.op) {
    case OP_EMBED: run_embed(it.dst, it.block); break;
    case OP_INNER: run_inner(it.src, it.block, it.num_blocks); break;
    case OP_BINS: run_bins(it.block, it.num_blocks); break;
    case OP_VALUE: run_value(it.block, it.num_blocks); break;
  }
}
#endif
