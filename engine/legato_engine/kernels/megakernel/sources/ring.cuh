// Waits with a timeout, for counters in global memory and for stages of the ring in shared memory.
#pragma once
#include "worker.cuh"

// A thread's place in the program, for reports; waits of `dead` threads return immediately.
struct Place {
  int step = 0, index = 0;
  u32 waits = 0;
  bool dead = false;
};

// The object of a wait: `kind` 0 a counter, 1 a full stage, 2 an empty one, 3 a step's tokens.
struct Waited {
  int kind, which;
  u32 want, got;
};

constexpr u64 TIMED_OUT = ~0ull;  // a deadline

// The deadline of a wait (0: none yet), or TIMED_OUT; the first timeout is reported. The deadline is passed by value: in local
// memory it would be read in every wait's loop, and the compiler may have such a read share a scoreboard with loads in flight, so
// that each poll of a barrier waits for them.
__device__ __noinline__ u64 deadline_of(u32* abort, int* report, int patience_ms, int step, int index, u64 deadline, Waited waited) {
  if (load_relaxed(abort)) return TIMED_OUT;
  const u64 time = nanoseconds();
  // A late counter makes stages late: report the counter's wait.
  if (deadline == 0) deadline = time + (u64)patience_ms * (waited.kind == 0 ? 1000000 : 3000000);
  if (time < deadline) return deadline;
  if (atomicCAS(abort, 0u, 1u) == 0u) {
    volatile int* to = report;
    to[1] = blockIdx.x, to[2] = threadIdx.x / 32, to[3] = step, to[4] = index;
    to[5] = waited.kind, to[6] = waited.which, to[7] = waited.want, to[8] = waited.got;
    __threadfence_system();
    to[0] = 1;
  }
  return TIMED_OUT;
}

__device__ __forceinline__ bool times_out(const Arguments& a, const Place& at, u64& deadline, Waited waited) {
  deadline = deadline_of(a.abort, a.report, a.patience_ms, at.step, at.index, deadline, waited);
  return deadline == TIMED_OUT;
}

// Whether the launch's last step is over; polled by threads that run ahead of the consumers.
__device__ __forceinline__ bool is_over(const Shared& shared) {
  return *reinterpret_cast<const volatile u32*>(&shared.ended) != GOES_ON;
}

__device__ __forceinline__ void wait_counter(const Arguments& a, const Shared& shared, Place& at, int which, u32 target) {
  const u32* count = a.counters + which * COUNTER_WORDS;
  u64 deadline = 0;
  for (u32 polls = 1; !at.dead; polls++) {
    const u32 seen = load_acquire(count);
    if ((int)(seen - target) >= 0 || is_over(shared)) break;
    if (polls % 64 == 0) at.dead = times_out(a, at, deadline, Waited{0, which, target, seen});
    __nanosleep(20);
  }
  dawdle(6);
}

// Wait for a stage that was not full at the first poll; returns whether the wait timed out. A called function, because it is
// used at every stage.
__device__ __noinline__ bool wait_longer(u32* abort, int* report, int patience_ms, int step, int index, const u64* full, u32 phase, int slot) {
  u64 deadline = 0;
  for (u32 polls = 1; !barrier_done(full, phase); polls++)
    if (polls % 256 == 0) {
      deadline = deadline_of(abort, report, patience_ms, step, index, deadline, Waited{1, slot, phase, 0});
      if (deadline == TIMED_OUT) return true;
    }
  return false;
}

// Whether an instruction of this launch waits.
__device__ __forceinline__ bool waits(const Shared& shared, const Instruction& it) {
  return it.wait != NONE && (!it.only_draws || shared.draws);
}

// Consumers wait for the polling warp; after a timeout it lets all pass.
__device__ __forceinline__ void wait_passed(Shared& shared, Place& at) {
  at.waits++;
  while ((int)(load_acquire_shared(&shared.passed) - at.waits) < 0) {}
}

constexpr int SIGNALLING = THREADS + 32;  // threads at the barrier with the signalling warp
__device__ __forceinline__ void signalling_sync() { threads_sync<2, SIGNALLING>(); }
__device__ __forceinline__ void workers_sync() { threads_sync<1, THREADS>(); }

// Stages in shared memory, between loaders and consumers.
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
  // A consumer's next stage, once it is full.
  __device__ __forceinline__ const unsigned char* get(const Arguments& a, Place& at) {
    const u64* full = shared.full + slot;
    if (!barrier_done(full, parity()) && !at.dead)
      at.dead = wait_longer(a.abort, a.report, a.patience_ms, at.step, at.index, full, parity(), slot);
    dawdle(8);
    return shared.ring[slot];
  }
  // The same for a warp that has skipped stages. The barrier may be a lap behind then, where its parity looks as if the stage
  // were full.
  __device__ __forceinline__ const unsigned char* get_ahead(const Arguments& a, Place& at) {
    u64 deadline = 0;
    for (u32 polls = 1; !at.dead && load_acquire_shared(shared.begun + slot) != lap + 1; polls++)
      if (polls % 256 == 0) at.dead = times_out(a, at, deadline, Waited{1, slot, parity(), 0});
    return get(a, at);
  }
  // Release the stage for `warps` warps. `read` depends on everything that the lane has read from it. Without that a lane could
  // arrive before its issued reads are done, and the copy engine would overwrite their source: so the arrival waits for the values
  // of all lanes.
  __device__ __forceinline__ void release_for(const Arguments& a, u32 read, int warps) {
    const bool never = __any_sync(~0u, (read & a.zero) != 0);
    if (lane == 0 && !never) barrier_arrive(shared.empty + slot, warps);
  }
  // Release the stage and advance to the next.
  __device__ __forceinline__ void release(const Arguments& a, u32 read) { release_for(a, read, 1), next(); }
};
