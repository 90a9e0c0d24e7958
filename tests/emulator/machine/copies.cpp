// Barriers in shared memory that count arrivals and bytes, and copies to shared memory, which land late.
#include "state.h"

#include <cstring>
#include <utility>

namespace emulator {
namespace {

// What has been issued and not landed: part of a bulk copy, whose barrier counts bytes, or a run of a thread.
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  unsigned bytes;
  std::uint64_t* barrier;
  Thread* of;                       // of a run, else null
  unsigned number;                  // among the thread's
  std::vector<unsigned char> read;  // the source, if it was read when the copy was issued
};
// A barrier's arrival that waits for a thread's first so many runs.
struct LateArrival {
  Thread* of;
  unsigned runs;
  std::uint64_t* barrier;
};

std::vector<Copy> copies;
std::vector<LateArrival> late_arrivals;

// A word in shared memory: the phase's parity in bit 0, arrivals of a phase in 15 bits from 1 on, those that are still
// to come in 16 from 16 on, and bytes that are still to come in the upper half.
void finish_phase(std::uint64_t* barrier) {
  std::uint64_t word = *barrier;
  if (word >> 16) return;
  word = (word & 0xfffe) << 15 | (word & 0xffff);
  *barrier = word ^ 1;
  changed(barrier);
}

void check_arrivals(const std::uint64_t* barrier) {
  if (!(*barrier >> 16 & 0xffff)) fail("more arrivals at a barrier (%s) than it counts", address_of(*running, barrier).c_str());
}

void arrive_late(Thread& thread) {
  for (std::size_t i = 0; i < late_arrivals.size();) {
    const LateArrival each = late_arrivals[i];
    if (each.of != &thread || each.runs > thread.runs_landed) {
      i++;
      continue;
    }
    late_arrivals.erase(late_arrivals.begin() + (std::ptrdiff_t)i);
    *each.barrier -= 1u << 16;
    finish_phase(each.barrier);
  }
}

// The copy, or an earlier run of its thread: they land in their order.
Copy taken(std::size_t which) {
  if (copies[which].of)
    for (std::size_t i = 0; i < copies.size(); i++)
      if (copies[i].of == copies[which].of && copies[i].number < copies[which].number) which = i;
  Copy copy = std::move(copies[which]);
  if (which + 1 < copies.size()) copies[which] = std::move(copies.back());
  copies.pop_back();
  return copy;
}

void copy_to_block_later(
    const Block& block, void* shared, const void* global, unsigned bytes, std::uint64_t* barrier) {
  auto* to = static_cast<unsigned char*>(shared);
  const auto* from = static_cast<const unsigned char*>(global);
  if (((std::uintptr_t)to | (std::uintptr_t)from | bytes) % 16) fail("a bulk copy of %u bytes that is not aligned", bytes);
  if (to < block.memory || to + bytes > block.memory + block.room) fail("a bulk copy outside of shared memory");
  std::memset(to, 0xff, bytes);
  act();
  const unsigned first = (unsigned)below(bytes / 16 + 1) * 16;
  for (const auto& [begin, end] : {std::pair(0u, first), std::pair(first, bytes)}) {
    if (begin == end) continue;
    Copy copy{to + begin, from + begin, end - begin, barrier, nullptr, 0, {}};
    if (below(2)) copy.read.assign(from + begin, from + end);
    copies.push_back(std::move(copy));
  }
  step_aside();
}

// The same place in another block of the cluster.
template <class T>
T* there(T* own, unsigned rank) { return static_cast<T*>(const_cast<void*>(peer_memory(own, rank))); }

}  // namespace

void reset_copies() { copies.clear(), late_arrivals.clear(); }

std::size_t copies_under_way() { return copies.size(); }

void land_some_copy() {
  const Copy copy = taken(below(copies.size()));
  if (copy.bytes) std::memcpy(copy.to, copy.read.empty() ? copy.from : copy.read.data(), copy.bytes);
  if (copy.of) {
    std::memset(copy.to + copy.bytes, 0, 16 - copy.bytes);
    copy.of->runs_landed++;
    changed(&copy.of->runs_landed);
    arrive_late(*copy.of);
    return;
  }
  const std::uint64_t word = *copy.barrier;
  const std::uint32_t left = (std::uint32_t)(word >> 32) - copy.bytes;
  *copy.barrier = (word & 0xffffffffu) | (std::uint64_t)left << 32;
  finish_phase(copy.barrier);
}

void barrier_begin(std::uint64_t* barrier, unsigned arrivals) {
  *barrier = (std::uint64_t)arrivals << 16 | arrivals << 1;
  changed(barrier);
}

void barrier_count(std::uint64_t* barrier, unsigned bytes) {
  act();
  step_aside();
  check_arrivals(barrier);
  const std::uint64_t word = *barrier;
  const std::uint64_t counted = (word & 0xffffffffu) | (std::uint64_t)((std::uint32_t)(word >> 32) + bytes) << 32;
  *barrier = counted - (1u << 16);
  finish_phase(barrier);
  step_aside();
}

bool barrier_over(const std::uint64_t* barrier, unsigned parity) {
  glance_aside();
  if ((*barrier & 1) != parity) return true;
  wait_change(parity ? "phase 1 of the barrier" : "phase 0 of the barrier", barrier, *barrier, parity);
  return (*barrier & 1) != parity;
}

void copy_later(void* shared, const void* global, unsigned bytes, std::uint64_t* barrier) {
  copy_to_block_later(*running->block, shared, global, bytes, barrier);
}

void copy_to_cluster_later(void* shared, const void* global, unsigned bytes, std::uint64_t* barrier, unsigned num_blocks) {
  if (num_blocks != cluster_size) fail("a copy to %u blocks of a cluster of %u", num_blocks, cluster_size);
  for (unsigned rank = 0; rank < num_blocks; rank++)
    copy_to_block_later(blocks[rank], there(shared, rank), global, bytes, there(barrier, rank));
}

void store_to_peer_later(void* shared, const void* value, unsigned bytes, std::uint64_t* barrier, unsigned rank) {
  auto* to = static_cast<unsigned char*>(there(shared, rank));
  const auto* from = static_cast<const unsigned char*>(value);
  if ((std::uintptr_t)to % bytes) fail("a store of %u bytes that is not aligned", bytes);
  std::memset(to, 0xff, bytes);
  act();
  copies.push_back(Copy{to, from, bytes, there(barrier, rank), nullptr, 0, {from, from + bytes}});
  step_aside();
}

void copy_run_later(void* shared, const void* global, unsigned bytes) {
  auto* to = static_cast<unsigned char*>(shared);
  const auto* from = static_cast<const unsigned char*>(global);
  if (((std::uintptr_t)to | (std::uintptr_t)from) % 16 || bytes > 16) fail("a copy of %u bytes that is not aligned", bytes);
  std::memset(to, 0xff, 16);
  act();
  Copy copy{to, from, bytes, nullptr, running, running->runs_issued++, {}};
  if (bytes && below(2)) copy.read.assign(from, from + bytes);
  copies.push_back(std::move(copy));
  glance_aside();
}

void arrive_after_runs(std::uint64_t* barrier) {
  act();
  check_arrivals(barrier);
  late_arrivals.push_back({running, running->runs_issued, barrier});
  arrive_late(*running);
  step_aside();
}

void wait_for_runs() {
  act();
  while (running->runs_landed != running->runs_issued)
    wait_change("the count of its copies", &running->runs_landed, running->runs_landed, running->runs_issued);
}

}  // namespace emulator
