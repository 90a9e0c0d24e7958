// What the machine's files share, under the one that has it. machine.h is for those that use the machine.
#pragma once
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../machine.h"

namespace emulator {

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t STACK_BYTES = 256 << 10;  // variables have room about them
#else
constexpr std::size_t STACK_BYTES = 64 << 10;
#endif

struct Block {
  unsigned char *mapping, *memory;
  std::size_t mapped, room;
  struct Named {
    unsigned threads = 0, arrived = 0;
    int value = 0, all = 0;
  } named[16];
};

// launch.cpp: the blocks of the launch that run at once.
extern Launch* launch;
extern std::vector<Block> blocks;
extern std::vector<Warp> warps;
extern std::vector<Thread> threads;

// scheduler.cpp: which thread runs.
void begin_schedule();  // of a launch
void reset_schedule();  // of blocks; none of their threads can run yet
void run_threads();     // until all have ended, or one has left
void add_thread(Thread& thread);
void begin_running();
void end_running();
std::uint64_t below(std::uint64_t n);
bool chance(unsigned of_256);
void pass_time(std::uint64_t nanoseconds);
void set_runnable(Thread& thread);
void go_on();  // with any thread that can run
void block_running(const char* what, const void* where, unsigned detail);

// polls.cpp: waits for a word to change.
void reset_polls();
bool some_poll();
void wake_some_poll();
void be_quiet();  // when no thread can run, and no copy is under way
void act();       // the running thread does something else than to poll

// meetings.cpp: waits of threads for each other.
void reset_meetings();
void leave_meetings();  // the running thread ends

// copies.cpp: barriers in shared memory, and copies that land late.
void reset_copies();
std::size_t copies_under_way();
void land_some_copy();

// report.cpp: what went wrong.
extern bool failed;
extern sigjmp_buf out_of_threads;
std::string address_of(const Thread& thread, const void* address);
std::string waits_of_all();
void say(const std::string& message);
[[noreturn]] void leave(const std::string& message);  // ends the launch
class FaultsCaught {  // accesses that have no memory, and what the compiler checks
 public:
  FaultsCaught();
  ~FaultsCaught();
};

}  // namespace emulator
