// Which thread runs next, drawn by a seed and by moods.
#include "state.h"
#include "switch.h"

namespace emulator {

Thread* running;

namespace {

constexpr unsigned NANOSECONDS_OF_TURN = 4;

// What is preferred for a while. Chances are of 256.
struct Mood {
  unsigned stays, aside, copies;  // with a warp; at a chance to step aside; to land a copy before a turn
  unsigned looks;                 // to have a thread that polls look again, where only copies could go on
  int favourite;                  // block that runs while it can, or -1
  int starved_block, starved_warp;  // warp that runs only when no other can; blocks -1: of all of them
  unsigned late_lane;             // runs when no other of its warp can; 32: none
  std::uint64_t until;
};

std::vector<Warp*> ready;  // with lanes that can run
Warp* current_warp;
void* host_stack_pointer;
Stack host_stack;
unsigned num_live;
std::uint64_t random_state, time_now, host_turn;
Mood mood;

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
  mood.until = launch->turns + 2000 + below(60000);
}

void clear_runnable(Thread& thread) {
  Warp& warp = *thread.warp;
  warp.runnable &= ~(1u << thread.lane);
  if (warp.runnable) return;
  ready[warp.ready_at] = ready.back();
  ready[warp.ready_at]->ready_at = warp.ready_at;
  ready.pop_back();
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

Thread* choose_lane(const Warp& warp) {
  unsigned lanes = warp.runnable;
  if (mood.late_lane < 32 && lanes != 1u << mood.late_lane) lanes &= ~(1u << mood.late_lane);
  const unsigned turned = lanes >> warp.first_lane | (warp.first_lane ? lanes << (32 - warp.first_lane) : 0);
  return warp.lanes + (__builtin_ctz(turned) + warp.first_lane) % 32;
}

// The next thread to run, or null for the host.
Thread* choose() {
  launch->turns++;
  time_now += NANOSECONDS_OF_TURN;
  if (launch->turns >= mood.until) {
    change_mood();
    if (launch->turns > launch->most_turns) leave("more turns than a launch may take" + waits_of_all());
  }
  if (launch->host && launch->turns >= host_turn) return nullptr;
  if (copies_under_way() && chance(mood.copies)) land_some_copy();
  while (ready.empty()) {
    if (!copies_under_way())
      be_quiet();
    else if (some_poll() && chance(mood.looks))
      wake_some_poll();
    else
      land_some_copy();
  }
  if (!current_warp || !current_warp->runnable || !chance(mood.stays)) {
    current_warp = choose_warp();
    current_warp->first_lane = (unsigned)below(32);
  }
  Thread* thread = choose_lane(*current_warp);
  launch->order = (launch->order ^ (std::uint64_t)(thread - threads.data())) * 0x100000001b3ull;
  return thread;
}

// To a thread, or to the host.
void switch_to(void** save, const Thread* thread) {
  if (thread)
    switch_stacks(save, thread->stack_pointer, {thread->stack, STACK_BYTES});
  else
    switch_stacks(save, host_stack_pointer, host_stack);
}

}  // namespace

void begin_schedule() {
  random_state = launch->seed * 0x9E3779B97F4A7C15ull | 1;
  for (int i = 0; i < 8; i++) draw();
  launch->turns = 0, launch->order = 0xcbf29ce484222325ull;
  time_now = 1000, host_turn = launch->host_every;
}

void reset_schedule() {
  ready.clear();
  current_warp = nullptr, num_live = 0, host_stack = {};
  change_mood();
}

void run_threads() {
  if (sigsetjmp(out_of_threads, 1)) {
    jumped(host_stack);
    return;
  }
  while (num_live && !failed) {
    if (launch->host && launch->turns >= host_turn) host_turn = launch->turns + launch->host_every, launch->host();
    running = choose();
    if (running) switch_to(&host_stack_pointer, running);
  }
}

std::uint64_t draw() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545F4914F6CDD1Dull >> 16;
}
std::uint64_t below(std::uint64_t n) { return draw() % n; }
bool chance(unsigned of_256) { return (draw() & 255) < of_256; }

std::uint64_t now() { return time_now; }
void pass_time(std::uint64_t nanoseconds) { time_now += nanoseconds; }

void set_runnable(Thread& thread) {
  Warp& warp = *thread.warp;
  if (!warp.runnable) warp.ready_at = ready.size(), ready.push_back(&warp);
  warp.runnable |= 1u << thread.lane;
}

void go_on() {
  Thread* from = running;
  Thread* to = choose();
  if (to == from) return;
  running = to;
  switch_to(&from->stack_pointer, to);
}

void block_running(const char* what, const void* where, unsigned detail) {
  running->waits = what, running->where = where, running->detail = detail;
  clear_runnable(*running);
  go_on();
  running->waits = nullptr;
}

void add_thread(Thread& thread) {
  num_live++;
  set_runnable(thread);
}

// The first of all comes from the host.
void begin_running() {
  Stack from;
  switched(from);
  if (!host_stack.lowest) host_stack = from;
}

void end_running() {
  Thread& thread = *running;
  clear_runnable(thread);
  if (--num_live == 0) {
    running = nullptr;
    switch_to(&thread.stack_pointer, nullptr);
  }
  go_on();
}

void step_aside() {
  if (chance(mood.aside)) go_on();
}
void glance_aside() {
  if ((draw() & 4095) < mood.aside) go_on();
}
void sleep(unsigned nanoseconds) {
  pass_time(nanoseconds / 64);
  go_on();
}

}  // namespace emulator
