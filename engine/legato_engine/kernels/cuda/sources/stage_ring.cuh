// Stages of weights and of tokens' inputs in shared memory, between the threads that read them and the warps that multiply.
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

// Whether a warp has inputs of a stage; known to the compiler where all have.
template <int CHUNK>
__device__ __forceinline__ bool has_inputs(int warp) { return CHUNK == WARPS * GROUP || warp * GROUP < CHUNK; }

__device__ __forceinline__ void workers_sync() { threads_sync<1, 256>(); }

// Threads of a warp that fill stages with weights: one by bulk copies, else all, 16 bytes each at a time.
constexpr int FILLERS = HAS_BULK_COPIES ? 1 : 32;

// By all lanes of a warp: `bytes`, which 16 divides.
__device__ __forceinline__ void copy_pieces(void* to, const void* from, int bytes, u64 policy) {
  for (int at = threadIdx.x % 32 * 16; at < bytes; at += 512)
    copy_run(static_cast<unsigned char*>(to) + at, static_cast<const unsigned char*>(from) + at, 16, policy);
}
// How a map's weights are packed (skinny_gemm.py): bf16; e4m3 or int8 with a float32 scale for each row; int4 with a bf16 scale for each
// 64 inputs of a row; or GGUF's blocks of 8 or 4 bits with an fp16 scale for each 32 inputs, of Q4_1 with an fp16 minimum too.
constexpr int BF16 = 0, E4M3 = 1, INT8 = 2, INT4 = 3, Q8_0 = 4, Q4_0 = 5, Q4_1 = 6;
#ifndef WEIGHTS
#define WEIGHTS 0
#endif
constexpr int WEIGHT_BITS = WEIGHTS == BF16 ? 16 : WEIGHTS == INT4 || WEIGHTS > Q8_0 ? 4 : 8;
constexpr int GROUP_BYTES = 16 * GROUP * WEIGHT_BITS / 8;  // of 16 rows of a warp's inputs
constexpr int SCALES = WEIGHTS < INT4 ? 0 : WEIGHTS == INT4 ? 1 : 2;  // of a row's 64 inputs
constexpr int SCALE_WORDS = WEIGHTS == Q4_1 ? 2 * SCALES : SCALES;    // of two rows, with minima
constexpr int GROUP_SCALES = 8 * SCALE_WORDS * 4;                     // bytes of 16 rows, after the weights of all warps
template <int CHUNK>
constexpr int STAGE_BYTES = CHUNK / GROUP * (GROUP_BYTES + GROUP_SCALES);

// Where a chunk begins, of CHUNK inputs of 16 rows each.
template <int CHUNK>
__device__ __forceinline__ const bf16* stage_of(const bf16* weights, i64 stage) {
  return weights + stage * (STAGE_BYTES<CHUNK> / 2);
}

// Stages of CHUNKS chunks that follow each other in memory: several chunks of fewer bits each, because a stage costs its readers a
// wait and an arrival whatever it holds.
constexpr int MOST_SPAN = WEIGHTS == BF16 ? 1 : 2;
template <int CHUNK, int CHUNKS>
struct Span {
  static constexpr int STAGES = (CHUNKS + MOST_SPAN - 1) / MOST_SPAN, SIZE = (CHUNKS + STAGES - 1) / STAGES;
  static constexpr int ELEMENTS = SIZE * STAGE_BYTES<CHUNK> / 2;
  static __device__ __forceinline__ constexpr int chunks(int stage) {
    return stage + 1 < STAGES ? SIZE : CHUNKS - (STAGES - 1) * SIZE;
  }
};

// A thread that has filled stages itself outlives its copies.
__device__ __forceinline__ void copies_landed() {
  if (!HAS_BULK_COPIES) copies_done();
}

// Stages in shared memory, with a barrier each for those that read it and for the producer.
struct Ring {
  bf16* data;
  u64 *full, *empty;
  int stages, elements, slot = 0;
  u32 phase = 0;

  __device__ Ring(unsigned char*& shared, int stages, int elements) : stages(stages), elements(elements) {
    full = reinterpret_cast<u64*>(shared);
    empty = full + stages;
    shared += ceil_div(stages, 8) * 128;
    data = reinterpret_cast<bf16*>(shared);
    shared += stages * elements * 2;
  }
  // `readers`: thread blocks of a cluster whose workers all read each stage.
  __device__ void init(int readers = 1) {
    for (int i = 0; i < stages; i++) barrier_init(full + i, FILLERS), barrier_init(empty + i, readers * WARPS);
    barriers_ready();
  }
  __device__ __forceinline__ bf16* here() const { return data + slot * elements; }
  __device__ __forceinline__ void next() {
    if (++slot == stages) slot = 0, phase ^= 1;
  }
  // The producer: its FILLERS, or a lane.
  __device__ __forceinline__ bf16* acquire(int bytes) {
    barrier_wait(empty + slot, phase ^ 1);
    if (HAS_BULK_COPIES) barrier_expect(full + slot, bytes);
    return here();
  }
  // By a warp: a stage of `count` pieces of `bytes` each, `stride` bytes apart, from at(i). Of a cluster's SHARED thread blocks each
  // copies every SHARED-th, for all.
  template <int SHARED = 1, class At>
  __device__ __forceinline__ void fill(int count, int bytes, int stride, u64 policy, At at, int rank = 0) {
    const int lane = threadIdx.x % 32;
    unsigned char* stage = reinterpret_cast<unsigned char*>(here());
#if HAS_BULK_COPIES
    if (lane == 0) acquire(count * bytes);
    __syncwarp();
    if (lane < count && lane % SHARED == rank) {
      if (SHARED > 1)
        copy_bulk_shared<SHARED>(stage + lane * stride, at(lane), bytes, full + slot, policy);
      else
        copy_bulk(stage + lane * stride, at(lane), bytes, full + slot, policy);
    }
#else
    static_assert(SHARED == 1, "clusters have bulk copies");
    acquire(count * bytes);
    for (int i = 0; i < count; i++) copy_pieces(stage + i * stride, at(i), bytes, policy);
    barrier_arrive_copied(full + slot);
#endif
    next();
  }
  // The workers.
  __device__ __forceinline__ const bf16* get() {
    barrier_wait(full + slot, phase);
    return here();
  }
  // The workers let the stage go, in each of a cluster's READERS. `read` depends on all that the lane read of it. The last ones of
  // a cluster are not let go (`more`): a thread block may have ended by then.
  template <int READERS = 1>
  __device__ __forceinline__ void release(u32 read, bool more = true) {
    if (is_read(read) && more && threadIdx.x % 32 < READERS) {
      if (READERS > 1) barrier_arrive_at(empty + slot, threadIdx.x % 32); else barrier_arrive(empty + slot);
    }
    if (!HAS_BULK_COPIES) __syncwarp();  // before products of whole warps
    next();
  }
  // Always true, once all lanes have what they read. A lane that has issued its reads may arrive before they are done, and the copy
  // engine overwrites what they have not reached; nothing but the values orders these, as in the resident kernel's ring. Grids have
  // one dimension, and the compiler does not know that `gridDim.z` is 1.
  static __device__ __forceinline__ bool is_read(u32 read) { return !__any_sync(~0u, (read & (gridDim.z - 1)) != 0); }
};

// A warp: `count` times CHUNKS chunks from at(i, beside) on, for BESIDE of them stage by stage in turns.
template <int CHUNK, int CHUNKS, int BESIDE = 1, class At>
__device__ __forceinline__ void produce_weights(Ring& ring, int count, At at) {
  using Stages = Span<CHUNK, CHUNKS>;
  if (threadIdx.x % 32 >= FILLERS) return;
  const u64 policy = stream_policy();
  const int all = count * Stages::STAGES * BESIDE;
#pragma unroll 1
  for (int i = 0; i < all; i++) {
    const int which = i / BESIDE % Stages::STAGES, bytes = Stages::chunks(which) * STAGE_BYTES<CHUNK>;
    const bf16* from = at(i / (BESIDE * Stages::STAGES), i % BESIDE) + which * Stages::ELEMENTS;
    bf16* stage = ring.acquire(bytes);
#if HAS_BULK_COPIES
    copy_bulk(stage, from, bytes, ring.full + ring.slot, policy);
#else
    copy_pieces(stage, from, bytes, policy);
    barrier_arrive_copied(ring.full + ring.slot);
#endif
    ring.next();
  }
  copies_landed();
}

// With one tile only the batch.
template <int NT>
__device__ __forceinline__ int columns(int batch) { return NT == 1 ? batch : NT * 8; }

// Of tokens beyond the batch, which no copy fills.
template <int NT>
__device__ __forceinline__ void clear(bf16* data, int stride, int batch) {
  const int count = (columns<NT>(batch) - batch) * stride / 8;
  uint4* from = reinterpret_cast<uint4*>(data + batch * stride);
  for (int i = threadIdx.x; i < count; i += WORKERS) from[i] = uint4{0, 0, 0, 0};
}
template <int NT>
__device__ __forceinline__ void clear(const Ring& inputs, int stride, int batch) {
  for (int stage = 0; stage < inputs.stages; stage++) clear<NT>(inputs.data + stage * inputs.elements, stride, batch);
}

// The second producer, a warp: CHUNK inputs of each token per stage, from at(i, token). A cluster's blocks read each
// token once: `rank` has every SHARED-th, for all.
template <int CHUNK, int SHARED = 1, class At>
__device__ __forceinline__ void produce_inputs(Ring& ring, int count, int batch, At at, int rank = 0) {
  const u64 policy = keep_policy();
  for (int i = 0; i < count; i++)
    ring.fill<SHARED>(batch, CHUNK * 2, (CHUNK + PAD) * 2, policy, [&](int token) { return at(i, token); }, rank);
  copies_landed();
}

constexpr int INPUT_BARRIERS = 128;  // bytes

// In two rounds the first half of all inputs goes to registers before the second half takes its place.
#ifndef ROUNDS
#define ROUNDS 1
#endif

// All inputs of each token, which come a chunk at a time.
template <int INPUTS>
struct HeldInputs {
  static constexpr int CHUNK = chunk_of(INPUTS), CHUNKS = INPUTS / CHUNK, ROUND = (CHUNKS + ROUNDS - 1) / ROUNDS;
  static constexpr int STRIDE = ROUND * CHUNK + PAD;
  static_assert(CHUNKS * sizeof(u64) <= INPUT_BARRIERS, "the barriers' memory");
  u64* full;
  bf16* data;

  __device__ HeldInputs(unsigned char*& shared, int tokens) {
    full = reinterpret_cast<u64*>(shared);
    data = reinterpret_cast<bf16*>(shared + INPUT_BARRIERS);
    shared += INPUT_BARRIERS + tokens * STRIDE * 2;
  }
  // OF warps copy.
  template <int OF>
  __device__ void init() {
    for (int i = 0; i < CHUNKS; i++) barrier_init(full + i, HAS_BULK_COPIES ? 1 : OF * FILLERS);
    barriers_ready();
  }
  __device__ __forceinline__ static int at(int chunk) { return chunk % ROUND * CHUNK; }
  // A round's chunks of x [batch, INPUTS], by warp `index` of OF. Of a cluster's SHARED thread blocks each reads every SHARED-th token,
  // for all.
  template <int SHARED, int OF>
  __device__ __forceinline__ void copy(const bf16* x, int batch, int rank, int index, int round = 0) {
    static_assert(SHARED == 1 || ROUNDS == 1, "a peer's workers may not have taken the first round");
    const u64 policy = keep_policy();
    const int begin = round * ROUND, end = begin + ROUND < CHUNKS ? begin + ROUND : CHUNKS;
#if HAS_BULK_COPIES
    const int token = threadIdx.x % 32;
    const bool mine = token < batch && token % SHARED == rank && token / SHARED % OF == index;
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk++) {
      if (index == 0 && token == 0) barrier_expect(full + chunk, batch * CHUNK * 2);
      bf16* to = data + token * STRIDE + at(chunk);
      const bf16* from = x + (i64)token * INPUTS + chunk * CHUNK;
      if (!mine) continue;
      if (SHARED > 1)
        copy_bulk_shared<SHARED>(to, from, CHUNK * 2, full + chunk, policy);
      else
        copy_bulk(to, from, CHUNK * 2, full + chunk, policy);
    }
#else
    static_assert(SHARED == 1, "clusters have bulk copies");
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk++) {
      for (int token = index; token < batch; token += OF)
        copy_pieces(data + token * STRIDE + at(chunk), x + (i64)token * INPUTS + chunk * CHUNK, CHUNK * 2, policy);
      barrier_arrive_copied(full + chunk);
    }
#endif
    __syncwarp();
  }
  __device__ __forceinline__ void wait(int chunk) const { barrier_wait(full + chunk, 0); }
};
