// The scheduler; see machine.h.
#include "machine.h"
#include "switch.h"

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace emulator {

Thread* running;
Dim block_dim, grid_dim;
unsigned cluster_size;

struct Block {
  unsigned char *mapping, *memory;
  std::size_t mapped, room;
  struct Named {
    unsigned threads = 0, arrived = 0;
    int value = 0, all = 0;
  } named[16];
};

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

// What the scheduler prefers for a while. Chances are of 256.
struct Mood {
  unsigned stays, aside, copies;  // with a warp; at a chance to step aside; to land a copy before a turn
  unsigned looks;                 // to have a thread that polls look again, where only copies could go on
  int favourite;                  // block that runs while it can, or -1
  int starved_block, starved_warp;  // warp that runs only when no other can; blocks -1: of all of them
  unsigned late_lane;             // runs when no other of its warp can; 32: none
  std::uint64_t until;
};

namespace {

constexpr std::size_t STACK_BYTES = 64 << 10, COLOURS = 64;
constexpr std::uint64_t CANARY = 0x5ca1ab1edeadbea7ull;
constexpr unsigned NANOSECONDS_OF_TURN = 4;
constexpr unsigned PATIENT_ROUNDS = 4000, HASTY_ROUNDS = 3;
constexpr std::uint64_t PATIENT_STEP = 50000000;  // nanoseconds of a round in which nothing goes on

Launch* launch;
void (*body)(void**);
void** arguments;
std::vector<Block> blocks;
std::vector<Warp> warps;
std::vector<Thread> threads;
std::vector<Warp*> ready;  // with lanes that can run
std::vector<Thread*> polling;
std::vector<Copy> copies;
std::vector<LateArrival> late_arrivals;
constexpr unsigned BUCKETS = 1024;
// Threads that poll, by address. Those of one address are in the order in which they came: which addresses share a
// bucket differs from one process to the next, and the same seed gives the same order of threads in all of them.
std::vector<Thread*> watching[BUCKETS];
Warp* current_warp;
void* main_stack_pointer;
unsigned live, quiet_rounds, cluster_arrived, cluster_phase;
bool moved, failed;
std::uint64_t random_state, turns, order, time_now, host_turn;
Mood mood;
sigjmp_buf out_of_threads;

std::uint64_t below(std::uint64_t n) { return draw() % n; }
bool chance(unsigned of_256) { return (draw() & 255) < of_256; }

void change_mood() {
  const unsigned kinds = below(8);
  mood.stays = kinds < 5 ? 255 : kinds < 7 ? 240 : 32;
  mood.aside = below(3) == 0 ? 8 : below(2) ? 64 : 200;
  const unsigned landing[] = {0, 1, 8, 128};
  mood.copies = landing[below(4)];
  mood.looks = below(2) ? 0 : 200;
  mood.favourite = below(3) ? -1 : (int)below(blocks.size());
  mood.starved_warp = below(3) == 0 ? (int)below(warps.size() / blocks.size()) : -1;
  mood.starved_block = below(2) ? -1 : (int)below(blocks.size());
  mood.late_lane = below(3) ? 32 : (unsigned)below(32);
  mood.until = turns + 2000 + below(60000);
}

void set_runnable(Thread& thread) {
  Warp& warp = *thread.warp;
  if (!warp.runnable) warp.ready_at = ready.size(), ready.push_back(&warp);
  warp.runnable |= 1u << thread.lane;
}
void clear_runnable(Thread& thread) {
  Warp& warp = *thread.warp;
  warp.runnable &= ~(1u << thread.lane);
  if (warp.runnable) return;
  ready[warp.ready_at] = ready.back();
  ready[warp.ready_at]->ready_at = warp.ready_at;
  ready.pop_back();
}

unsigned bucket_of(const void* address) { return (std::uintptr_t)address / 4 * 2654435761u >> 8 & (BUCKETS - 1); }

void wake(Thread& thread) {
  polling[thread.place] = polling.back();
  polling[thread.place]->place = thread.place;
  polling.pop_back();
  thread.polls = false;
  set_runnable(thread);
}

// One that polls looks again although nothing has told it to.
void wake_some_poll() {
  Thread& thread = *polling[below(polling.size())];
  auto& bucket = watching[bucket_of(thread.where)];
  bucket.erase(std::find(bucket.begin(), bucket.end(), &thread));
  wake(thread);
}

void wake_all_polls() {
  for (auto& bucket : watching) bucket.clear();
  while (!polling.empty()) wake(*polling.back());
}

// A word in shared memory: the phase's parity in bit 0, arrivals of a phase in 15 bits from 1 on, those that are still
// to come in 16 from 16 on, and bytes that are still to come in the upper half.
void finish_phase(std::uint64_t* barrier) {
  std::uint64_t word = *barrier;
  if (word >> 16) return;
  word = (word & 0xfffe) << 15 | (word & 0xffff);
  *barrier = word ^ 1;
  changed(barrier);
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

// Runs of a thread land in their order.
void land(std::size_t which) {
  if (copies[which].of)
    for (std::size_t i = 0; i < copies.size(); i++)
      if (copies[i].of == copies[which].of && copies[i].number < copies[which].number) which = i;
  Copy copy = std::move(copies[which]);
  if (which + 1 < copies.size()) copies[which] = std::move(copies.back());
  copies.pop_back();
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

std::string place_of(const Thread& thread) {
  char text[96];
  std::snprintf(text, sizeof text, "block %u warp %u lane %u", thread.block_index.x, thread.index.x / 32, thread.lane);
  return text;
}

std::string address_of(const Thread& thread, const void* address) {
  char text[64];
  const auto* at = static_cast<const unsigned char*>(address);
  const Block& block = *thread.block;
  if (at >= block.memory && at < block.memory + block.room)
    std::snprintf(text, sizeof text, "shared memory + %zu", (std::size_t)(at - block.memory));
  else
    std::snprintf(text, sizeof text, "%p", address);
  return text;
}

std::string wait_of(const Thread& thread) {
  char text[160];
  if (!thread.waits)
    std::snprintf(text, sizeof text, "can run");
  else if (thread.polls)
    std::snprintf(text, sizeof text, "%s at %s, now %#llx", thread.waits, address_of(thread, thread.where).c_str(),
                  (unsigned long long)thread.seen);
  else
    std::snprintf(text, sizeof text, "%s %u", thread.waits, thread.detail);
  return text;
}

// What all threads wait for; those of a block with the same wait are on one line.
std::string waits() {
  std::map<unsigned, std::map<std::string, std::map<unsigned, std::string>>> warps_of;  // by lanes
  for (Warp& warp : warps) {
    std::map<std::string, unsigned> lanes_of;
    for (unsigned lane = 0; lane < 32; lane++)
      if (!(warp.exited >> lane & 1)) lanes_of[wait_of(warp.lanes[lane])] |= 1u << lane;
    for (const auto& [text, lanes] : lanes_of) warps_of[warp.block][text][lanes] += " " + std::to_string(warp.number);
  }
  std::string all;
  for (const auto& [block, by_text] : warps_of)
    for (const auto& [text, by_lanes] : by_text)
      for (const auto& [lanes, numbers] : by_lanes) {
        char line[256];
        std::snprintf(line, sizeof line, "\n  block %u warps%s lanes %08x: %s", block, numbers.c_str(), lanes, text.c_str());
        all += line;
      }
  return all;
}

[[noreturn]] void leave(const std::string& message) {
  failed = true;
  std::snprintf(launch->message, launch->message_bytes, "%s", message.c_str());
  siglongjmp(out_of_threads, 1);
}

// No thread can run, and no copy is under way.
void be_quiet() {
  if (polling.empty()) leave("deadlock: every thread waits for others" + waits());
  if (moved) quiet_rounds = 0;
  moved = false;
  if (++quiet_rounds > (launch->patient ? PATIENT_ROUNDS : HASTY_ROUNDS))
    leave("deadlock: nothing goes on but polls" + waits());
  if (launch->patient) time_now += PATIENT_STEP;
  wake_all_polls();
}

bool acceptable(const Warp& warp, bool favourite) {
  if (favourite && mood.favourite >= 0 && (int)warp.block != mood.favourite) return false;
  return (int)warp.number != mood.starved_warp || (mood.starved_block >= 0 && (int)warp.block != mood.starved_block);
}

Warp* choose_warp() {
  const std::size_t count = ready.size(), first = below(count);
  if (acceptable(*ready[first], true)) return ready[first];
  for (const bool favourite : {true, false})
    for (std::size_t i = 1; i < count; i++) {
      Warp* warp = ready[(first + i) % count];
      if (acceptable(*warp, favourite)) return warp;
    }
  return ready[first];
}

// The next thread to run, or null for the host.
Thread* choose() {
  turns++;
  time_now += NANOSECONDS_OF_TURN;
  if (turns >= mood.until) {
    change_mood();
    if (turns > launch->most_turns) leave("more turns than a launch may take" + waits());
  }
  if (launch->host && turns >= host_turn) return nullptr;
  if (!copies.empty() && chance(mood.copies)) land(below(copies.size()));
  while (ready.empty()) {
    if (copies.empty())
      be_quiet();
    else if (!polling.empty() && chance(mood.looks))
      wake_some_poll();
    else
      land(below(copies.size()));
  }
  Warp* warp = current_warp;
  if (!warp || !warp->runnable || !chance(mood.stays)) {
    warp = current_warp = choose_warp();
    warp->first_lane = (unsigned)below(32);
  }
  unsigned lanes = warp->runnable;
  if (mood.late_lane < 32 && lanes != 1u << mood.late_lane) lanes &= ~(1u << mood.late_lane);
  const unsigned turned = lanes >> warp->first_lane | (warp->first_lane ? lanes << (32 - warp->first_lane) : 0);
  Thread* thread = warp->lanes + (__builtin_ctz(turned) + warp->first_lane) % 32;
  order = (order ^ (std::uint64_t)(thread - threads.data())) * 0x100000001b3ull;
  return thread;
}

void go_on() {
  Thread* from = running;
  Thread* to = choose();
  if (to == from) return;
  running = to;
  emulator_switch(&from->stack_pointer, to ? to->stack_pointer : main_stack_pointer);
}

void block_running(const char* what, const void* where, unsigned detail) {
  running->waits = what, running->where = where, running->detail = detail;
  clear_runnable(*running);
  go_on();
  running->waits = nullptr;
}

void begin() {
  body(arguments);
  Thread& thread = *running;
  if (*(std::uint64_t*)thread.stack != CANARY) fail("the stack of %zu bytes overflowed", STACK_BYTES);
  moved = true;
  Warp& warp = *thread.warp;
  warp.exited |= 1u << thread.lane;
  for (auto& meeting : warp.meetings)
    if (meeting.arrived && meeting.arrived == (meeting.mask & ~warp.exited))
      fail("exited while the rest of its warp waits for it (%s)", meeting.what);
  clear_runnable(thread);
  if (--live == 0) {
    running = nullptr;
    emulator_switch(&thread.stack_pointer, main_stack_pointer);
  }
  go_on();
}

// Where the code of a fault lies in its library, for `addr2line`.
std::size_t place_in_code(void* context) {
  const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  auto* code = (void*)machine.gregs[REG_RIP];
#else
  auto* code = (void*)machine.pc;
#endif
  Dl_info library;
  if (!dladdr(code, &library)) return 0;
  return static_cast<char*>(code) - static_cast<char*>(library.dli_fbase);
}

void on_fault(int number, siginfo_t* information, void* context) {
  failed = true;
  std::string what = "what C++ leaves undefined";  // the compiler's own checks
  if (number == SIGSEGV || number == SIGBUS) {
    const auto* address = static_cast<const unsigned char*>(information->si_addr);
    char text[96];
    std::snprintf(text, sizeof text, "an access outside of its memory, at %p", (const void*)address);
    if (running) {
      const auto distance = address - running->block->memory;
      if (distance > -(1 << 20) && distance < (1 << 20))
        std::snprintf(text, sizeof text, "an access at shared memory + %td, of %zu bytes", distance, running->block->room);
    }
    what = text;
  }
  const std::string at = running ? place_of(*running) : "the scheduler";
  std::snprintf(launch->message, launch->message_bytes, "%s: %s (code + %#zx)", at.c_str(), what.c_str(),
                place_in_code(context));
  siglongjmp(out_of_threads, 1);
}

Block make_block(std::size_t bytes) {
  const std::size_t page = sysconf(_SC_PAGESIZE), body_bytes = (bytes + page - 1) / page * page;
  Block block;
  block.mapped = body_bytes + 2 * page;
  void* mapping = mmap(nullptr, block.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  block.mapping = static_cast<unsigned char*>(mapping);
  mprotect(block.mapping + page, body_bytes, PROT_READ | PROT_WRITE);
  std::memset(block.mapping + page, 0xff, body_bytes);
  block.memory = block.mapping + page + (body_bytes - bytes) / 128 * 128;  // its end is at the guard page
  block.room = bytes;
  return block;
}

void make_threads(unsigned first_block, unsigned num_blocks, unsigned char* stacks) {
  const unsigned warps_of_block = (launch->threads + 31) / 32, count = num_blocks * launch->threads;
  warps.assign((std::size_t)num_blocks * warps_of_block, Warp{});
  threads.assign((std::size_t)num_blocks * warps_of_block * 32, Thread{});
  ready.clear(), polling.clear(), copies.clear(), late_arrivals.clear();
  for (auto& bucket : watching) bucket.clear();
  current_warp = nullptr, cluster_arrived = cluster_phase = 0;
  live = count;
  for (unsigned b = 0; b < num_blocks; b++)
    for (unsigned w = 0; w < warps_of_block; w++) {
      Warp& warp = warps[b * warps_of_block + w];
      warp.block = first_block + b, warp.number = w;
      warp.lanes = threads.data() + (std::size_t)(b * warps_of_block + w) * 32;
      for (unsigned lane = 0; lane < 32; lane++) {
        Thread& thread = warp.lanes[lane];
        const unsigned linear = first_block + b;
        thread.index = {w * 32 + lane, 0, 0};
        thread.block_index = {linear % grid_dim.x, linear / grid_dim.x % grid_dim.y, linear / grid_dim.x / grid_dim.y};
        thread.warp = &warp, thread.block = &blocks[b], thread.lane = lane;
        if (thread.index.x >= launch->threads) {
          warp.exited |= 1u << lane;
          continue;
        }
        const std::size_t number = &thread - threads.data();
        thread.stack = stacks + number * STACK_BYTES;
        *(std::uint64_t*)thread.stack = CANARY;
        // Stacks begin at different lines of a page, or all would share the same sets of the caches.
        auto* top = (void**)(thread.stack + STACK_BYTES - number % COLOURS * 192);
        top -= FRAME_WORDS;
        std::memset((void*)top, 0, FRAME_WORDS * sizeof(void*));
        top[RETURN_WORD] = (void*)begin;
        thread.stack_pointer = top;
        set_runnable(thread);
      }
    }
}

// Blocks that all run at once.
void run_blocks(unsigned first, unsigned count) {
  for (unsigned b = 0; b < count; b++) blocks.push_back(make_block(launch->shared));
  const std::size_t bytes = (std::size_t)count * ((launch->threads + 31) / 32) * 32 * STACK_BYTES;
  void* stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  make_threads(first, count, static_cast<unsigned char*>(stacks));
  change_mood();
  moved = true, quiet_rounds = 0;
  if (sigsetjmp(out_of_threads, 1) == 0)
    while (live && !failed) {
      if (launch->host && turns >= host_turn) host_turn = turns + launch->host_every, launch->host();
      running = choose();
      if (running) emulator_switch(&main_stack_pointer, running->stack_pointer);
    }
  running = nullptr;
  if (!failed && !copies.empty()) {
    failed = true;
    std::snprintf(launch->message, launch->message_bytes, "%zu copies are under way when all threads have ended", copies.size());
  }
  munmap(stacks, bytes);
  for (Block& block : blocks) munmap(block.mapping, block.mapped);
  blocks.clear(), warps.clear(), threads.clear(), ready.clear(), polling.clear(), copies.clear();
}

}  // namespace

std::uint64_t draw() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545F4914F6CDD1Dull >> 16;
}
std::uint64_t now() { return time_now; }

void step_aside() {
  if (chance(mood.aside)) go_on();
}
void glance_aside() {
  if ((draw() & 4095) < mood.aside) go_on();
}
void sleep(unsigned nanoseconds) {
  time_now += nanoseconds / 64;
  go_on();
}

void fail(const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  std::vsnprintf(text, sizeof text, format, list);
  va_end(list);
  leave((running ? place_of(*running) + ": " : std::string()) + text);
}

void wait_change(const char* what, const void* address, std::uint64_t seen, unsigned detail) {
  Thread& thread = *running;
  if (thread.where != address || thread.seen != seen) moved = true;
  thread.seen = seen;
  thread.place = polling.size(), thread.polls = true;
  polling.push_back(&thread);
  watching[bucket_of(address)].push_back(&thread);
  block_running(what, address, detail);
}

// The running thread does something else than to poll.
static void act() {
  moved = true;
  running->polled = nullptr;
}

void changed(const void* address) {
  moved = true;
  if (running) running->polled = nullptr;
  auto& bucket = watching[bucket_of(address)];
  std::size_t kept = 0;
  for (Thread* thread : bucket)
    if (thread->where == address)
      wake(*thread);
    else
      bucket[kept++] = thread;
  bucket.resize(kept);
}

void meet(const char* what, unsigned mask, Finish finish) {
  Thread& thread = *running;
  Warp& warp = *thread.warp;
  act();
  if (!(mask >> thread.lane & 1)) fail("%s of lanes %08x, of which it is none", what, mask);
  Warp::Meeting* meeting = nullptr;
  for (auto& each : warp.meetings)
    if (each.arrived && each.mask == mask) meeting = &each;
  for (auto& each : warp.meetings)
    if (!meeting && !each.arrived) meeting = &each;
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

static void wake_joined(const void* where) {
  for (Thread& thread : threads)
    if (thread.waits && thread.where == where && !thread.polls) thread.waits = nullptr, set_runnable(thread);
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

void barrier_begin(std::uint64_t* barrier, unsigned arrivals) {
  *barrier = (std::uint64_t)arrivals << 16 | arrivals << 1;
  changed(barrier);
}

void barrier_count(std::uint64_t* barrier, unsigned bytes) {
  act();
  step_aside();
  std::uint64_t word = *barrier;
  if (!(word >> 16 & 0xffff)) fail("more arrivals at a barrier (%s) than it counts", address_of(*running, barrier).c_str());
  word = (word & 0xffffffffu) | (std::uint64_t)((std::uint32_t)(word >> 32) + bytes) << 32;
  *barrier = word - (1u << 16);
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
  auto* to = static_cast<unsigned char*>(shared);
  const auto* from = static_cast<const unsigned char*>(global);
  const Block& block = *running->block;
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
  if (!(*barrier >> 16 & 0xffff)) fail("more arrivals at a barrier (%s) than it counts", address_of(*running, barrier).c_str());
  late_arrivals.push_back({running, running->runs_issued, barrier});
  arrive_late(*running);
  step_aside();
}

void wait_for_runs() {
  act();
  while (running->runs_landed != running->runs_issued)
    wait_change("the count of its copies", &running->runs_landed, running->runs_landed, running->runs_issued);
}

void* dynamic_memory() { return running->block->memory; }

int run(Launch* what, void (*kernel)(void**), void** its_arguments) {
  launch = what, body = kernel, arguments = its_arguments;
  grid_dim = {what->grid[0], what->grid[1], what->grid[2]}, block_dim = {what->threads, 1, 1};
  cluster_size = what->cluster;
  random_state = what->seed * 0x9E3779B97F4A7C15ull | 1;
  for (int i = 0; i < 8; i++) draw();
  turns = 0, order = 0xcbf29ce484222325ull, time_now = 1000, host_turn = what->host_every, failed = false;
  static std::vector<unsigned char> signal_stack(64 << 10);
  stack_t stack{}, old_stack{};
  stack.ss_sp = signal_stack.data(), stack.ss_size = signal_stack.size();
  constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}, COUNT = 5;
  struct sigaction action {}, old[COUNT];
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaltstack(&stack, &old_stack);
  for (int i = 0; i < COUNT; i++) sigaction(SIGNALS[i], &action, old + i);
  const unsigned total = grid_dim.x * grid_dim.y * grid_dim.z, at_once = what->cooperative ? total : what->cluster;
  for (unsigned first = 0; first < total && !failed; first += at_once)
    run_blocks(first, at_once < total - first ? at_once : total - first);
  for (int i = 0; i < COUNT; i++) sigaction(SIGNALS[i], old + i, nullptr);
  sigaltstack(&old_stack, nullptr);
  what->turns = turns, what->order = order;
  return failed;
}

}  // namespace emulator
