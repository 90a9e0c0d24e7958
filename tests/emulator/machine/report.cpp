// What went wrong, and what every thread waits for.
#include "state.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <map>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#include <dlfcn.h>
#include <ucontext.h>

namespace emulator {

bool failed;
sigjmp_buf out_of_threads;

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
constexpr int NUM_SIGNALS = sizeof SIGNALS / sizeof *SIGNALS;

std::string place_of(const Thread& thread) {
  char text[96];
  std::snprintf(text, sizeof text, "block %u warp %u lane %u", thread.block_index.x, thread.index.x / 32, thread.lane);
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

std::string access_at(const unsigned char* address) {
  char text[96];
  std::snprintf(text, sizeof text, "an access outside of its memory, at %p", (const void*)address);
  if (running) {
    const auto distance = address - running->block->memory;
    if (distance > -(1 << 20) && distance < (1 << 20))
      std::snprintf(text, sizeof text, "an access at shared memory + %td, of %zu bytes", distance, running->block->room);
  }
  return text;
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
  const bool access = number == SIGSEGV || number == SIGBUS;
  const std::string what = access ? access_at(static_cast<const unsigned char*>(information->si_addr))
                                  : "what C++ leaves undefined";  // the compiler's own checks
  char code[48];
  std::snprintf(code, sizeof code, " (code + %#zx)", place_in_code(context));
  leave((running ? place_of(*running) : "the scheduler") + ": " + what + code);
}

#if defined(__SANITIZE_ADDRESS__)
void on_report(const char*) {
  std::fprintf(stderr, "%s\n", running ? place_of(*running).c_str() : "the scheduler");
}
#endif

struct sigaction old_actions[NUM_SIGNALS];
stack_t old_stack;

}  // namespace

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

// Those of a block with the same wait are on one line.
std::string waits_of_all() {
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

void say(const std::string& message) {
  failed = true;
  std::snprintf(launch->message, launch->message_bytes, "%s", message.c_str());
}

void leave(const std::string& message) {
  say(message);
  siglongjmp(out_of_threads, 1);
}

void fail(const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  std::vsnprintf(text, sizeof text, format, list);
  va_end(list);
  leave((running ? place_of(*running) + ": " : std::string()) + text);
}

FaultsCaught::FaultsCaught() {
  static std::vector<unsigned char> signal_stack(64 << 10);
  stack_t stack{};
  stack.ss_sp = signal_stack.data(), stack.ss_size = signal_stack.size();
  struct sigaction action {};
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
#if defined(__SANITIZE_ADDRESS__)
  __asan_set_error_report_callback(on_report);
#endif
  sigaltstack(&stack, &old_stack);
  for (int i = 0; i < NUM_SIGNALS; i++) sigaction(SIGNALS[i], &action, old_actions + i);
}
FaultsCaught::~FaultsCaught() {
  for (int i = 0; i < NUM_SIGNALS; i++) sigaction(SIGNALS[i], old_actions + i, nullptr);
  sigaltstack(&old_stack, nullptr);
}

}  // namespace emulator
