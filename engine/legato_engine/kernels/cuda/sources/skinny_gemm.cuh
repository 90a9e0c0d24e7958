// A few tokens times a large weight matrix, bound by reading its bytes.
//
// A block of 16 output rows is the unit of work; CHUNK inputs of it are a stage of a ring in shared memory, filled by
// one thread with a bulk copy per stage. It needs only weights, so it begins before the preceding kernel has ended.
//
// Weights are packed (skinny_gemm.py) as lanes hold fragments. The order of summation is free, so a lane's 16 bytes are 8
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

#if WEIGHTS >= 3
// Scales of rows g and g + 8 of a warp's inputs, 64 / SCALES inputs each, then their minima: pairs of bf16 (int4) or fp16.
struct __align__(SCALE_WORDS * 4) GroupScales {
  u32 words[SCALE_WORDS];
  __device__ __forceinline__ u32 read() const {
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < SCALE_WORDS; i++) all |= words[i];
    return all;
  }
  // Of both rows, for the inputs of a half.
  __device__ __forceinline__ float2 of(int half) const { return numbers(words[half * SCALES / 2]); }
  __device__ __forceinline__ float2 minima(int half) const { return numbers(words[SCALES + half * SCALES / 2]); }

 private:
  static __device__ __forceinline__ float2 numbers(u32 pair) {
    if (WEIGHTS == INT4) return {low_float(pair), high_float(pair)};
    return {float_of_half((unsigned short)pair), float_of_half((unsigned short)(pair >> 16))};
  }
};
template <int CHUNK>
__device__ __forceinline__ GroupScales scales_of(const bf16* stage) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(stage) + CHUNK / GROUP * GROUP_BYTES;
  return *reinterpret_cast<const GroupScales*>(bytes + threadIdx.x / 32 * GROUP_SCALES + threadIdx.x % 32 / 4 * sizeof(GroupScales));
}
#endif

// Of int8 in the lower bytes of both halves: 128 + the lower seven bits, less 128 or with a sign 256.
__device__ __forceinline__ u32 of_int8(u32 low) {
  return multiply_add(low & 0x007f007fu | 0x43004300u, 0x3f803f80u, low & 0x00800080u | 0xc300c300u);
}

// A lane's packed weights of a stage, and what they are in bf16, still to be multiplied by their scales.
struct PackedWeights {
#if WEIGHTS >= 3
  GroupScales scales;
#endif
#if WEIGHTS == 0
  Weights of;
  template <int CHUNK>
  __device__ __forceinline__ void load(const bf16* stage) {
    of.load(stage + threadIdx.x / 32 * 1024 + threadIdx.x % 32 * 8);
  }
  __device__ __forceinline__ u32 read() const { return of.read(); }
  __device__ __forceinline__ const Weights& widened() const { return of; }
#elif WEIGHTS < 3 || WEIGHTS == 4
  uint4 low, high;
  template <int CHUNK>
  __device__ __forceinline__ void load(const bf16* stage) {
    const auto* from = reinterpret_cast<const uint4*>(stage) + threadIdx.x / 32 * (GROUP_BYTES / 16) + threadIdx.x % 32;
    low = from[0], high = from[32];
#if WEIGHTS == 4
    scales = scales_of<CHUNK>(stage);
  }
  __device__ __forceinline__ u32 read() const { return low.x | high.x | scales.read(); }
#else
  }
  __device__ __forceinline__ u32 read() const { return low.x | high.x; }
#endif
  __device__ __forceinline__ Weights widened() const {
    return Weights{{eight(low.x, low.y), eight(low.z, low.w)}, {eight(high.x, high.y), eight(high.z, high.w)}};
  }

 private:
  // Bytes 0 and 2 of a word are the first pair, 1 and 3 the second.
  static __device__ __forceinline__ uint4 eight(u32 first, u32 second) {
    return uint4{pair<8>(first), pair<0>(first), pair<8>(second), pair<0>(second)};
  }
  template <int SHIFT>
  static __device__ __forceinline__ u32 pair(u32 word) {
    const u32 bytes = word << SHIFT;  // in the upper halves
#if WEIGHTS == 1
    // e4m3's bits are a bf16's of 2^-120 the value.
    const u32 size = (SHIFT == 8 ? word << 4 : word >> 4) & 0x07f007f0u;
    return multiply_add(bytes & 0x80008000u | size, 0x7b807b80u, 0x80008000u);
#else
    return of_int8(SHIFT == 8 ? word : word >> 8);
#endif
  }
#else
  uint4 of;
  template <int CHUNK>
  __device__ __forceinline__ void load(const bf16* stage) {
    of = reinterpret_cast<const uint4*>(stage)[threadIdx.x / 32 * (GROUP_BYTES / 16) + threadIdx.x % 32];
    scales = scales_of<CHUNK>(stage);
  }
  __device__ __forceinline__ u32 read() const { return of.x | scales.read(); }
  __device__ __forceinline__ Weights widened() const { return Weights{{eight(of.x), eight(of.y)}, {eight(of.z), eight(of.w)}}; }

 private:
  // Nibbles i and i + 4 are pair i; 128 + the nibble, less 136 or, with minima, 128.
  static __device__ __forceinline__ uint4 eight(u32 word) { return uint4{pair(word), pair(word >> 4), pair(word >> 8), pair(word >> 12)}; }
  static __device__ __forceinline__ u32 pair(u32 word) {
    return multiply_add(word & 0x000f000fu | 0x43004300u, 0x3f803f80u, WEIGHTS == Q4_1 ? 0xc300c300u : 0xc308c308u);
  }
#endif
};

// Scales of two rows, where each row has one.
struct RowScales {
#if WEIGHTS == 1 || WEIGHTS == 2
  float low = 1.f, high = 1.f;
  __device__ __forceinline__ RowScales() {}
  __device__ __forceinline__ RowScales(const float* scales, int first, int second) : low(scales[first]), high(scales[second]) {}
  __device__ __forceinline__ float4 of(float4 sum) const { return {sum.x * low, sum.y * low, sum.z * high, sum.w * high}; }
#else
  __device__ __forceinline__ RowScales() {}
  __device__ __forceinline__ RowScales(const float*, int, int) {}
  __device__ __forceinline__ float4 of(float4 sum) const { return sum; }
#endif
};

// 32 weights of two rows.
template <int NT>
__device__ __forceinline__ void multiply_half(float4 (&sum)[NT], const uint4& a, const uint4& b, const Tokens<NT>& tokens, int half) {
#pragma unroll
  for (int tile = 0; tile < NT; tile++) mma(sum[tile], a.x, b.x, a.y, b.y, tokens.of[tile][half].x, tokens.of[tile][half].y);
#pragma unroll
  for (int tile = 0; tile < NT; tile++) mma(sum[tile], a.z, b.z, a.w, b.w, tokens.of[tile][half].z, tokens.of[tile][half].w);
}

template <int NT>
__device__ __forceinline__ void multiply(float4 (&sum)[NT], const Weights& weights, const Tokens<NT>& tokens) {
#pragma unroll
  for (int half = 0; half < 2; half++) multiply_half<NT>(sum, weights.low[half], weights.high[half], tokens, half);
}

// sum += part * by, of two rows.
template <int NT>
__device__ __forceinline__ void add_scaled(float4 (&sum)[NT], const float4 (&part)[NT], float2 by) {
#pragma unroll
  for (int tile = 0; tile < NT; tile++) {
    sum[tile].x = __fmaf_rn(part[tile].x, by.x, sum[tile].x), sum[tile].y = __fmaf_rn(part[tile].y, by.x, sum[tile].y);
    sum[tile].z = __fmaf_rn(part[tile].z, by.y, sum[tile].z), sum[tile].w = __fmaf_rn(part[tile].w, by.y, sum[tile].w);
  }
}

// The same with packed weights.
template <int NT>
__device__ __forceinline__ void multiply(float4 (&sum)[NT], const PackedWeights& packed, const Tokens<NT>& tokens) {
#if WEIGHTS < 3
  multiply<NT>(sum, packed.widened(), tokens);
#elif WEIGHTS == 3
  float4 part[NT] = {};
  multiply<NT>(part, packed.widened(), tokens);
  add_scaled<NT>(sum, part, packed.scales.of(0));
#else
  const Weights weights = packed.widened();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float4 part[NT] = {};
    multiply_half<NT>(part, weights.low[half], weights.high[half], tokens, half);
    add_scaled<NT>(sum, part, packed.scales.of(half));
#if WEIGHTS == 6
    constexpr u32 ONES = 0x3f803f80u;
    float4 inputs[NT] = {};  // added up for the minima, in every row
    multiply_half<NT>(inputs, uint4{ONES, ONES, ONES, ONES}, uint4{ONES, ONES, ONES, ONES}, tokens, half);
    add_scaled<NT>(sum, inputs, packed.scales.minima(half));
#endif
  }
#endif
}

// A ring's stages, of up to SIZE chunks, in a warp's registers; if AHEAD the next one is read before the products of this one.
// `active`: the warp has inputs of them.
template <bool AHEAD, int CHUNK, int SIZE>
struct Reader {
  PackedWeights next[SIZE] = {};
  __device__ __forceinline__ void begin(Ring& ring, bool active) {
    if (AHEAD) load(ring, active), ring.release(read());
  }
  // A stage of `chunks`, with tokens(i), their inputs of each; `more`: there is a stage after this one.
  template <int NT, class TokensOf>
  __device__ __forceinline__ void multiply(
      Ring& ring, float4 (&sum)[NT], TokensOf tokens, int chunks, bool active, bool more) {
    if (!AHEAD) load(ring, active);
    PackedWeights mine[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) mine[i] = next[i];
    if (AHEAD && more) load(ring, active);
    if (active)
#pragma unroll
      for (int i = 0; i < SIZE; i++)
        if (i < chunks) ::multiply<NT>(sum, mine[i], tokens(i));
    if (!AHEAD || more) ring.release(read());
  }

 private:
  // Of a shorter stage the rest is what an earlier one left, and is not multiplied.
  __device__ __forceinline__ void load(Ring& ring, bool active) {
    const bf16* stage = ring.get();
    if (active)
#pragma unroll
      for (int i = 0; i < SIZE; i++) next[i].template load<CHUNK>(stage + i * (STAGE_BYTES<CHUNK> / 2));
  }
  __device__ __forceinline__ u32 read() const {
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < SIZE; i++) all |= next[i].read();
    return all;
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
  using Stages = Span<CHUNK, CHUNKS>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int mine = g * STRIDE + warp * GROUP + t * 8;
  const bool active = has_inputs<CHUNK>(warp);
  float4 sum[SUMS][NT] = {};
  Tokens<NT> tokens[Stages::SIZE];
  Reader<(NT < 4), CHUNK, Stages::SIZE> reader;  // with 32 tokens slower
  reader.begin(ring, active);
#pragma unroll
  for (int part = 0; part < OWN; part++)
    for (int stage = 0; stage < Stages::STAGES; stage++) {
      const int chunks = Stages::chunks(stage);
#pragma unroll
      for (int i = 0; i < Stages::SIZE; i++) {
        if (i >= chunks) continue;
        const bf16* from = inputs.get();
        tokens[i].load(active ? from + mine : from, STRIDE, g < batch);
        const int taken = part * CHUNKS + stage * Stages::SIZE + i;
        inputs.release<READERS>(tokens[i].read(), READERS == 1 || taken + inputs.stages < OWN * CHUNKS);
      }
#pragma unroll
      for (int block = 0; block < BLOCKS; block++)
        reader.multiply(
            ring, sum[part * BLOCKS + block], [&](int i) -> const Tokens<NT>& { return tokens[i]; }, chunks, active,
            block + 1 < BLOCKS || stage + 1 < Stages::STAGES || part + 1 < OWN);
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

// The loader's half of `multiply_parts`, from part `part` of NP and block `block` on.
template <int NP, int OWN, int BLOCKS, int WIDTH>
__device__ __forceinline__ void produce_parts(Ring& ring, const bf16* weights, int block, int part) {
  constexpr int CHUNK = chunk_of(WIDTH), CHUNKS = WIDTH / CHUNK;
  produce_weights<CHUNK, CHUNKS, BLOCKS>(ring, OWN, [&](int i, int beside) {
    return stage_of<CHUNK>(weights, ((i64)(block + beside) * NP + part + i) * CHUNKS);
  });
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
