// Blocks of 16 rows of a map, all inputs of whose tokens a thread block holds, and the warps that finish them.
#pragma once
#include "skinny_gemm.cuh"

// Warps that finish blocks beside the products of the next ones.
constexpr int FINISHERS = ROUNDS == 1 ? 4 : 3;  // fewer threads have the registers that a round takes
constexpr int FINISHING = WORKERS + 32 + 32 * FINISHERS;  // threads of such a kernel, with a warp that copies weights

constexpr int SUM_BARRIERS = 128;  // bytes

// Between the workers, whose sums are `full`, and the finishers, which also wait for each other once (`begun`), and for the workers to
// have `taken` the first round of inputs.
struct SumBarriers {
  static constexpr int COUNT = 2;  // buffers, which blocks take in turns
  u64 full[COUNT], empty[COUNT], begun, taken;
  // In dynamic memory, which each thread block of a cluster has to itself on the emulated machine too.
  static __device__ SumBarriers& at(unsigned char*& shared) {
    auto* from = reinterpret_cast<SumBarriers*>(shared);
    shared += SUM_BARRIERS;
    return *from;
  }
  __device__ void init(int finishers) {
    for (int i = 0; i < COUNT; i++) barrier_init(full + i, WARPS), barrier_init(empty + i, finishers);
    barrier_init(&begun, finishers + 1), barrier_init(&taken, WARPS);
    barriers_ready();
  }
  // Until block `block` has its sums, or the buffer that it takes is empty.
  __device__ __forceinline__ void wait_full(int block) { barrier_wait(full + block % COUNT, block / COUNT % 2); }
  __device__ __forceinline__ void wait_empty(int block) { barrier_wait(empty + block % COUNT, block / COUNT % 2 ^ 1); }
  // By a lane, when all of its warp are done.
  __device__ __forceinline__ void arrive_full(int block) { arrive(full + block % COUNT); }
  __device__ __forceinline__ void arrive_empty(int block) { arrive(empty + block % COUNT); }

 private:
  static __device__ __forceinline__ void arrive(u64* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }
};

// Of two blocks: one is added up while the next is multiplied.
template <int NT>
struct BlockSums {
  WarpSums<NT> blocks[SumBarriers::COUNT];

  // A worker's.
  __device__ __forceinline__ void hand_over(int block, const float4 (&sum)[NT], SumBarriers& barriers) {
    const int at = block % SumBarriers::COUNT;
    barriers.wait_empty(block);
#pragma unroll
    for (int tile = 0; tile < NT; tile++) blocks[at].of[threadIdx.x / 32][tile][threadIdx.x % 32] = sum[tile];
    barriers.arrive_full(block);
  }
  // A finisher's, which takes tiles of each block, the last one by `take`, or skips the block, so that none is two blocks behind.
  __device__ __forceinline__ float4 of(int block, int tile, SumBarriers& barriers) const {
    barriers.wait_full(block);
    return blocks[block % SumBarriers::COUNT].total(tile);
  }
  __device__ __forceinline__ float4 take(int block, int tile, SumBarriers& barriers) const {
    const float4 sum = of(block, tile, barriers);
    barriers.arrive_empty(block);
    return sum;
  }
  __device__ __forceinline__ void skip(int block, SumBarriers& barriers) const {
    barriers.wait_full(block);
    barriers.arrive_empty(block);
  }
};

// The workers' part of `count` blocks.
template <int NT, int INPUTS>
__device__ __forceinline__ void multiply_blocks(
    int count, Ring& ring, const HeldInputs<INPUTS>& inputs, BlockSums<NT>& sums, SumBarriers& barriers, int batch) {
  using Inputs = HeldInputs<INPUTS>;
  constexpr int CHUNK = Inputs::CHUNK, CHUNKS = Inputs::CHUNKS, STRIDE = Inputs::STRIDE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool active = has_inputs<CHUNK>(warp);
  // Chunks whose inputs stay in registers: more of them make no kernel faster. Sums and scales of int4 leave room for none.
  constexpr int KEPT = ROUNDS > 1 ? Inputs::ROUND : WEIGHTS == INT4 && NT > 2 ? 0 : 1;
  const bf16* from = inputs.data + (active ? g * STRIDE + warp * GROUP + t * 8 : 0);
  using Stages = Span<CHUNK, CHUNKS>;
  constexpr bool LATE = Stages::SIZE > 1 && NT > 2;  // registers hold the inputs of one chunk
  Tokens<NT> tokens[CHUNKS];
  Reader<true, CHUNK, Stages::SIZE> reader;
  if (count > 0) reader.begin(ring, active);
  if (ROUNDS > 1) {
    u32 read = 0;
#pragma unroll
    for (int chunk = 0; chunk < KEPT; chunk++) {
      inputs.wait(chunk);
      tokens[chunk].load(from + Inputs::at(chunk), STRIDE, g < batch);
      read |= tokens[chunk].read();
    }
    if (Ring::is_read(read) && lane == 0) barrier_arrive(&barriers.taken);
    __syncwarp();
  }
  for (int block = 0; block < count; block++) {
    float4 sum[NT] = {};
#pragma unroll
    for (int stage = 0; stage < Stages::STAGES; stage++) {
      const int first = stage * Stages::SIZE, chunks = Stages::chunks(stage);
      const auto load = [&](int chunk) {
        if (ROUNDS > 1 && chunk < KEPT) return;
        if (block == 0) inputs.wait(chunk);
        if (chunk >= KEPT || block == 0) tokens[chunk].load(from + Inputs::at(chunk), STRIDE, g < batch);
      };
      if (!LATE)
#pragma unroll
        for (int chunk = first; chunk < first + chunks; chunk++) load(chunk);
      const auto inputs_of = [&](int i) -> const Tokens<NT>& {
        if (LATE) load(first + i);
        return tokens[first + i];
      };
      reader.multiply(ring, sum, inputs_of, chunks, active, stage + 1 < Stages::STAGES || block + 1 < count);
    }
    sums.hand_over(block, sum, barriers);
  }
}

// The part of finisher `index` of OF, to which tiles of successive blocks go in turns: finish(block, tile, sum, prepare(block, tile)),
// prepared while the tile before it is finished, the first one before begin(). sum.x, .y are row g of tokens 2t and 2t+1, .z, .w row
// g + 8, as packed, with g = lane / 4 and t = lane % 4.
template <int NT, int OF, class Begin, class Prepare, class Finish>
__device__ __forceinline__ void finish_blocks(
    int count, int index, const BlockSums<NT>& sums, SumBarriers& barriers, Begin begin, Prepare prepare, Finish finish) {
  int next = index;  // tile, of all blocks'
  decltype(prepare(0, 0)) prepared{};
  if (next / NT < count) prepared = prepare(next / NT, next % NT);
  begin();
  for (int block = 0; block < count; block++) {
    if (block < next / NT) {
      sums.skip(block, barriers);
      continue;
    }
    const auto mine = prepared;
    const int tile = next % NT;
    next += OF;
    if (next / NT < count) prepared = prepare(next / NT, next % NT);
    if (OF < NT && next / NT == block) {  // another tile of this block follows
      finish(block, tile, sums.of(block, tile, barriers), mine);
      block--;
      continue;
    }
    finish(block, tile, sums.take(block, tile, barriers), mine);
  }
}

// A thread block that holds all inputs of the tokens: WARPS warps multiply, one copies weights, and FINISHERS copy the inputs and then
// finish blocks.
template <int NT, int INPUTS>
struct BlockMap {
  using Inputs = HeldInputs<INPUTS>;
  Ring ring;
  Inputs inputs;
  SumBarriers& barriers;
  BlockSums<NT>& sums;
  const int batch;

  __device__ BlockMap(unsigned char*& shared, int stages, int batch)
      : ring(shared, stages, Span<Inputs::CHUNK, Inputs::CHUNKS>::ELEMENTS), inputs(shared, columns<NT>(batch)), barriers(SumBarriers::at(shared)),
        sums(*reinterpret_cast<BlockSums<NT>*>(shared)), batch(batch) {
    shared += sizeof(BlockSums<NT>);
    if (threadIdx.x == WORKERS) ring.init();
    if (threadIdx.x == WORKERS + 32) inputs.template init<FINISHERS>(), barriers.init(FINISHERS);
    if (threadIdx.x < WORKERS) clear<NT>(inputs.data, Inputs::STRIDE, batch);
  }
  // `count` blocks of x [batch, INPUTS], once the constructors' threads have met, in a cluster all SHARED thread blocks'.
  // weights(block) is where a block's begin. early(token) and each finisher's first prepare() run before x is there, begin(finisher)
  // when it is.
  template <int SHARED, class At, class Early, class Begin, class Prepare, class Finish>
  __device__ __forceinline__ void run(
      int count, const bf16* x, At weights, Early early, Begin begin, Prepare prepare, Finish finish) {
    constexpr int CHUNK = Inputs::CHUNK, CHUNKS = Inputs::CHUNKS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < WARPS) {
      wait_previous();
      multiply_blocks<NT, INPUTS>(count, ring, inputs, sums, barriers, batch);
    } else if (warp == WARPS) {
      produce_weights<CHUNK, CHUNKS>(ring, count, [&](int i, int) { return weights(i); });
    } else {
      const int finisher = warp - WARPS - 1, rank = SHARED > 1 ? cluster_rank() : 0;
      if (finisher == FINISHERS - 1 && lane < batch) early(lane);
      wait_previous();
      inputs.template copy<SHARED, FINISHERS>(x, batch, rank, finisher);
      const auto all_here = [&] {
        if (ROUNDS > 1) {
          barrier_wait(&barriers.taken, 0);
          inputs.template copy<SHARED, FINISHERS>(x, batch, rank, finisher, 1);
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) inputs.wait(chunk);
        begin(finisher);
      };
      finish_blocks<NT, FINISHERS>(count, finisher, sums, barriers, all_here, prepare, finish);
    }
  }
};
