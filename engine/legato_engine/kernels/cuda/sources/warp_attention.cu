// Attention of every token to every token of its sequence, by products of warps: for GPUs without warpgroups' products.
//
// A thread block has QUERIES of one head, a warp 32 of them. Blocks of KEYS keys and values come two at a time: one is multiplied
// while the next is copied. Blocks and their order are the same for every query, so its result depends on its own sequence alone.
#include "row_softmax.cuh"

constexpr int WARPS = 4, TILES = 2, QUERIES = 16 * TILES * WARPS;  // tiles of a warp
constexpr int STEPS = (HEAD + 15) / 16;                            // of scores: 16 dimensions each, the last ones may be zeros
constexpr int STRIDE = 16 * STEPS + 8;                             // of a row in shared memory, without bank conflicts
constexpr int PIECES = HEAD / 8;                                   // 16 bytes each, of a row
constexpr int FULL = (TOKENS - 1) / KEYS, REST = TOKENS - FULL * KEYS;  // blocks, and keys of the last one
static_assert(HEAD % 8 == 0 && KEYS % 32 == 0, "sizes");

struct Block {
  bf16 keys[KEYS * STRIDE], values[KEYS * STRIDE];
};

// Of one head of one sequence: `token` elements are between two tokens.
struct Source {
  const bf16 *key, *value;
  int token;
};

// By all threads. What lies beyond the tokens becomes zeros.
__device__ __forceinline__ void copy_block(Block& to, const Source& from, int block, u64 policy) {
  for (int i = threadIdx.x; i < KEYS * PIECES; i += 32 * WARPS) {
    const int row = i / PIECES, piece = i % PIECES, token = block * KEYS + row;
    const int bytes = token < TOKENS ? 16 : 0;
    const i64 at = (i64)min(token, TOKENS - 1) * from.token + piece * 8;
    copy_run(to.keys + row * STRIDE + piece * 8, from.key + at, bytes, policy);
    copy_run(to.values + row * STRIDE + piece * 8, from.value + at, bytes, policy);
  }
}

// A warp's queries.
struct Queries {
  u32 of[TILES][STEPS][4];
  float4 mixed[TILES][HEAD / 8];
  Softmax softmax[TILES];

  __device__ __forceinline__ void load(const bf16* query, int token_stride, int first) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      softmax[tile].reset();
#pragma unroll
      for (int i = 0; i < HEAD / 8; i++) mixed[tile][i] = float4{0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const bf16* row = query + (i64)min(first + tile * 16 + half * 8 + g, TOKENS - 1) * token_stride + 2 * t;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
          for (int side = 0; side < 2; side++)
            of[tile][step][2 * side + half] = 16 * step + 8 * side < HEAD ? load_fresh_u32(row + 16 * step + 8 * side) : 0;
      }
    }
  }

  // VALID of a block's keys exist.
  template <int VALID>
  __device__ __forceinline__ void attend(const Block& block) {
    const int lane = threadIdx.x % 32;
    float4 s[TILES][KEYS / 8] = {};
    const bf16* key = block.keys + (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int pair = 0; pair < KEYS / 16; pair++) {
        const uint4 k = load_matrices(key + pair * 16 * STRIDE + step * 16);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          const u32(&q)[4] = of[tile][step];
          mma(s[tile][2 * pair], q[0], q[1], q[2], q[3], k.x, k.y);
          mma(s[tile][2 * pair + 1], q[0], q[1], q[2], q[3], k.z, k.w);
        }
      }
    u32 p[TILES][KEYS / 4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float scores[KEYS / 2], by[2];
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++) {
        const float4& from = s[tile][i];
        scores[4 * i] = from.x, scores[4 * i + 1] = from.y, scores[4 * i + 2] = from.z, scores[4 * i + 3] = from.w;
      }
      softmax[tile].template step<KEYS, VALID>(scores, by);
#pragma unroll
      for (int i = 0; i < KEYS / 4; i++) p[tile][i] = pack(scores[2 * i], scores[2 * i + 1]);
#pragma unroll
      for (int i = 0; i < HEAD / 8; i++) {
        float4& m = mixed[tile][i];
        m.x *= by[0], m.y *= by[0], m.z *= by[1], m.w *= by[1];
      }
    }
    const auto weigh = [&](int step, int dims, u32 low, u32 high) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const u32* w = p[tile] + 4 * step;
        mma(mixed[tile][dims], w[0], w[1], w[2], w[3], low, high);
      }
    };
    const bf16* value = block.values + lane % 16 * STRIDE + lane / 16 * 8;
    const bf16* last = block.values + lane * STRIDE + HEAD - 8;
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
#pragma unroll
      for (int pair = 0; pair < HEAD / 16; pair++) {
        const uint4 v = load_transposed(value + step * 16 * STRIDE + pair * 16);
        weigh(step, 2 * pair, v.x, v.y);
        weigh(step, 2 * pair + 1, v.z, v.w);
      }
      if (HEAD / 8 % 2 == 0 || step % 2) continue;
      const uint4 v = load_transposed(last + step * 16 * STRIDE);
      weigh(step, HEAD / 8 - 1, v.x, v.y);
      weigh(step + 1, HEAD / 8 - 1, v.z, v.w);
    }
  }

  // `out` of the head; `first` is the warp's first token.
  __device__ __forceinline__ void store(bf16* out, int first) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float scale = softmax[tile].inverse(half);
        const int token = first + tile * 16 + half * 8 + g;
        u32* row = reinterpret_cast<u32*>(out + (i64)token * (HEADS * HEAD)) + t;
        if (token >= TOKENS) continue;
#pragma unroll
        for (int i = 0; i < HEAD / 8; i++) {
          const float4& m = mixed[tile][i];
          row[4 * i] = half ? pack(m.z * scale, m.w * scale) : pack(m.x * scale, m.y * scale);
        }
      }
  }
};

// Of tensors [sequences, TOKENS, HEADS, HEAD], `token` and `sequence` elements between two of them; `out` is contiguous.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    warp_attention(const bf16* query, const bf16* key, const bf16* value, bf16* out, int token, int sequence) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  Block* const blocks = reinterpret_cast<Block*>(shared_memory);
  const int tile = blockIdx.x / HEADS % ((TOKENS + QUERIES - 1) / QUERIES), head = blockIdx.x % HEADS;
  const int index = blockIdx.x / HEADS / ((TOKENS + QUERIES - 1) / QUERIES), first = tile * QUERIES + threadIdx.x / 32 * (16 * TILES);
  const i64 at = (i64)index * sequence + head * HEAD;
  const Source from{key + at, value + at, token};
  // Dimensions that the head lacks; copies do not touch them.
  for (int i = threadIdx.x; i < 2 * KEYS * (STRIDE / 8 - PIECES); i += 32 * WARPS) {
    const int row = i % KEYS, piece = PIECES + i / KEYS % (STRIDE / 8 - PIECES);
    Block& block = blocks[i / (KEYS * (STRIDE / 8 - PIECES))];
    *reinterpret_cast<uint4*>(block.keys + row * STRIDE + piece * 8) = uint4{0, 0, 0, 0};
  }
  launch_dependents();
  wait_previous();
  const u64 policy = keep_policy();
  copy_block(blocks[0], from, 0, policy);
  Queries queries;
  queries.load(query + at, token, first);
#pragma unroll 1
  for (int block = 0; block < FULL; block++) {
    copies_done();
    __syncthreads();
    copy_block(blocks[(block + 1) % 2], from, block + 1, policy);
    queries.attend<KEYS>(blocks[block % 2]);
  }
  copies_done();
  __syncthreads();
  queries.attend<REST>(blocks[FULL % 2]);
  queries.store(out + ((i64)index * TOKENS * HEADS + head) * HEAD, first);
}
