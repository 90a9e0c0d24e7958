// A GPU's threads as fibers of one host thread: what stands in for nvcc's words and PTX needs of the machine.
//
// One fiber runs at a time, until it waits for others or steps aside; which goes on next is drawn by a seeded generator.
// So memory is sequentially consistent here, and a missing fence cannot be seen. All else that threads may do to each
// other in between, they do.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulator {

struct Dim {
  unsigned x, y, z;
};

struct Block;
struct Warp;

struct Thread {
  Dim index, block_index;
  Warp* warp;
  Block* block;
  unsigned lane;
  // The scheduler's own.
  void* stack_pointer;
  unsigned char* stack;
  const char* waits;      // what for, in words; null: it can run
  const void* where;      // an address that it waits for, or null
  std::uint64_t seen;     // there, when it last looked
  unsigned detail;        // of the wait: a mask, a parity, or a number of threads
  bool polls;             // it looks again now and then
  unsigned place;         // among those that poll
  const void* polled;     // the word that it read last, if it has done nothing else since
  unsigned polled_value;
  unsigned cluster_phase;  // arrivals at the cluster's barrier
  unsigned runs_issued, runs_landed;
};

// What a warp's lanes gave an operation that they do together, and what they get.
struct Warp {
  alignas(64) unsigned char given[32][48];
  alignas(64) unsigned char got[32][16];
  unsigned runnable, exited;
  struct Meeting {
    unsigned mask, arrived;
    const char* what;
  } meetings[4];
  Thread* lanes;
  unsigned block, number;
  // The scheduler's own.
  unsigned ready_at, first_lane;
};

extern Thread* running;
extern Dim block_dim, grid_dim;
extern unsigned cluster_size;

// Others may run here: often, or seldom.
void step_aside();
void glance_aside();
void sleep(unsigned nanoseconds);
// A generator's next number, and time that goes on with what runs.
std::uint64_t draw();
std::uint64_t now();
// Ends the launch; says why, with the running thread's place.
[[noreturn]] void fail(const char* format, ...);

// Wait until these bytes differ from what was seen, or for some time; `what` in words.
void wait_change(const char* what, const void* address, std::uint64_t seen, unsigned detail);
void changed(const void* address);

// Wait for all lanes of the mask, of which the last calls `finish`. Lanes that have exited are not waited for.
using Finish = void (*)(Warp& warp, unsigned mask);
void meet(const char* what, unsigned mask, Finish finish);

// Named barriers of a thread block, and one of its cluster; those that wait get all values that arrived, or'ed.
int join(unsigned barrier, unsigned threads, bool waits, int value = 0);
void arrive_in_cluster();
void wait_for_cluster();

// Barriers in shared memory that count arrivals and bytes.
void barrier_begin(std::uint64_t* barrier, unsigned arrivals);
void barrier_count(std::uint64_t* barrier, unsigned bytes);
bool barrier_over(const std::uint64_t* barrier, unsigned parity);

// Copies to shared memory, which land later: in bulk, whose bytes the barrier counts, or in runs of 16 bytes of which the
// first come from memory and the others are zeros.
void copy_later(void* shared, const void* global, unsigned bytes, std::uint64_t* barrier);
// The same to that place in every block of the cluster, each of whose barriers counts.
void copy_to_cluster_later(void* shared, const void* global, unsigned bytes, std::uint64_t* barrier, unsigned num_blocks);
// A value to that place in a block of the cluster, whose barrier counts.
void store_to_peer_later(void* shared, const void* value, unsigned bytes, std::uint64_t* barrier, unsigned rank);
void copy_run_later(void* shared, const void* global, unsigned bytes);
// The barrier counts an arrival when all of the thread's runs have landed; the thread waits until then.
void arrive_after_runs(std::uint64_t* barrier);
void wait_for_runs();

// Shared memory of the running thread's block, as the launch has asked for it.
void* dynamic_memory();
// The same place in that of another block of the cluster.
const void* peer_memory(const void* own, unsigned rank);

struct Launch {
  unsigned grid[3], threads, shared;
  unsigned cooperative;   // all blocks run at once; else a cluster after the other
  unsigned cluster;       // blocks
  std::uint64_t seed;
  std::uint64_t most_turns;
  unsigned patient;       // a launch in which nothing can go on waits until its own patience ends
  unsigned host_every;    // turns from one call of the host to the next
  void (*host)();
  char* message;          // why it failed
  std::size_t message_bytes;
  std::uint64_t turns;    // that it took
  std::uint64_t order;    // a hash of the threads that had them
};
int run(Launch* launch, void (*body)(void**), void** arguments);

}  // namespace emulator
