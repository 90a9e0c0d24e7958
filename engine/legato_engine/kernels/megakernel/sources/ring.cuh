// Waits that can be given up, for counters in global memory and for stages of the ring in shared memory.
#pragma once
#include "worker.cuh"

// What a thread knows of its place in the program, for reports; `dead` threads wait for nothing any more.
struct Place {
  int step = 0, index = 0;
  u32 waits = 0;
  bool dead = false;
};

// What a wait waits for: `kind` 0 a counter, 1 a full stage, 2 an empty one, 3 a step's tokens.
struct Waited {
  int kind, which;
  u32 want, got;
};

constexpr u64 GIVEN_UP = ~0ull;  // a deadline

// When to give up a wait, 0 at first, or that it is given up; the first such one is reported. The deadline is passed by value: in
// local memory it would be read in every wait's loop, and the compiler may have such a read share a scoreboard with inputs under
// way, so that each look at a barrier waits for them.
__device__ __noinline__ u64 deadline_of(u32* abort, int* report, int patience_ms, int step, int index, u64 deadline, Waited waited) {
  if (load_relaxed(abort)) return GIVEN_UP;
  const u64 time = nanoseconds();
  // Stages come late when a counter does: that wait is the one to report.
  if (deadline == 0) deadline = time + (u64)patience_ms * (waited.kind == 0 ? 1000000 : 3000000);
  if (time < deadline) return deadline;
  if (atomicCAS(abort, 0u, 1u) == 0u) {
    volatile int* to = report;
    to[1] = blockIdx.x, to[2] = threadIdx.x / 32, to[3] = step, to[4] = index;
    to[5] = waited.kind, to[6] = waited.which, to[7] = waited.want, to[8] = waited.got;
    __threadfence_system();
    to[0] = 1;
  }
  return GIVEN_UP;
}

__device__ __forceinline__ bool give_up(const Arguments& a, const Place& at, u64& deadline, Waited waited) {
  deadline = deadline_of(a.abort, a.report, a.patience_ms, at.step, at.index, deadline, waited);
  return deadline == GIVEN_UP;
}

// Whether the launch's last step is over. Threads that are ahead of those that compute ask while they wait.
__device__ __forceinline__ bool is_over(const Shared& shared) {
  return *reinterpret_cast<const volatile u32*>(&shared.ended) != GOES_ON;
}

__device__ __forceinline__ void wait_counter(const Arguments& a, const Shared& shared, Place& at, int which, u32 target) {
  const u32* count = a.counters + which * COUNTER_WORDS;
  u64 deadline = 0;
  for (u32 polls = 1; !at.dead; polls++) {
    const u32 seen = load_acquire(count);
    if ((int)(seen - target) >= 0 || is_over(shared)) break;
    if (polls % 64 == 0) at.dead = give_up(a, at, deadline, Waited{0, which, target, seen});
    __nanosleep(20);
  }
  dawdle(6);
}

// Wait for a full stage that was not so at the first look; whether the wait is given up. A function of its own, as each stage's
// code has a call.
__device__ __noinline__ bool wait_longer(u32* abort, int* report, int patience_ms, int step, int index, const u64* full, u32 phase, int slot) {
  u64 deadline = 0;
  for (u32 polls = 1; !barrier_done(full, phase); polls++)
    if (polls % 256 == 0) {
      deadline = deadline_of(abort, report, patience_ms, step, index, deadline, Waited{1, slot, phase, 0});
      if (deadline == GIVEN_UP) return true;
    }
  return false;
}

// Whether an instruction of this launch waits.
__device__ __forceinline__ bool waits(const Shared& shared, const Instruction& it) {
  return it.wait != NONE && (!it.only_draws || shared.draws);
}

// The warps that compute wait for what the watcher saw; when it has given up it lets all pass.
__device__ __forceinline__ void wait_passed(Shared& shared, Place& at) {
  at.waits++;
  while ((int)(load_acquire_shared(&shared.passed) - at.waits) < 0) {}
}

constexpr int TELLING = THREADS + 32;  // threads of the barrier with the teller
__device__ __forceinline__ void telling_sync() { threads_sync<2, TELLING>(); }
__device__ __forceinline__ void workers_sync() { threads_sync<1, THREADS>(); }

// Stages in shared memory, between the producers and the warps that compute.
struct Ring {
  Shared& shared;
  const u32 lane = kept_lane();
  int slot = 0;
  u32 lap = 0;
  __device__ __forceinline__ void next() {
    if (++slot == RING) slot = 0, lap++;
  }
  __device__ __forceinline__ void skip(int stages) {
    for (slot += stages; slot >= RING; slot -= RING) lap++;
  }
  __device__ __forceinline__ u32 parity() const { return lap & 1; }
  // A warp that computes: the stage, when it is full.
  __device__ __forceinline__ const unsigned char* get(const Arguments& a, Place& at) {
    const u64* full = shared.full + slot;
    if (!barrier_done(full, parity()) && !at.dead)
      at.dead = wait_longer(a.abort, a.report, a.patience_ms, at.step, at.index, full, parity(), slot);
    dawdle(8);
    return shared.ring[slot];
  }
  // The same, where the warp has skipped stages. The barrier may be a lap behind then, and its parity that of the stage as if
  // that were full.
  __device__ __forceinline__ const unsigned char* get_ahead(const Arguments& a, Place& at) {
    u64 deadline = 0;
    for (u32 polls = 1; !at.dead && load_acquire_shared(shared.begun + slot) != lap + 1; polls++)
      if (polls % 256 == 0) at.dead = give_up(a, at, deadline, Waited{1, slot, parity(), 0});
    return get(a, at);
  }
  // Let the stage go, for so many of the warps. `read` depends on all that the lane read of it. A lane that has issued its reads
  // may arrive before they are done, and the copy engine overwrites what they have not reached: so the arrival waits for all
  // lanes' values.
  __device__ __forceinline__ void release_for(const Arguments& a, u32 read, int warps) {
    const bool never = __any_sync(~0u, (read & a.zero) != 0);
    if (lane == 0 && !never) barrier_arrive(shared.empty + slot, warps);
  }
  // Let the stage go, and on to the next.
  __device__ __forceinline__ void release(const Arguments& a, u32 read) { release_for(a, read, 1), next(); }
};
