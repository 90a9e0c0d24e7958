// Products of the tokens with blocks of weights from the ring, and the instructions FC1, QKV and FC2.
//
// In a warp lane = 4g + t. A warp multiplies 64 inputs of every stage; a sum's .x and .y are row g of tokens 2t and
// 2t + 1 of a tile, .z and .w row g + 8.
#pragma once
#include "inputs.cuh"
#include "ring.cuh"

// The warp's part of a stage: fragments of 16 rows by 16 inputs, as lanes hold them (packed by kernels/megakernel/kernel.py).
struct Fragment {
  uint4 of[4];
  __device__ __forceinline__ void load(const unsigned char* stage) {
    const uint4* from = reinterpret_cast<const uint4*>(stage) + threadIdx.x / 32 * 128 + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) of[i] = from[i * 32];
  }
  // A word that depends on all reads.
  __device__ __forceinline__ u32 read() const { return of[0].x | of[1].x | of[2].x | of[3].x; }
};

// Sums of a block, in one chain of products: the order in which skinny_gemm.cuh adds them up.
struct Sums {
  float4 of[TILES];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) of[tile] = float4{0.f, 0.f, 0.f, 0.f};
  }
  __device__ __forceinline__ void add(const Fragment& f, const Inputs& in) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 &a = f.of[half * 2], &b = f.of[half * 2 + 1];
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) mma(of[tile], a.x, a.y, a.z, a.w, in.of[tile][half].x, in.of[tile][half].y);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) mma(of[tile], b.x, b.y, b.z, b.w, in.of[tile][half].z, in.of[tile][half].w);
    }
  }
  __device__ __forceinline__ void store(Shared& shared, int block) const {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) shared.sums[threadIdx.x / 32][block][tile][threadIdx.x % 32] = of[tile];
  }
};

// Stages of the ring in registers; the next one is loaded ahead of this one's products.
struct Reader {
  Fragment next = {};
  __device__ __forceinline__ void begin(const Arguments& a, Place& at, Ring& ring) {
    const unsigned char* stage = ring.get(a, at);
    if (active()) next.load(stage);
    ring.release(a, next.read());
  }
  // `more`: whether another stage follows.
  __device__ __forceinline__ void multiply(
      const Arguments& a, Place& at, Ring& ring, Sums& sums, const Inputs& in, bool more) {
    const Fragment mine = next;
    if (more) {
      const unsigned char* stage = ring.get(a, at);
      if (active()) next.load(stage);
    }
    if (active()) sums.add(mine, in);
    if (more) ring.release(a, next.read());
  }
};

// The sums of a block over all warps.
__device__ __forceinline__ float4 total(const Shared& shared, int block, int tile) {
  float4 all = shared.sums[0][block][tile][threadIdx.x % 32];
#pragma unroll
  for (int warp = 1; warp < WARPS; warp++) add(all, shared.sums[warp][block][tile][threadIdx.x % 32]);
  return all;
}

// Sums of up to BLOCKS_AT_ONCE blocks of the residual stream, into shared memory; with `measures` the tokens' moments too, which
// the warps see after the next barrier. `in`: all chunks of the residual stream.
__device__ __forceinline__ void multiply_blocks(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, const Inputs (&in)[CHUNKS], int blocks, bool measures) {
  Reader reader;
  reader.begin(a, at, ring);
  for (int block = 0; block < blocks; block++) {
    Sums sums;
    sums.clear();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) reader.multiply(a, at, ring, sums, in[c], c + 1 < CHUNKS || block + 1 < blocks);
    sums.store(shared, block);
    if (!measures || block) continue;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
      store_slices(shared, tile, [&](int chunk, int half) { return in[chunk].of[tile][half]; });
    __syncwarp();
    workers_sync();
    const int token = threadIdx.x;
    if (token < num_tokens(a, shared)) shared.moments[token] = whole_moments(shared, token);
  }
}

__device__ __forceinline__ void run_fc1(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, const Instruction& it) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  Inputs in[CHUNKS];
  load_chunks(a, shared, it.src, in);
  const float2* folded = a.folded + (i64)it.layer * (3 * DIM + FF) + 3 * DIM;
  constexpr int RATIO = FF / DIM;
  float2 low[(RATIO * TILES + WARPS - 1) / WARPS], high[(RATIO * TILES + WARPS - 1) / WARPS];
#pragma unroll
  for (int i = 0; i < (RATIO * TILES + WARPS - 1) / WARPS; i++) {
    const int block = it.block + (warp + i * WARPS) / TILES * WORKERS;
    if (warp + i * WARPS < RATIO * TILES) low[i] = folded[block * BLOCK + g], high[i] = folded[block * BLOCK + g + 8];
  }
  multiply_blocks(a, at, shared, ring, in, it.num_blocks, true);
  workers_sync();
#pragma unroll
  for (int i = 0; i < (RATIO * TILES + WARPS - 1) / WARPS; i++) {
    const int index = (warp + i * WARPS) / TILES, tile = (warp + i * WARPS) % TILES;
    if (index >= it.num_blocks) continue;
    const float4 sum = total(shared, index, tile);
    const int row = (it.block + index * WORKERS) * BLOCK + g;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = tile * 8 + t * 2 + j;
      if (token >= num_tokens(a, shared)) continue;
      const float2 m = shared.moments[token];
      bf16* out = a.act + place_of(token, row);
      out[0] = to_bf16(gelu_tanh(normed(j ? sum.y : sum.x, m, low[i])));
      out[8] = to_bf16(gelu_tanh(normed(j ? sum.w : sum.z, m, high[i])));
    }
  }
}

__device__ __forceinline__ void run_qkv(
    const Arguments& a, Place& at, Shared& shared, Ring& ring, const Instruction& it) {
  constexpr int MORE = (3 * TILES + WARPS - 1) / WARPS, HALF = ROTARY_DIM / 2;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int head = it.block / SPLITS, quarter = it.block % SPLITS;
  const bool rotated = quarter * BLOCK < ROTARY_DIM;
  const int dim = rotated ? quarter * 8 + g : quarter * BLOCK + g, gap = rotated ? HALF : 8;
  Inputs in[CHUNKS];
  load_chunks(a, shared, it.src, in);
  const float2* folded = a.folded + (i64)it.layer * (3 * DIM + FF);
  float2 low[MORE], high[MORE];
  float c[MORE][2], s[MORE][2];
  i64 slot[MORE][2];
#pragma unroll
  for (int i = 0; i < MORE; i++) {
    const int index = (warp + i * WARPS) / TILES, tile = (warp + i * WARPS) % TILES;
    if (index >= 3) continue;
    const int row = (it.block + index * WORKERS) * BLOCK + g;
    low[i] = folded[row], high[i] = folded[row + 8];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = tile * 8 + t * 2 + j;
      if (token >= num_tokens(a, shared)) continue;
      const int position = position_of(shared, token, at.step);
      c[i][j] = rotated && index < 2 ? a.cosines[position * HALF + dim] : 1.f;
      s[i][j] = rotated && index < 2 ? a.sines[position * HALF + dim] : 0.f;
      const i64 page = (i64)it.layer * a.layer_pages + a.pages[(i64)shared.row[token] * a.row_pages + position / PAGE];
      slot[i][j] = ((page * HEADS + head) * PAGE + position % PAGE) * HEAD_DIM + dim;
    }
  }
  multiply_blocks(a, at, shared, ring, in, 3, false);
  workers_sync();
#pragma unroll
  for (int i = 0; i < MORE; i++) {
    const int index = (warp + i * WARPS) / TILES, tile = (warp + i * WARPS) % TILES;
    if (index >= 3) continue;
    const float4 sum = total(shared, index, tile);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = tile * 8 + t * 2 + j;
      if (token >= num_tokens(a, shared)) continue;
      const float2 m = shared.moments[token];
      const float x = normed(j ? sum.y : sum.x, m, low[i]), y = normed(j ? sum.w : sum.z, m, high[i]);
      bf16* out = index == 0 ? a.q + token * DIM + head * HEAD_DIM + dim : (index == 1 ? a.keys : a.values) + slot[i][j];
      const float2 both = rotated && index < 2 ? turned(x, y, c[i][j], s[i][j]) : float2{x, y};
      out[0] = to_bf16(both.x);
      out[gap] = to_bf16(both.y);
    }
  }
}

// Chunks of the inner activations that registers hold at a time.
constexpr int INNER_AT_ONCE = 8 / TILES;

// The inputs of a layer's output map, the inner activations and then the heads, are split into PARTS, whose sums are added in
// order, as by layer_out. The last part has the heads.
constexpr int PART_CHUNKS = (FF + DIM) / CHUNK / PARTS;
static_assert((FF + DIM) / CHUNK % PARTS == 0 && (PARTS - 1) * PART_CHUNKS * CHUNK <= FF, "unsupported parts");
static_assert(PARTS <= BLOCKS_AT_ONCE && FF / CHUNK / 2 / PART_CHUNKS <= 1, "one part before attention, whose results lie on the others'");

// A lane's sums of a part.
__device__ __forceinline__ float4& part_sums(Shared& shared, int part, int warp, int tile) {
  return part ? shared.sums[warp][part][tile][threadIdx.x % 32] : shared.first_part[warp][tile][threadIdx.x % 32];
}
__device__ __forceinline__ void store_part(Shared& shared, const Sums& sums, int part) {
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) part_sums(shared, part, threadIdx.x / 32, tile) = sums.of[tile];
}

// Add parts `from` up to `to`, whose sums all warps have stored; each of the first TILES warps adds one tile.
__device__ __forceinline__ void add_parts(Shared& shared, float4& all, int from, int to) {
  for (int part = from; part < to; part++) {
    float4 whole = part_sums(shared, part, 0, threadIdx.x / 32);
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) add(whole, part_sums(shared, part, warp, threadIdx.x / 32));
    add(all, whole);
  }
}

// `added`: the number of parts in `shared.parts`.
__device__ __forceinline__ void run_fc2(
    const Arguments& a, Place& at, Ring& ring, Sums& sums, int& added, const Instruction& it) {
  Shared& shared = ring.shared;
  const int warp = threadIdx.x / 32, chunks = it.num_chunks;
  int part = it.chunk / PART_CHUNKS, left = (part + 1) * PART_CHUNKS - it.chunk;
  if (it.chunk == 0) sums.clear(), added = 0;
  if (PARTS > 1 && it.chunk + chunks == FF / CHUNK) {  // MERGE's barrier lies between the parts before and this
    added = part;
    float4 all = {0.f, 0.f, 0.f, 0.f};
    if (warp < TILES) add_parts(shared, all, 0, part), shared.parts[warp][threadIdx.x % 32] = all;
  }
  const int tokens = num_tokens(a, shared);
  Reader reader;
  for (int first = 0; first < chunks; first += INNER_AT_ONCE) {
    Inputs in[INNER_AT_ONCE];
#pragma unroll
    for (int i = 0; i < INNER_AT_ONCE; i++)
      in[i].load(a.act, group_of(it.chunk + first + i), active() && first + i < chunks ? tokens : 0);
    if (first == 0) reader.begin(a, at, ring);
#pragma unroll
    for (int i = 0; i < INNER_AT_ONCE; i++) {
      if (first + i >= chunks) break;
      reader.multiply(a, at, ring, sums, in[i], first + i + 1 < chunks);
      if (PARTS > 1 && --left == 0) {
        store_part(shared, sums, part++);
        sums.clear();
        left = PART_CHUNKS;
      }
    }
  }
}
