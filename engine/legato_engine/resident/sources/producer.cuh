// The producer: one warp that keeps the ring full with the weights, keys and values of the program, in its order.
// It waits for free stages alone. The keys and values that it copies were written in earlier steps.
#pragma once
#include "worker.cuh"

__device__ __forceinline__ unsigned char* acquire(const Arguments& a, Place& at, Ring& ring, u32 bytes) {
  wait_barrier(a, at, ring.shared.empty + ring.slot, ring.phase ^ 1, 2, ring.slot);
  if (!at.dead) barrier_expect(ring.shared.full + ring.slot, bytes);
  return ring.shared.ring[ring.slot];
}

__device__ __forceinline__ void produce_weights(
    const Arguments& a, Place& at, Ring& ring, const unsigned char* from, int stages, u64 policy) {
  for (int i = 0; i < stages; i++, from += STAGE_BYTES) {
    if (threadIdx.x % 32 == 0) {
      unsigned char* stage = acquire(a, at, ring, STAGE_BYTES);
      if (!at.dead) copy_bulk(stage, from, STAGE_BYTES, ring.shared.full + ring.slot, policy);
    }
    ring.next();
  }
}

// One row's pages of a worker's quarter; lanes 2i and 2i + 1 copy keys and values of a stage's page i.
__device__ __forceinline__ void produce_row(
    const Arguments& a, Place& at, Ring& ring, int layer, int row, int position, u64 policy) {
  const int lane = threadIdx.x % 32, quarter = blockIdx.x % SPLITS, head = blockIdx.x / SPLITS;
  const int own = own_pages(position, quarter);
  const bf16* from = lane % 2 ? a.values : a.keys;
  for (int first = 0; first < own; first += STAGE_PAGES) {
    const int which = first + lane / 2;
    const bool mine = lane / 2 < STAGE_PAGES && which < own;
    const int filled = mine ? min(PAGE, position - (quarter + SPLITS * which) * PAGE) : 0;
    const u32 bytes = filled * HEAD_DIM * 2, total = __reduce_add_sync(~0u, bytes);
    if (lane == 0) acquire(a, at, ring, total);
    at.dead = __shfl_sync(~0u, at.dead, 0);
    if (mine && !at.dead) {
      const i64 page = (i64)layer * a.layer_pages + ring.shared.pages[row][which];
      const bf16* source = from + (page * HEADS + head) * (PAGE * HEAD_DIM);
      copy_bulk(ring.shared.ring[ring.slot] + lane / 2 * PAGE_BYTES + lane % 2 * (PAGE_BYTES / 2), source, bytes,
                ring.shared.full + ring.slot, policy);
    }
    ring.next();
  }
}

__device__ __forceinline__ void produce(const Arguments& a, Shared& shared) {
  Ring ring{shared};
  Place at;
  const u64 policy = stream_policy();
  const Instruction* table = a.table + blockIdx.x * a.count;
  const unsigned char* weights =
      reinterpret_cast<const unsigned char*>(a.weights) + (i64)blockIdx.x * a.stream_stages * STAGE_BYTES;
  for (at.step = 0; at.step < a.steps; at.step++)
    for (at.index = 0; at.index < a.count; at.index++) {
      const Instruction& it = table[at.index];
      const int op = it.op, stages = it.num_blocks * it.num_chunks;
      if (op == OP_ATTEND) {
        // Ordinary stores of other workers, which this one waited for long ago, before the copies that read them.
        asm volatile("fence.proxy.async;" ::: "memory");
        for (int row = 0; row < a.rows; row++)
          produce_row(a, at, ring, it.layer, row, a.position[row] + at.step, policy);
      } else if (op >= 0) {
        produce_weights(a, at, ring, weights + (i64)it.stage * STAGE_BYTES, stages, policy);
      }
      at.dead = __shfl_sync(~0u, at.dead, 0);
      if (at.dead) {
        __nanosleep(1000000);  // copies under way end before their memory is another's
        return;
      }
    }
}
