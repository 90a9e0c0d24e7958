// Launches the kernels of machine_kernels.cu and prints what each does by which order of threads: the same on any processor.
#include "machine.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

extern "C" {
int emulate_multiply(emulator::Launch*, void**);
int emulate_turn(emulator::Launch*, void**);
int emulate_warp_words(emulator::Launch*, void**);
int emulate_copied(emulator::Launch*, void**);
int emulate_faulty(emulator::Launch*, void**);
}

namespace {

using Kernel = int (*)(emulator::Launch*, void**);

// Of 4 KB each; 16 bytes are the most that a thread reads or writes at once.
alignas(128) unsigned source[1024], result[1024], more[1024];

void fill(std::uint64_t seed) {
  for (unsigned i = 0; i < 1024; i++) {
    const float number = (float)((i * 2654435761u + seed * 40503u) >> 16 & 255) / 64.f;
    unsigned bits;
    std::memcpy(&bits, &number, sizeof bits);
    source[i] = (bits & 0xffff0000u) | bits >> 16;  // two of bfloat16
    result[i] = more[i] = 0;
  }
}

std::uint64_t hash() {
  std::uint64_t all = 0xcbf29ce484222325ull;
  for (const auto* words : {result, more})
    for (unsigned i = 0; i < 1024; i++) all = (all ^ words[i]) * 0x100000001b3ull;
  return all;
}

// Without addresses, which are a process's own, and places in code.
std::string without_addresses(std::string text) {
  constexpr const char* DIGITS = "0123456789abcdef";
  for (const char* before : {"(code + ", "word at 0x"})
    for (std::size_t at = 0; (at = text.find(before, at)) != std::string::npos;) {
      at += std::strlen(before);
      text.erase(at, text.find_first_not_of(DIGITS, at) - at);
    }
  return text;
}

void launch(const char* name, Kernel kernel, unsigned threads, std::uint64_t seed, void** arguments) {
  static char message[16384];
  message[0] = 0;
  emulator::Launch it{};
  it.grid[0] = it.grid[1] = it.grid[2] = it.cluster = 1;
  it.threads = threads, it.shared = 1024, it.seed = seed, it.most_turns = 200000;
  it.message = message, it.message_bytes = sizeof message;
  const int failed = kernel(&it, arguments);
  std::printf("%s seed %llu: %s, %llu turns, order %016llx, result %016llx %s\n", name, (unsigned long long)seed,
              failed ? "failed" : "ended", (unsigned long long)it.turns, (unsigned long long)it.order,
              (unsigned long long)hash(), without_addresses(message).c_str());
}

}  // namespace

int main() {
  const void *from = source, *to = result, *also = more;
  for (std::uint64_t seed = 1; seed <= 10; seed++) {
    for (int of_half = 0; of_half < 2; of_half++) {
      void* matrices[] = {&from, &from, &to, &of_half};
      fill(seed), launch(of_half ? "multiply, half" : "multiply", emulate_multiply, 32, seed, matrices);
    }
    void* rows[] = {&from, &to, &also};
    fill(seed), launch("turn", emulate_turn, 32, seed, rows);
    void* words[] = {&from, &to};
    fill(seed);
    for (unsigned& word : source) word %= 1000;
    launch("warp_words", emulate_warp_words, 64, seed, words);
    for (int early = 0; early < 2; early++) {
      void* copy[] = {&from, &to, &early};
      fill(seed), launch(early ? "copied, early" : "copied", emulate_copied, 32, seed, copy);
    }
  }
  // As the source has them.
  constexpr int FAULTS[][2] = {{0, 4}, {1, 1024}, {2, 9}, {3, 0}, {4, 0}, {5, 0}, {6, 0}, {7, 0}, {8, 0}, {9, 0}, {10, 4}};
  for (std::uint64_t seed = 1; seed <= 3; seed++)
    for (const auto& [fault, index] : FAULTS) {
      int its_fault = fault, its_index = index;
      void* arguments[] = {&from, &to, &its_fault, &its_index};
      fill(seed), launch(("fault " + std::to_string(fault)).c_str(), emulate_faulty, 64, seed, arguments);
    }
}
