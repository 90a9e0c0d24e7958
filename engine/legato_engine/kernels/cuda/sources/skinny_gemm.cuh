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
#include "common.cuh"

constexpr int WARPS = 8;  // that multiply
constexpr int WORKERS = WARPS * 32;
constexpr int GROUP = 64;  // a warp's inputs of a stage
constexpr int PAD = 32;    // elements between tokens, against bank conflicts

extern __shared__ __align__(128) unsigned char shared_memory[];

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__host__ __device__ constexpr int chunk_of(int inputs) {
  for (int groups = WARPS; groups > 1; groups--)
    if (inputs % (groups * GROUP) == 0) return groups * GROUP;
  return GROUP;
}

__device__ __forceinline__ void workers_sync() { threads_sync<1, 256>(); }

// The last `late` stages lie at `late_data`, in use until the workers `open` them.
struct Ring {
  bf16 *data, *late_data = nullptr;
  u64 *full, *empty;
  int early, stages, elements, slot = 0;
  u32 phase = 0;

  __device__ Ring(unsigned char*& shared, int early, int elements, int late = 0)
      : early(early), stages(early + late), elements(elements) {
    full = reinterpret_cast<u64*>(shared);
    empty = full + stages;
    shared += ceil_div(stages, 8) * 128;
    data = reinterpret_cast<bf16*>(shared);
    shared += early * elements * 2;
  }
  __device__ void init() {
    for (int i = 0; i < stages; i++) barrier_init(full + i, 1), barrier_init(empty + i, WARPS);
    barriers_ready();
  }
  __device__ __forceinline__ bf16* here() const {
    return slot < early ? data + slot * elements : late_data + (slot - early) * elements;
  }
  __device__ __forceinline__ void next() {
    if (++slot == stages) slot = 0, phase ^= 1;
  }
  // The producer.
  __device__ __forceinline__ bf16* acquire(int bytes) {
    barrier_wait(empty + slot, slot < early ? phase ^ 1 : phase);
    barrier_expect(full + slot, bytes);
    return here();
  }
  // The workers.
  __device__ __forceinline__ const bf16* get() {
    barrier_wait(full + slot, phase);
    return here();
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + slot);
    next();
  }
  // The workers: this warp no longer needs `late_data`.
  __device__ __forceinline__ void open() {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      for (int i = early; i < stages; i++) barrier_arrive(empty + i);
  }
};

// The producer: `count` stages from at(i).
template <int CHUNK, class At>
__device__ __forceinline__ void produce_weights(Ring& ring, int count, At at) {
  constexpr int BYTES = 16 * CHUNK * 2;
  const u64 policy = stream_policy();
  for (int i = 0; i < count; i++) {
    bf16* stage = ring.acquire(BYTES);
    copy_bulk(stage, at(i), BYTES, ring.full + ring.slot, policy);
    ring.next();
  }
}

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
};

// `low` and `high` are the lane's of row g and of row g + 8.
template <int NT>
__device__ __forceinline__ void multiply(
    float4 (&sum)[NT], const uint4 (&low)[2], const uint4 (&high)[2], const Tokens<NT>& tokens) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 &a = low[half], &b = high[half];
#pragma unroll
    for (int tile = 0; tile < NT; tile++) mma(sum[tile], a.x, b.x, a.y, b.y, tokens.of[tile][half].x, tokens.of[tile][half].y);
#pragma unroll
    for (int tile = 0; tile < NT; tile++) mma(sum[tile], a.z, b.z, a.w, b.w, tokens.of[tile][half].z, tokens.of[tile][half].w);
  }
}

// The same of rows as packed.
template <int NT>
__device__ __forceinline__ void multiply(float4 (&sum)[NT], const bf16* weights, const Tokens<NT>& tokens) {
  uint4 low[2], high[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    low[half] = *reinterpret_cast<const uint4*>(weights + half * 256);
    high[half] = *reinterpret_cast<const uint4*>(weights + 512 + half * 256);
  }
  multiply<NT>(sum, low, high, tokens);
}

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

// Whether inputs fit registers, to be read from shared memory once.
template <int NT>
constexpr bool HELD = NT <= 2;

// Two if they fit: one is added up while the next block runs.
template <int NT>
struct BlockSums {
  static constexpr int COUNT = NT < 4 ? 2 : 1;
  WarpSums<NT> blocks[COUNT];
};

// The workers' half of `count` blocks whose INPUTS of each token lie in one stage and are HELD from the first block
// on, which needs the ring's early stages. before() runs once, when all inputs are there. finish(i, tile, sum, prepare(i,
// tile)): one warp per tile, which prepares before it multiplies; sum.x, .y are row g of tokens 2t and 2t+1, .z,
// .w row g + 8, as packed, with g = lane / 4 and t = lane % 4.
template <int NT, int INPUTS, class Before, class Prepare, class Finish>
__device__ __forceinline__ void multiply_blocks(
    int count, Ring& ring, const Ring& inputs, BlockSums<NT>& sums, int batch, Before before, Prepare prepare,
    Finish finish) {
  constexpr int CHUNK = chunk_of(INPUTS), STRIDE = INPUTS + PAD;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool active = warp * GROUP < CHUNK;
  const bf16* from = inputs.data + (active ? g * STRIDE + warp * GROUP + t * 8 : 0);
  Tokens<NT> held[HELD<NT> ? INPUTS / CHUNK : 1];
  for (int block = 0; block < count; block++) {
    const int tile = (warp - block * NT) & (WARPS - 1);  // to balance the work
    decltype(prepare(block, tile)) prepared;
    if (tile < NT) prepared = prepare(block, tile);
    if (block == 0) barrier_wait(inputs.full, 0);
    float4 sum[NT] = {};
#pragma unroll
    for (int chunk = 0; chunk < INPUTS / CHUNK; chunk++) {
      auto& tokens = held[HELD<NT> ? chunk : 0];
      if (!HELD<NT> || block == 0) tokens.load(from + chunk * CHUNK, STRIDE, g < batch);
      const bf16* stage = ring.get();
      if (active) multiply<NT>(sum, stage + warp * 1024 + lane * 8, tokens);
      ring.release();
    }
    auto& mine = sums.blocks[block % sums.COUNT];
    if (sums.COUNT == 1 && block > 0) workers_sync();  // the last one is added up
#pragma unroll
    for (int tile = 0; tile < NT; tile++) mine.of[warp][tile][lane] = sum[tile];
    if (block == 0) {
      before();
      ring.open();
    }
    workers_sync();
    if (tile < NT) finish(block, tile, mine.total(tile), prepared);
  }
}

// The workers' half: OWN parts of WIDTH inputs with each of BLOCKS blocks of rows. store(i, tile, sum): one warp per tile, of
// part i / BLOCKS and block i % BLOCKS.
template <int NT, int OWN, int BLOCKS, int WIDTH, class Store>
__device__ __forceinline__ void multiply_parts(Ring& ring, Ring& inputs, int batch, Store store) {
  constexpr int CHUNK = chunk_of(WIDTH), CHUNKS = WIDTH / CHUNK, STRIDE = CHUNK + PAD, SUMS = OWN * BLOCKS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int mine = g * STRIDE + warp * GROUP + t * 8;
  const bool active = warp * GROUP < CHUNK;
  float4 sum[SUMS][NT] = {};
  Tokens<NT> tokens;
#pragma unroll
  for (int part = 0; part < OWN; part++)
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const bf16* from = inputs.get();
      tokens.load(active ? from + mine : from, STRIDE, g < batch);
      inputs.release();
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
        const bf16* stage = ring.get();
        if (active) multiply<NT>(sum[part * BLOCKS + block], stage + warp * 1024 + lane * 8, tokens);
        ring.release();
      }
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

// With one tile only the batch.
template <int NT>
__device__ __forceinline__ int columns(int batch) { return NT == 1 ? batch : NT * 8; }

// Beyond the batch, which no copy fills.
template <int NT>
__device__ __forceinline__ void clear(bf16* inputs, int stride, int batch) {
  uint4* from = reinterpret_cast<uint4*>(inputs + batch * stride);
  const int count = (columns<NT>(batch) - batch) * stride / 8;
  for (int i = threadIdx.x; i < count; i += WORKERS) from[i] = uint4{0, 0, 0, 0};
}

// The second producer, a warp: CHUNK inputs of each token per stage, from at(i, token). A cluster's blocks read each
// token once: `rank` has every SHARED-th, for all.
template <int CHUNK, int SHARED = 1, class At>
__device__ __forceinline__ void produce_inputs(Ring& ring, int count, int batch, At at, int rank = 0) {
  const int token = threadIdx.x % 32;
  const u64 policy = keep_policy();
  for (int i = 0; i < count; i++) {
    bf16* stage = ring.here();
    if (token == 0) ring.acquire(batch * CHUNK * 2);
    __syncwarp();
    if (token < batch && token % SHARED == rank) {
      bf16* to = stage + token * (CHUNK + PAD);
      if (SHARED > 1)
        copy_bulk_shared<SHARED>(to, at(i, token), CHUNK * 2, ring.full + ring.slot, policy);
      else
        copy_bulk(to, at(i, token), CHUNK * 2, ring.full + ring.slot, policy);
    }
    ring.next();
  }
}
