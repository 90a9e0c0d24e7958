// Threads that wait for a word to change: they sleep until it has, or until nothing else goes on.
#include "state.h"

#include <algorithm>

namespace emulator {
namespace {

constexpr unsigned PATIENT_ROUNDS = 4000, HASTY_ROUNDS = 3;
constexpr std::uint64_t PATIENT_STEP = 50000000;  // nanoseconds of a round in which nothing goes on
constexpr unsigned BUCKETS = 1024;

std::vector<Thread*> polling;
// By address. Those of one address are in the order in which they came: which addresses share a bucket differs from one
// process to the next, and the same seed gives the same order of threads in all of them.
std::vector<Thread*> watching[BUCKETS];
unsigned quiet_rounds;
bool moved;  // since the last round

std::vector<Thread*>& bucket_of(const void* address) {
  return watching[(std::uintptr_t)address / 4 * 2654435761u >> 8 & (BUCKETS - 1)];
}

void wake(Thread& thread) {
  polling[thread.place] = polling.back();
  polling[thread.place]->place = thread.place;
  polling.pop_back();
  thread.polls = false;
  set_runnable(thread);
}

void wake_all_polls() {
  for (auto& bucket : watching) bucket.clear();
  while (!polling.empty()) wake(*polling.back());
}

}  // namespace

void reset_polls() {
  polling.clear();
  for (auto& bucket : watching) bucket.clear();
  moved = true, quiet_rounds = 0;
}

bool some_poll() { return !polling.empty(); }

// It looks again although nothing has told it to.
void wake_some_poll() {
  Thread& thread = *polling[below(polling.size())];
  auto& bucket = bucket_of(thread.where);
  bucket.erase(std::find(bucket.begin(), bucket.end(), &thread));
  wake(thread);
}

void be_quiet() {
  if (polling.empty()) leave("deadlock: every thread waits for others" + waits_of_all());
  if (moved) quiet_rounds = 0;
  moved = false;
  if (++quiet_rounds > (launch->patient ? PATIENT_ROUNDS : HASTY_ROUNDS))
    leave("deadlock: nothing goes on but polls" + waits_of_all());
  if (launch->patient) pass_time(PATIENT_STEP);
  wake_all_polls();
}

void act() {
  moved = true;
  running->polled = nullptr;
}

void wait_change(const char* what, const void* address, std::uint64_t seen, unsigned detail) {
  Thread& thread = *running;
  if (thread.where != address || thread.seen != seen) moved = true;
  thread.seen = seen;
  thread.place = polling.size(), thread.polls = true;
  polling.push_back(&thread);
  bucket_of(address).push_back(&thread);
  block_running(what, address, detail);
}

void changed(const void* address) {
  moved = true;
  if (running) running->polled = nullptr;
  auto& bucket = bucket_of(address);
  std::size_t kept = 0;
  for (Thread* thread : bucket)
    if (thread->where == address)
      wake(*thread);
    else
      bucket[kept++] = thread;
  bucket.resize(kept);
}

}  // namespace emulator
