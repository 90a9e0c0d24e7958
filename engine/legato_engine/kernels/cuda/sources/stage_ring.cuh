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
    for (int i = 0; i < stages; i++) barrier_init(full + i, 1), barrier_init(empty + i, readers * WARPS);
    barriers_ready();
  }
  __device__ __forceinline__ bf16* here() const { return data + slot * elements; }
  __device__ __forceinline__ void next() {
    if (++slot == stages) slot = 0, phase ^= 1;
  }
  // The producer.
  __device__ __forceinline__ bf16* acquire(int bytes) {
    barrier_wait(empty + slot, phase ^ 1);
    barrier_expect(full + slot, bytes);
    return here();
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
    next();
  }
  // Always true, once all lanes have what they read. A lane that has issued its reads may arrive before they are done, and the copy
  // engine overwrites what they have not reached; nothing but the values orders these, as in the resident kernel's ring. Grids have
  // one dimension, and the compiler does not know that `gridDim.z` is 1.
  static __device__ __forceinline__ bool is_read(u32 read) { return !__any_sync(~0u, (read & (gridDim.z - 1)) != 0); }
};

// The producer: `count` stages from at(i).
template <int CHUNK, class At>
__device__ __forceinline__ void produce_weights(Ring& ring, int count, At at) {
  constexpr int BYTES = 16 * CHUNK * 2;
  const u64 policy = stream_policy();
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    bf16* stage = ring.acquire(BYTES);
    copy_bulk(stage, at(i), BYTES, ring.full + ring.slot, policy);
    ring.next();
  }
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

// To each of a cluster's SHARED thread blocks, whose barriers count.
template <int SHARED>
__device__ __forceinline__ void copy_inputs(bf16* to, const bf16* from, int count, u64* full, u64 policy) {
  if (SHARED > 1)
    copy_bulk_shared<SHARED>(to, from, count * 2, full, policy);
  else
    copy_bulk(to, from, count * 2, full, policy);
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
    if (token < batch && token % SHARED == rank)
      copy_inputs<SHARED>(stage + token * (CHUNK + PAD), at(i, token), CHUNK, ring.full + ring.slot, policy);
    ring.next();
  }
}

constexpr int INPUT_BARRIERS = 128;  // bytes

// All inputs of each token, which come a chunk at a time.
template <int INPUTS>
struct HeldInputs {
  static constexpr int CHUNK = chunk_of(INPUTS), CHUNKS = INPUTS / CHUNK, STRIDE = INPUTS + PAD;
  static_assert(CHUNKS * sizeof(u64) <= INPUT_BARRIERS, "the barriers' memory");
  u64* full;
  bf16* data;

  __device__ HeldInputs(unsigned char*& shared, int tokens) {
    full = reinterpret_cast<u64*>(shared);
    data = reinterpret_cast<bf16*>(shared + INPUT_BARRIERS);
    shared += INPUT_BARRIERS + tokens * STRIDE * 2;
  }
  __device__ void init() {
    for (int i = 0; i < CHUNKS; i++) barrier_init(full + i, 1);
    barriers_ready();
  }
  // Of x [batch, INPUTS], by warp `index` of OF. Of a cluster's SHARED thread blocks each reads every SHARED-th token, for all.
  template <int SHARED, int OF>
  __device__ __forceinline__ void copy(const bf16* x, int batch, int rank, int index) {
    const int token = threadIdx.x % 32;
    const bool mine = token < batch && token % SHARED == rank && token / SHARED % OF == index;
    const u64 policy = keep_policy();
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      if (index == 0 && token == 0) barrier_expect(full + chunk, batch * CHUNK * 2);
      bf16* to = data + token * STRIDE + chunk * CHUNK;
      const bf16* from = x + (i64)token * INPUTS + chunk * CHUNK;
      if (mine) copy_inputs<SHARED>(to, from, CHUNK, full + chunk, policy);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void wait(int chunk) const { barrier_wait(full + chunk, 0); }
};
