// Loader, polling and signalling warps. Loaders keep the ring full with the program's weights, keys and values, in its
// order, and wait for free stages only. They alternate by stages, because the many small copies of keys and values take
// one loader too long. The keys and values that they copy were written in earlier steps.
#pragma once
#include "drafts.cuh"
#include "units.cuh"

// Alternation of loaders by stages.
struct Turn {
  int others;      // stages until the loader's next one
  u32 stages = 0;  // of both loaders, including the current one
  __device__ __forceinline__ bool mine() {
    stages++;
    if (others--) return false;
    others = LOADERS - 1;
    return true;
  }
};

// No copy may be in flight when the block ends and its shared memory is reused. Both loaders have begun their last copies here.
__device__ __forceinline__ void finish_copies(Shared& shared) {
  __syncwarp();
  threads_sync<3, LOADERS * 32>();
  if (threadIdx.x % 32) return;
  for (int slot = 0; slot < RING; slot++)
    if (const u32 begun = shared.begun[slot])
      while (!barrier_done(shared.full + slot, begun - 1 & 1)) {}
}

// The next stage, once it is free and fewer than UNDER_WAY others are being copied. More copies in flight do not finish
// sooner, and the activations and counters that workers wait for queue behind them in the memory system. A loader that
// still waits after the last step has no more work, as if dead.
__device__ __forceinline__ unsigned char* acquire(const Arguments& a, Place& at, const Ring& ring, const Turn& turn, u32 bytes) {
  const bool wraps = ring.slot < UNDER_WAY;
  const int slot = ring.slot, before = slot - UNDER_WAY + (wraps ? RING : 0);
  u64 deadline = 0;
  for (u32 polls = 1; !at.dead; polls++) {  // one poll of both
    const bool is_free = barrier_done(ring.shared.empty + slot, ring.parity() ^ 1);
    const bool landed = turn.stages <= UNDER_WAY || barrier_done(ring.shared.full + before, ring.parity() ^ wraps);
    if (is_free && landed) break;
    at.dead = is_over(ring.shared);
    if (polls % 256 == 0 && !at.dead)
      at.dead = times_out(a, at, deadline, is_free ? Waited{1, before, ring.parity() ^ wraps, 0} : Waited{2, slot, ring.parity() ^ 1, 0});
  }
  dawdle(9);
  if (!at.dead) barrier_expect(ring.shared.full + slot, bytes);
  return ring.shared.ring[slot];
}

// Note that copies to the stage have begun.
__device__ __forceinline__ void note_begun(const Ring& ring) { store_release_shared(ring.shared.begun + ring.slot, ring.lap + 1); }

__device__ __forceinline__ void load_weights(
    const Arguments& a, Place& at, Ring& ring, Turn& turn, const unsigned char* from, int stages,
    u64 policy) {
  for (int i = 0; i < stages; i++, from += STAGE_BYTES) {
    if (turn.mine()) {
      unsigned char* stage = acquire(a, at, ring, turn, STAGE_BYTES);
      if (at.dead) return;
      copy_bulk(stage, from, STAGE_BYTES, ring.shared.full + ring.slot, policy);
      note_begun(ring);
    }
    ring.next();
  }
}

// Load pages `begin` to `end` of a row whose positions before `cached` are cached; only the last page may have others. `head`: byte
// offset of the worker's head in a page of the layer, from the first page's.
__device__ __forceinline__ void load_pages(
    const Arguments& a, Place& at, Ring& ring, Turn& turn, i64 head, const int* pages, int begin, int end, int cached, u64 policy) {
  constexpr int HALF = PAGE_BYTES / 2;  // of keys, and of values
  const int quarter = blockIdx.x % SPLITS;
  const int tail = max(0, min(PAGE, cached - (quarter + SPLITS * (end - 1)) * PAGE)) * (HALF / PAGE);
  for (int first = begin; first < end; first += STAGE_PAGES, ring.next()) {
    if (!turn.mine()) continue;
    const int whole = min(STAGE_PAGES, end - first) - 1, rest = first + STAGE_PAGES < end ? HALF : tail;
    i64 from[STAGE_PAGES];
#pragma unroll
    for (int i = 0; i < STAGE_PAGES; i++) from[i] = head + (i64)pages[first + min(i, whole)] * (HEADS * HALF);
    unsigned char* stage = acquire(a, at, ring, turn, 2 * (whole * HALF + rest));
    if (at.dead) return;
    const auto copy = [&](int place, const bf16* of, i64 at, int bytes) {
      copy_bulk(stage + place * HALF, reinterpret_cast<const unsigned char*>(of) + at, bytes, ring.shared.full + ring.slot, policy);
    };
#pragma unroll
    for (int i = 0; i < STAGE_PAGES; i++)
      if (const int bytes = i < whole ? HALF : i == whole ? rest : 0)
        copy(2 * i, a.keys, from[i], bytes), copy(2 * i + 1, a.values, from[i], bytes);
    note_begun(ring);
  }
}

// Load pages that rows have in common.
__device__ __forceinline__ void load_common_pages(const Arguments& a, Place& at, Ring& ring, Turn& turn, i64 head, u64 policy) {
  const Shared& shared = ring.shared;
  for (int index = 0; index < shared.num_units; index++)
    if (const Unit unit = unit_of(shared, index); unit.common)
      load_pages(a, at, ring, turn, head, shared.pages[unit.token], 0, unit.common, first_position(shared, unit.token, at.step), policy);
}

// Load all other pages, as far as earlier steps wrote them.
__device__ __forceinline__ void load_own_pages(const Arguments& a, Place& at, Ring& ring, Turn& turn, i64 head, u64 policy) {
  const Shared& shared = ring.shared;
  Unit next = owner_of(shared, 0);
  for (int index = 0; index < num_owners(a, shared); index++) {
    const Unit unit = next;
    next = owner_of(shared, index + 1);
    load_pages(a, at, ring, turn, head, shared.pages[index], unit.common, pages_of(shared, unit, at.step),
                  first_position(shared, unit.token, at.step), policy);
  }
}

// Wait until the step's tokens are placed, before the first copy of keys and values. All earlier stages have been begun by
// then, and the consumers need no more to commit the step before: so this cannot deadlock.
__device__ __forceinline__ void wait_placed(const Arguments& a, Place& at, const Shared& shared) {
#if DRAFTS
  u64 deadline = 0;
  for (u32 polls = 1; !at.dead; polls++) {
    const u32 placed = load_acquire_shared(&shared.placed);
    if ((int)placed > at.step) break;
    at.dead = is_over(shared);
    if (polls % 256 == 0 && !at.dead) at.dead = times_out(a, at, deadline, Waited{3, 0, (u32)at.step + 1, placed});
    __nanosleep(40);
  }
#endif
}

// Run a loader, by one thread of its warp.
__device__ __forceinline__ void load_stages(const Arguments& a, Shared& shared, int number) {
  Ring ring{shared};
  Turn turn{number};
  Place at;
  const u64 policy = stream_policy();
  const Instruction* table = instructions(shared);
  const unsigned char* weights =
      reinterpret_cast<const unsigned char*>(a.weights) + (i64)blockIdx.x * a.stream_stages * STAGE_BYTES;
  for (at.step = 0; at.step < a.steps && !at.dead; at.step++)
    for (at.index = 0; at.index < a.count && !at.dead; at.index++) {
      const Instruction& it = table[at.index];
      const int op = it.op, stages = it.num_blocks * it.num_chunks;
      if (op == OP_ATTEND) {
        if (DRAFTS && it.layer == 0) wait_placed(a, at, shared);
        const i64 head = ((i64)it.layer * a.layer_pages * HEADS + blockIdx.x / SPLITS) * (PAGE_BYTES / 2);
        if (shares_pages(a, shared)) load_common_pages(a, at, ring, turn, head, policy);
        load_own_pages(a, at, ring, turn, head, policy);
      } else if (op >= 0) {
        load_weights(a, at, ring, turn, weights + (i64)it.stage * STAGE_BYTES, stages, policy);
      }
    }
}

// Run the polling warp: one thread polls the counters that the program waits for, ahead of the consumers.
__device__ __forceinline__ void poll_counters(const Arguments& a, Shared& shared) {
  Place at;
  const Instruction* table = instructions(shared);
  for (at.step = 0; at.step < a.steps && !is_over(shared); at.step++)
    for (at.index = 0; at.index < a.count; at.index++) {
      const Instruction& it = table[at.index];
      if (!waits(shared, it)) continue;
      wait_counter(a, shared, at, it.wait, it.wait_count + (shared.epoch + at.step) * it.wait_stride);
      at.waits++;
      store_release_shared(&shared.passed, at.waits);
    }
}

// Publish the step's tokens and values to the host and for the next launch; by the first worker.
__device__ __forceinline__ void publish(const Arguments& a, const Shared& shared, int step) {
  const int lane = threadIdx.x % 32;
  dawdle(10);
#if DRAFTS
  publish_drafts(a, shared, step);
#else
  if (lane < a.rows) {
    const int token = shared.chosen[lane];
    a.row_token[shared.row[lane]] = max(token, 0);
    a.position[lane] = position_of(shared, lane, step + 1);
    publish_token(a.ring, a.ring_stride, step, lane, token);
    if (VALUES) {
      const float4 value = shared.value[lane];
      a.row_payload[shared.row[lane]] = float2{value.x, value.y};
      publish_value(a, step, lane, value);
    }
  }
#endif
  __threadfence_system();
  __syncwarp();
  if (lane) return;
  *a.epoch = shared.epoch + step + 1;
  publish_count(a.words, step + 1);
}

// Run the signalling warp: it signals for the consumers, so that they need not wait for the fence.
__device__ __forceinline__ void signal_counters(const Arguments& a, Shared& shared) {
  const Instruction* table = instructions(shared);
  for (int step = 0; step < a.steps; step++)
    for (int index = 0; index < a.count; index++) {
      if (table[index].op == OP_COMMIT) {
        signalling_sync();
        const u32 ended = shared.ended;
        if (VALUES && ended == GOES_ON) continue;  // once the next step's embedding is signalled
        if (blockIdx.x == 0 && ended != ABORTED) publish(a, shared, step);
        if (ended != GOES_ON) return;
        continue;
      }
      const int counter = table[index].signal;
      if (counter == NONE) continue;
      signalling_sync();
      if (threadIdx.x % 32 == 0) {
        // Ordinary stores wrote the keys and values that later steps' bulk copies read.
        if (table[index].op == OP_QKV) order_copies();
        signal(a.counters + counter * COUNTER_WORDS);
      }
      __syncwarp();  // or the other lanes would wait at the next barrier, and this one's signal with them
      if (VALUES && blockIdx.x == 0 && step && table[index].op == OP_EMBED) publish(a, shared, step - 1);
    }
}
