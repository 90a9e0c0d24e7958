// Attention of every token to every token of its sequence, by warpgroup products.
//
// GROUPS warpgroups multiply (2 or 3), KEYS of a block are a multiple of 32, BOX rows of a copy a divisor of KEYS and
// 64.
//
// A tile is 64 * GROUPS queries of one head, or 64 less in some heads, so that the last round of tiles is shorter.
// Warpgroups take 64 queries each, and the keys block by block, a short one first: a block's softmax runs while the
// tensor cores multiply the preceding block's values. Blocks and their order are the same for every tile, so a
// query's result depends on its own sequence alone.
//
// In shared memory the first 64 dimensions of a row are 128 bytes. The TAIL is apart: of queries and keys 16
// dimensions in 32 bytes, of values 64 in 128; dimensions that the head lacks are zero.
#include "row_softmax.cuh"
#include "wgmma.cuh"

constexpr int WIDE = 128, NARROW = 32;                                // bytes of a row
constexpr int CHUNKS = HEAD / 8;                                      // of 16 bytes, in a row of the result
constexpr bool TAIL = HEAD > 64;
constexpr int QUERIES = 64 * GROUPS, BLOCKS = (TOKENS - 1) / KEYS;    // full ones after the first
constexpr int REST = TOKENS - BLOCKS * KEYS;                          // keys of the first
constexpr int FIRST = (REST + 15) / 16 * 16;                          // that are multiplied: the last not counted
constexpr int COPIED = (REST + BOX - 1) / BOX * BOX;                  // and copied
constexpr int FEWER = QUERIES - 64;                                   // of a narrow tile
constexpr int TILES = (TOKENS + QUERIES - 1) / QUERIES, NARROW_TILES = (TOKENS + FEWER - 1) / FEWER;  // of a head
constexpr int ROW_BYTES = WIDE + (TAIL ? NARROW : 0);                 // of queries and keys
constexpr int VALUE_BYTES = WIDE + (TAIL ? WIDE : 0);
constexpr int THREADS = 128 + 128 * GROUPS;
constexpr u32 TURN = 1;  // the first named barrier of the warpgroups' turns
static_assert((HEAD == 64 || HEAD == 72) && KEYS % 32 == 0 && BLOCKS > 0 && KEYS % BOX == 0 && 64 % BOX == 0, "sizes");

struct Shared {
  unsigned char queries[2][QUERIES * ROW_BYTES], keys[STAGES][KEYS * ROW_BYTES], values[STAGES][KEYS * VALUE_BYTES];
  u64 query_empty[2], keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
};

struct Place {
  int slot = 0;
  u32 phase = 0;
  __device__ __forceinline__ void next() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  // To the first block of this thread block's `count`-th tile.
  __device__ __forceinline__ void seek(int count) {
    const u32 blocks = (u32)count * (BLOCKS + 1);
    slot = blocks % STAGES, phase = blocks / STAGES % 2;
  }
};

// Tiles after the first `wide` are narrow.
struct Tile {
  int sequence, head, first, groups;
  __device__ __forceinline__ Tile(int tile, int wide) {
    const bool narrow = tile >= wide;
    const int rest = narrow ? tile - wide : tile, tiles = narrow ? NARROW_TILES : TILES;
    const int index = rest / tiles + (narrow ? wide / TILES : 0);
    sequence = index / HEADS, head = index % HEADS, first = rest % tiles * (narrow ? FEWER : QUERIES);
    groups = min(narrow ? GROUPS - 1 : GROUPS, (TOKENS - first + 63) / 64);
  }
};

// Of a tensor [sequences, TOKENS, HEADS, HEAD].
struct alignas(64) TensorMap {
  u64 words[16];
};

// Boxes of BOX rows of 64 dimensions, and of 16 for the tails.
struct Maps {
  const TensorMap &query, &query_tail, &key, &key_tail, &value;
};

// The thread that issues copies.
struct Copier {
  Shared& shared;
  const Maps& maps;
  Place keys, values;

  template <int ROWS, int BYTES>
  __device__ __forceinline__ void rows(unsigned char* to, const TensorMap& map, int dimension, const Tile& at, int first,
                                       u64* full) {
#pragma unroll
    for (int i = 0; i < ROWS; i += BOX)
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
          "[%6];" ::"r"(shared_address(to + i * BYTES)),
          "l"(&map), "r"(dimension), "r"(at.head), "r"(first + i), "r"(at.sequence), "r"(shared_address(full))
          : "memory");
  }
  // ROWS keys from `first` on, with the first block the queries.
  template <int ROWS, bool WITH_QUERIES>
  __device__ __forceinline__ void copy_keys(const Tile& at, int first, int buffer) {
    u64* const full = shared.keys_full + keys.slot;
    unsigned char *const key = shared.keys[keys.slot], *const query = shared.queries[buffer];
    barrier_wait(shared.keys_empty + keys.slot, keys.phase ^ 1);
    barrier_expect(full, (ROWS + WITH_QUERIES * QUERIES) * ROW_BYTES);
    rows<ROWS, WIDE>(key, maps.key, 0, at, first, full);
    if (TAIL) rows<ROWS, NARROW>(key + KEYS * WIDE, maps.key_tail, 64, at, first, full);
    if (WITH_QUERIES) {
      rows<QUERIES, WIDE>(query, maps.query, 0, at, at.first, full);
      if (TAIL) rows<QUERIES, NARROW>(query + QUERIES * WIDE, maps.query_tail, 64, at, at.first, full);
    }
    keys.next();
  }
  template <int ROWS>
  __device__ __forceinline__ void copy_values(const Tile& at, int first) {
    u64* const full = shared.values_full + values.slot;
    unsigned char* const value = shared.values[values.slot];
    barrier_wait(shared.values_empty + values.slot, values.phase ^ 1);
    barrier_expect(full, ROWS * VALUE_BYTES);
    rows<ROWS, WIDE>(value, maps.value, 0, at, first, full);
    if (TAIL) rows<ROWS, WIDE>(value + KEYS * WIDE, maps.value, 64, at, first, full);
    values.next();
  }
  __device__ __forceinline__ void tile(const Tile& at, int buffer) {
    copy_keys<COPIED, true>(at, 0, buffer);
    copy_keys<KEYS, false>(at, REST, buffer);
    copy_values<COPIED>(at, 0);
#pragma unroll 1
    for (int block = 1; block < BLOCKS; block++) {
      copy_keys<KEYS, false>(at, REST + block * KEYS, buffer);
      copy_values<KEYS>(at, REST + (block - 1) * KEYS);
    }
    copy_values<KEYS>(at, TOKENS - KEYS);
  }
};

// Of four lanes: lane i gets word i of each.
__device__ __forceinline__ void transpose(u32 (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit <<= 1)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & bit) continue;
      const bool upper = threadIdx.x & bit;
      const u32 other = __shfl_xor_sync(~0u, upper ? words[i] : words[i | bit], bit);
      words[i] = upper ? other : words[i];
      words[i | bit] = upper ? words[i | bit] : other;
    }
}

// A warpgroup: 64 queries of a tile.
struct Group {
  Shared& shared;
  const int index, warp, lane;
  Place keys, values;
  float mixed[HEAD / 2];

  __device__ Group(Shared& shared)
      : shared(shared), index((int)threadIdx.x / 128 - 1), warp((int)threadIdx.x % 128 / 32), lane((int)threadIdx.x % 32) {}

  __device__ __forceinline__ void leave(u64* barrier) {
    if (lane == 0) barrier_arrive(barrier);
  }
  // One group's softmax overlaps others' products.
  __device__ __forceinline__ void take_turn() {
    asm volatile("bar.sync %0, 256;" ::"r"(TURN + index) : "memory");
  }
  __device__ __forceinline__ void pass_turn() {
    asm volatile("bar.arrive %0, 256;" ::"r"(TURN + (index + 1) % GROUPS) : "memory");
  }

  template <int N>
  __device__ __forceinline__ void score(float (&s)[N / 2], int buffer) {
    const unsigned char *const query = shared.queries[buffer], *const key = shared.keys[keys.slot];
    const u64 q = operand(query + index * 64 * WIDE, BYTES_128, 8 * WIDE), k = operand(key, BYTES_128, 8 * WIDE);
    barrier_wait(shared.keys_full + keys.slot, keys.phase);
    take_turn();
    settle(s);
    products_begin();
    multiply<N, false>(s, q, k);
#pragma unroll
    for (int i = 1; i < 4; i++) multiply<N, true>(s, moved(q, 32 * i), moved(k, 32 * i));
    if (TAIL)
      multiply<N, true>(s, operand(query + QUERIES * WIDE + index * 64 * NARROW, BYTES_32, 8 * NARROW),
                        operand(key + KEYS * WIDE, BYTES_32, 8 * NARROW));
    products_commit();
  }
  template <int N>
  __device__ __forceinline__ void mix(const u32 (&p)[N / 4]) {
    const u64 v = operand(shared.values[values.slot], BYTES_128, 8 * WIDE, KEYS * WIDE);
    barrier_wait(shared.values_full + values.slot, values.phase);
    settle(mixed);
    products_begin();
#pragma unroll
    for (int i = 0; i < N / 16; i++) multiply<HEAD>(mixed, p + 4 * i, moved(v, 16 * WIDE * i));
    products_commit();
  }
  template <int COUNT>
  __device__ __forceinline__ void round(const float (&s)[COUNT], u32 (&p)[COUNT / 2]) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
  }
  __device__ __forceinline__ void shrink(const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD / 2; i++) mixed[i] *= by[i % 4 / 2];
  }

  __device__ __forceinline__ void leave_keys() {
    leave(shared.keys_empty + keys.slot);
    keys.next();
  }
  __device__ __forceinline__ void leave_values() {
    settle(mixed);
    leave(shared.values_empty + values.slot);
    values.next();
  }

  // The next block's scores, while `p` weighs the preceding values.
  template <int BEFORE>
  __device__ __forceinline__ void both(float (&s)[KEYS / 2], const u32 (&p)[BEFORE / 4], Softmax& softmax, int buffer) {
    float by[2];
    score<KEYS>(s, buffer);
    mix<BEFORE>(p);
    pass_turn();
    products_wait<1>();
    settle(s);
    leave_keys();
    softmax.template step<KEYS, KEYS>(s, by);
    products_wait<0>();
    leave_values();
    shrink(by);
  }

  // Turns and barriers of a tile without queries.
  __device__ __forceinline__ void skip(int buffer) {
#pragma unroll 1
    for (int block = 0; block <= BLOCKS; block++) {
      barrier_wait(shared.keys_full + keys.slot, keys.phase);
      take_turn();
      pass_turn();
      leave_keys();
      barrier_wait(shared.values_full + values.slot, values.phase);
      leave(shared.values_empty + values.slot);
      values.next();
    }
    leave(shared.query_empty + buffer);
  }

  __device__ __forceinline__ void tile(const Tile& at, int count, bf16* out) {
    const int buffer = count % 2;
    keys.seek(count), values.seek(count);
    if (index >= at.groups) return skip(buffer);
    Softmax softmax;
    softmax.reset();
#pragma unroll
    for (int i = 0; i < HEAD / 2; i++) mixed[i] = 0.f;
    u32 p[KEYS / 4], p_first[FIRST / 4];
    {
      float s[FIRST / 2], nothing[2];
      score<FIRST>(s, buffer);
      pass_turn();
      products_wait<0>();
      settle(s);
      leave_keys();
      softmax.template step<FIRST, REST>(s, nothing);
      round(s, p_first);
    }
    float s[KEYS / 2];
    both<FIRST>(s, p_first, softmax, buffer);
    round(s, p);
#pragma unroll 1
    for (int block = 1; block < BLOCKS; block++) {
      both<KEYS>(s, p, softmax, buffer);
      round(s, p);
    }
    leave(shared.query_empty + buffer);
    mix<KEYS>(p);
    const float scale[2] = {softmax.inverse(0), softmax.inverse(1)};
    products_wait<0>();
    leave_values();
    shrink(scale);
    store(at, out);
  }

  // Rows that exist; four lanes that share a row have 16 bytes each of a fourth of its chunks.
  __device__ __forceinline__ void store(const Tile& at, bf16* out) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = at.first + index * 64 + warp * 16 + lane / 4 + 8 * r;
      bf16* const row = out + (((i64)at.sequence * TOKENS + token) * HEADS + at.head) * HEAD;
#pragma unroll
      for (int c = 0; c + 4 <= CHUNKS; c += 4) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = pack(mixed[4 * (c + i) + 2 * r], mixed[4 * (c + i) + 2 * r + 1]);
        transpose(words);
        if (token < TOKENS)
          reinterpret_cast<uint4*>(row)[c + lane % 4] = uint4{words[0], words[1], words[2], words[3]};
      }
      if (CHUNKS % 4 && token < TOKENS)
        reinterpret_cast<u32*>(row + HEAD - 8)[lane % 4] = pack(mixed[HEAD / 2 - 4 + 2 * r], mixed[HEAD / 2 - 3 + 2 * r]);
    }
  }
};

// `tiles` of all heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fused_attention(const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap query_tail,
                    const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap key_tail,
                    const __grid_constant__ TensorMap value, bf16* out, int tiles, int wide) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) barrier_init(shared.query_empty + i, 4 * GROUPS);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(shared.keys_full + i, 1), barrier_init(shared.keys_empty + i, 4 * GROUPS);
      barrier_init(shared.values_full + i, 1), barrier_init(shared.values_empty + i, 4 * GROUPS);
    }
    barriers_ready();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      wait_previous();
      const Maps maps{query, query_tail, key, key_tail, value};
      Copier copier{shared, maps};
      int count = 0;
      for (int index = blockIdx.x; index < tiles; index += gridDim.x, count++) {
        barrier_wait(shared.query_empty + count % 2, count / 2 % 2 ^ 1);
        copier.tile(Tile(index, wide), count % 2);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 3 ? 160 : 240));
    Group group(shared);
    if (group.index == GROUPS - 1) group.pass_turn();
    int count = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x, count++) group.tile(Tile(index, wide), count, out);
    if (group.index == 0) group.take_turn();
  }
}
