// Threads that wait for each other: lanes of a warp, a block at its named barriers, and the blocks of a cluster.
#include "state.h"

namespace emulator {
namespace {

unsigned cluster_arrived, cluster_phase;

void wake_joined(const void* where) {
  for (Thread& thread : threads)
    if (thread.waits && thread.where == where && !thread.polls) thread.waits = nullptr, set_runnable(thread);
}

// Where lanes of the mask meet, which may be the first of them; null if too many others do.
Warp::Meeting* meeting_of(Warp& warp, unsigned mask) {
  for (auto& each : warp.meetings)
    if (each.arrived && each.mask == mask) return &each;
  for (auto& each : warp.meetings)
    if (!each.arrived) return &each;
  return nullptr;
}

}  // namespace

void reset_meetings() { cluster_arrived = cluster_phase = 0; }

void meet(const char* what, unsigned mask, Finish finish) {
  Thread& thread = *running;
  Warp& warp = *thread.warp;
  act();
  if (!(mask >> thread.lane & 1)) fail("%s of lanes %08x, of which it is none", what, mask);
  Warp::Meeting* meeting = meeting_of(warp, mask);
  if (!meeting) fail("%s while lanes of its warp wait in too many other groups", what);
  if (!meeting->arrived) meeting->mask = mask, meeting->what = what;
  if (meeting->what != what) fail("%s while lanes %08x of its warp wait for it in %s", what, meeting->arrived, meeting->what);
  meeting->arrived |= 1u << thread.lane;
  if (meeting->arrived != (mask & ~warp.exited)) {
    block_running(what, nullptr, mask);
    return;
  }
  if (finish) finish(warp, meeting->arrived);
  for (unsigned left = meeting->arrived & ~(1u << thread.lane); left; left &= left - 1)
    set_runnable(warp.lanes[__builtin_ctz(left)]);
  meeting->arrived = 0;
  glance_aside();
}

void leave_meetings() {
  Warp& warp = *running->warp;
  warp.exited |= 1u << running->lane;
  for (auto& meeting : warp.meetings)
    if (meeting.arrived && meeting.arrived == (meeting.mask & ~warp.exited))
      fail("exited while the rest of its warp waits for it (%s)", meeting.what);
}

int join(unsigned barrier, unsigned count, bool waits, int value) {
  act();
  step_aside();
  Block& block = *running->block;
  if (barrier >= 16) fail("there is no barrier %u", barrier);
  Block::Named& named = block.named[barrier];
  if (!named.arrived) named.threads = count;
  if (named.threads != count) fail("barrier %u for %u threads, others wait there for %u", barrier, count, named.threads);
  named.value |= value;
  if (++named.arrived < count) {
    if (waits) block_running("barrier", &named, barrier);
  } else {
    named.all = named.value;
    named.arrived = 0, named.value = 0;
    wake_joined(&named);
    step_aside();
  }
  return named.all;
}

// Blocks that run at once are of one cluster, unless there are none.
void arrive_in_cluster() {
  act();
  step_aside();
  running->cluster_phase++;
  if (++cluster_arrived < threads.size()) return;
  cluster_arrived = 0, cluster_phase++;
  wake_joined(&cluster_phase);
}
void wait_for_cluster() {
  act();
  while (cluster_phase < running->cluster_phase) block_running("cluster", &cluster_phase, cluster_phase);
}
const void* peer_memory(const void* own, unsigned rank) {
  glance_aside();
  if (rank >= blocks.size()) fail("there is no block %u in its cluster", rank);
  return blocks[rank].memory + (static_cast<const unsigned char*>(own) - running->block->memory);
}

}  // namespace emulator
