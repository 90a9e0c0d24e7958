// From one stack to another.
#pragma once
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

// Saves the registers that a call preserves, and the stack; goes on with another's.
extern "C" void emulator_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
constexpr int FRAME_WORDS = 8, RETURN_WORD = 6;  // the return leaves the stack as a call would
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch, .-emulator_switch
)");
constexpr int FRAME_WORDS = 20, RETURN_WORD = 11;
#else
#error "no switch of fibers for this architecture"
#endif

namespace emulator {

// A fiber's stack, or that of the host's thread.
struct Stack {
  const void* lowest = nullptr;
  std::size_t bytes = 0;
};

// AddressSanitizer knows a stack by its bounds and is told of each switch.
#if defined(__SANITIZE_ADDRESS__)
inline void switch_stacks(void** save, void* load, const Stack& to) {
  void* frames = nullptr;
  __sanitizer_start_switch_fiber(&frames, to.lowest, to.bytes);
  emulator_switch(save, load);
  __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
}
// A fiber begins; `from` had switched to it.
inline void switched(Stack& from) { __sanitizer_finish_switch_fiber(nullptr, &from.lowest, &from.bytes); }
// A jump has come to this stack.
inline void jumped(const Stack& to) {
  __sanitizer_start_switch_fiber(nullptr, to.lowest, to.bytes);
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}
inline void forbid(const void* memory, std::size_t bytes) { __asan_poison_memory_region(memory, bytes); }
inline void allow(const void* memory, std::size_t bytes) { __asan_unpoison_memory_region(memory, bytes); }
#else
inline void switch_stacks(void** save, void* load, const Stack&) { emulator_switch(save, load); }
inline void switched(Stack&) {}
inline void jumped(const Stack&) {}
inline void forbid(const void*, std::size_t) {}
inline void allow(const void*, std::size_t) {}
#endif

}  // namespace emulator
