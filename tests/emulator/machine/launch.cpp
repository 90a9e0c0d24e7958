// A launch: its blocks with their memory, and its threads with their stacks.
#include "state.h"
#include "switch.h"

#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

namespace emulator {

Dim block_dim, grid_dim;
unsigned cluster_size;
Launch* launch;
std::vector<Block> blocks;
std::vector<Warp> warps;
std::vector<Thread> threads;

namespace {

constexpr std::size_t COLOURS = 64;
constexpr std::uint64_t CANARY = 0x5ca1ab1edeadbea7ull;

void (*body)(void**);
void** arguments;

void* map(std::size_t bytes, int access) {
  return mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

void unmap(void* memory, std::size_t bytes) {
  allow(memory, bytes);
  munmap(memory, bytes);
}

Block make_block(std::size_t bytes) {
  const std::size_t page = sysconf(_SC_PAGESIZE), body_bytes = (bytes + page - 1) / page * page;
  Block block;
  block.mapped = body_bytes + 2 * page;
  block.mapping = static_cast<unsigned char*>(map(block.mapped, PROT_NONE));
  mprotect(block.mapping + page, body_bytes, PROT_READ | PROT_WRITE);
  std::memset(block.mapping + page, 0xff, body_bytes);
  block.memory = block.mapping + page + (body_bytes - bytes) / 128 * 128;  // its end is at the guard page
  block.room = bytes;
  forbid(block.mapping, block.mapped);
  allow(block.memory, bytes);
  return block;
}

// A thread's life; its stack begins here.
void run_thread() {
  begin_running();
  body(arguments);
  if (*(std::uint64_t*)running->stack != CANARY) fail("the stack of %zu bytes overflowed", STACK_BYTES);
  act();
  leave_meetings();
  end_running();
}

void make_stack(Thread& thread, unsigned char* stack, std::size_t number) {
  thread.stack = stack;
  *(std::uint64_t*)stack = CANARY;
  // Stacks begin at different lines of a page, or all would share the same sets of the caches.
  auto* top = (void**)(stack + STACK_BYTES - number % COLOURS * 192);
  top -= FRAME_WORDS;
  std::memset((void*)top, 0, FRAME_WORDS * sizeof(void*));
  top[RETURN_WORD] = (void*)run_thread;
  thread.stack_pointer = top;
}

void make_threads(unsigned first_block, unsigned num_blocks, unsigned warps_of_block, unsigned char* stacks) {
  warps.assign((std::size_t)num_blocks * warps_of_block, Warp{});
  threads.assign(warps.size() * 32, Thread{});
  reset_schedule(), reset_polls(), reset_meetings(), reset_copies();
  for (std::size_t number = 0; number < threads.size(); number++) {
    Thread& thread = threads[number];
    Warp& warp = warps[number / 32];
    const unsigned block = number / 32 / warps_of_block, linear = first_block + block;
    warp.block = linear, warp.number = number / 32 % warps_of_block;
    warp.lanes = threads.data() + number / 32 * 32;
    thread.lane = number % 32;
    thread.index = {warp.number * 32 + thread.lane, 0, 0};
    thread.block_index = {linear % grid_dim.x, linear / grid_dim.x % grid_dim.y, linear / grid_dim.x / grid_dim.y};
    thread.warp = &warp, thread.block = &blocks[block];
    if (thread.index.x >= launch->threads) {
      warp.exited |= 1u << thread.lane;
      continue;
    }
    make_stack(thread, stacks + number * STACK_BYTES, number);
    add_thread(thread);
  }
}

// Blocks that all run at once.
void run_blocks(unsigned first, unsigned count) {
  for (unsigned b = 0; b < count; b++) blocks.push_back(make_block(launch->shared));
  const unsigned warps_of_block = (launch->threads + 31) / 32;
  const std::size_t bytes = (std::size_t)count * warps_of_block * 32 * STACK_BYTES;
  void* stacks = map(bytes, PROT_READ | PROT_WRITE);
  make_threads(first, count, warps_of_block, static_cast<unsigned char*>(stacks));
  run_threads();
  running = nullptr;
  if (!failed && copies_under_way())
    say(std::to_string(copies_under_way()) + " copies are under way when all threads have ended");
  unmap(stacks, bytes);
  for (Block& block : blocks) unmap(block.mapping, block.mapped);
  blocks.clear(), warps.clear(), threads.clear();
}

}  // namespace

void* dynamic_memory() { return running->block->memory; }

int run(Launch* what, void (*kernel)(void**), void** its_arguments) {
  launch = what, body = kernel, arguments = its_arguments;
  grid_dim = {what->grid[0], what->grid[1], what->grid[2]}, block_dim = {what->threads, 1, 1};
  cluster_size = what->cluster;
  failed = false;
  begin_schedule();
  const FaultsCaught caught;
  const unsigned total = grid_dim.x * grid_dim.y * grid_dim.z, at_once = what->cooperative ? total : what->cluster;
  for (unsigned first = 0; first < total && !failed; first += at_once)
    run_blocks(first, at_once < total - first ? at_once : total - first);
  return failed;
}

}  // namespace emulator
