// A few tokens times a large weight matrix, bound by reading its bytes.
//
// A block of 16 output rows is the unit of work; CHUNK inputs of it are a stage of a ring in shared memory, filled by
// one thread with a bulk copy per stage. It needs only weights, so it begins before the preceding kernel has ended.
//
// Weights are packed (packing.py) as lanes hold fragments. The order of summation is free, so a lane's 16 bytes are 8
// successive inputs of one row; tokens' inputs are read in the same order.
//
// Sums run in an order that depends on the sizes only, so a token's bits do not depend on the batch. Columns without
// a token hold zeros.
#pragma once
#include "stage_ring.cuh"

// 64 inputs of the tokens of NT tiles, as a lane holds them.
template <int NT>
struct Tokens {
  uint4 of[NT][2];
  // With one tile only `live` lanes have a token.
  __device__ __forceinline__ void load(const bf16* from, int stride, bool live) {
#pragma unroll
    for (int tile = 0; tile < NT; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        of[tile][half] = NT > 1 || live ? *reinterpret_cast<const uint4*>(from + tile * 8 * stride + half * 32)
                                        : uint4{0, 0, 0, 0};
  }
  // A word that depends on all reads.
  __device__ __forceinline__ u32 read() const {
    u32 all = 0;
#pragma unroll
    for (int tile = 0; tile < NT; tile++) all |= of[tile][0].x | of[tile][1].x;
    return all;
  }
};

// 64 weights of two rows, as packed: `low` are the lane's of row g and `high` of row g + 8.
struct Weights {
  uint4 low[2], high[2];
  __device__ __forceinline__ void load(const bf16* from) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      low[half] = *reinterpret_cast<const uint4*>(from + half * 256);
      high[half] = *reinterpret_cast<const uint4*>(from + 512 + half * 256);
    }
  }
  __device__ __forceinline__ u32 read() const { return low[0].x | low[1].x | high[0].x | high[1].x; }
};

template <int NT>
__device__ __forceinline__ void multiply(float4 (&sum)[NT], const Weights& weights, const Tokens<NT>& tokens) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 &a = weights.low[half], &b = weights.high[half];
#pragma unroll
    for (int tile = 0; tile < NT; tile++) mma(sum[tile], a.x, b.x, a.y, b.y, tokens.of[tile][half].x, tokens.of[tile][half].y);
#pragma unroll
    for (int tile = 0; tile < NT; tile++) mma(sum[tile], a.z, b.z, a.w, b.w, tokens.of[tile][half].z, tokens.of[tile][half].w);
  }
}

// A ring's stages in a warp's registers; if AHEAD the next one is read before the products of this one. `active`: the warp has
// inputs of them.
template <bool AHEAD>
struct Reader {
  Weights next = {};
  __device__ __forceinline__ void begin(Ring& ring, bool active) {
    if (AHEAD) load(ring, active), ring.release(next.read());
  }
  // `more`: there is a stage after this one.
  template <int NT>
  __device__ __forceinline__ void multiply(
      Ring& ring, float4 (&sum)[NT], const Tokens<NT>& tokens, bool active, bool more) {
    if (!AHEAD) load(ring, active);
    const Weights mine = next;
    if (AHEAD && more) load(ring, active);
    if (active) ::multiply<NT>(sum, mine, tokens);
    if (!AHEAD || more) ring.release(next.read());
  }

 private:
  __device__ __forceinline__ void load(Ring& ring, bool active) {
    const bf16* stage = ring.get();
    if (active) next.load(stage + threadIdx.x / 32 * 1024 + threadIdx.x % 32 * 8);
  }
};

template <int NT>
struct WarpSums {
  float4 of[WARPS][NT][32];
  __device__ __forceinline__ float4 total(int tile) const {
    float4 all = of[0][tile][threadIdx.x % 32];
#pragma unroll
    for (int from = 1; from < WARPS; from++) add(all, of[from][tile][threadIdx.x % 32]);
    return all;
  }
};

// The workers' half: OWN parts of WIDTH inputs with each of BLOCKS blocks of rows. store(i, tile, sum): one warp per tile, of
// part i / BLOCKS and block i % BLOCKS. READERS thread blocks of a cluster read the same inputs.
template <int NT, int OWN, int BLOCKS, int WIDTH, int READERS, class Store>
__device__ __forceinline__ void multiply_parts(Ring& ring, Ring& inputs, int batch, Store store) {
  constexpr int CHUNK = chunk_of(WIDTH), CHUNKS = WIDTH / CHUNK, STRIDE = CHUNK + PAD, SUMS = OWN * BLOCKS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int mine = g * STRIDE + warp * GROUP + t * 8;
  const bool active = has_inputs<CHUNK>(warp);
  float4 sum[SUMS][NT] = {};
  Tokens<NT> tokens;
  Reader<(NT < 4)> reader;  // with 32 tokens slower
  reader.begin(ring, active);
#pragma unroll
  for (int part = 0; part < OWN; part++)
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const bf16* from = inputs.get();
      tokens.load(active ? from + mine : from, STRIDE, g < batch);
      inputs.release<READERS>(tokens.read(), READERS == 1 || part * CHUNKS + chunk + inputs.stages < OWN * CHUNKS);
#pragma unroll
      for (int block = 0; block < BLOCKS; block++)
        reader.multiply(
            ring, sum[part * BLOCKS + block], tokens, active,
            block + 1 < BLOCKS || chunk + 1 < CHUNKS || part + 1 < OWN);
    }
  workers_sync();  // the warps' sums take the weights' memory
  auto* warps = reinterpret_cast<WarpSums<NT>*>(ring.data);
#pragma unroll
  for (int i = 0; i < SUMS; i++)
#pragma unroll
    for (int tile = 0; tile < NT; tile++) warps[i].of[warp][tile][lane] = sum[i][tile];
  workers_sync();
#pragma unroll
  for (int i = 0; i < ceil_div(SUMS * NT, WARPS); i++) {
    const int which = i * WARPS + warp;
    if (which < SUMS * NT) store(which / NT, which % NT, warps[which / NT].total(which % NT));
  }
}

// Of the stages that `multiply_parts` takes, from part `part` of NP and block `block` on.
template <int NP, int BLOCKS, int WIDTH>
__device__ __forceinline__ i64 parts_stage(int i, int block, int part) {
  constexpr int CHUNKS = WIDTH / chunk_of(WIDTH);
  return (i64)(block + i % BLOCKS) * (NP * CHUNKS) + part * CHUNKS + i / BLOCKS;
}

// For NP parts of the inputs.
template <int NT, int NP>
struct PartSums {
  float4 all[NP][NT][32];
};

// For all threads: a block's parts are added up in order. Cluster member `rank` adds up block `rank`.
template <int NT, int NP, int SHARED, class Finish>
__device__ __forceinline__ void add_parts(int rank, PartSums<NT, NP>& sums, Finish finish) {
  constexpr int OWN = NP / SHARED;
  const int tile = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (SHARED > 1) cluster_sync(); else __syncthreads();
  if (tile < NT) {
    float4 all = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int part = 0; part < NP; part++) {
      const float4* from = &sums.all[part % OWN * SHARED + rank][tile][lane];
      add(all, SHARED > 1 ? load_peer(from, part / OWN) : *from);
    }
    finish(tile, all);
  }
  if (SHARED > 1) cluster_sync();  // no block exits while a peer may still read
}
