// A layer's experts, and its output: x += the heads' map + each token's experts by their shares.
//
// MIXED is the stride of the heads' output. EXPERT_WEIGHTS is the kind of the experts' weights: BF16, or E4M3 or INT8 with
// a float32 scale for each row, all in the checkpoint's layout, or INT4, packed. WEIGHTS is that of the heads' map, in
// bf16 in the checkpoint's layout, else packed.
//
// Only experts with tokens are read. A thread block has 16 rows of every expert, so the choice of experts does not
// unbalance the work. A token's sum runs in the order of its own ranking, so it has the same bits in every batch.
#include "low_rank.cuh"
#include "expert_routes.cuh"
#include "row_major_gemm.cuh"

#if EXPERT_WEIGHTS == 3
static_assert(WEIGHTS == INT4, "one kind of packed weights");
using Up = PackedRows<DIM, 2048>;
using Down = PackedRows<INNER, 1024>;
#else
using Up = Rows<DIM, EXPERT_WEIGHTS>;
using Down = Rows<INNER, EXPERT_WEIGHTS>;
#endif
#if WEIGHTS == 0
using Proj = Rows<DIM, BF16>;
#else
using Proj = PackedRows<DIM, 1024>;
#endif
constexpr float UNIT = EXPERT_WEIGHTS == E4M3 ? LIFT : 1.f;  // of what meets experts' weights
static_assert(DIM % 64 == 0 && INNER % 64 == 0 && EXPERT_WEIGHTS <= INT4, "unsupported sizes");

// The experts' scales of a thread block's 16 rows. Read before anything else, they cost no sum a wait for memory.
struct RowsOfScales {
  static constexpr bool SCALED = EXPERT_WEIGHTS == E4M3 || EXPERT_WEIGHTS == INT8;
  static constexpr int COUNT = SCALED ? EXPERTS * 16 : 0, OWN = ceil_div(COUNT, WORKERS);
  float* shared;
  float held[OWN + 1];

  __device__ __forceinline__ explicit RowsOfScales(unsigned char* shared) : shared(reinterpret_cast<float*>(shared)) {}
  // The workers; at(expert, row) points at a scale.
  template <class At>
  __device__ __forceinline__ void load(At at) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int mine = i * WORKERS + threadIdx.x;
      held[i] = mine < COUNT ? *at(mine / 16, mine % 16) : 0.f;
    }
  }
  // Readers need a barrier afterwards.
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int mine = i * WORKERS + threadIdx.x;
      if (mine < COUNT) shared[mine] = held[i] * (EXPERT_WEIGHTS == E4M3 ? LOWER : 1.f);
    }
  }
  __device__ __forceinline__ float of(int expert, int row) const { return COUNT ? shared[expert * 16 + row] : 1.f; }
};

template <int VALUE>
struct Number {
  static constexpr int value = VALUE;
};

// The workers' sums of successive blocks. Two of at most HALF tiles are in progress at once, or a larger one.
struct Blocks {
  static constexpr int HALF = TILES < 2 ? 1 : 2;
  using Sums = float4[2 * HALF][WARPS][32];
  Sums& sums;
  int index = 0;
  bool is_whole = false;  // the last one took all memory

  __device__ __forceinline__ explicit Blocks(unsigned char* shared) : sums(*reinterpret_cast<Sums*>(shared)) {}
  // The tile of the current block that this warp adds up, if it has as many.
  template <int NT>
  __device__ __forceinline__ int own() const {
    return (threadIdx.x / 32 - index * NT) & (WARPS - 1);  // to balance the work
  }
  // finish(tile, sum) for each tile of a block.
  template <int NT, class Finish>
  __device__ __forceinline__ void add(const float4 (&sum)[NT], Finish finish) {
    constexpr bool WHOLE = NT > HALF;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = own<NT>();
    if (index > 0 && (WHOLE || is_whole)) workers_sync();  // the last one is added up
    auto* const mine = sums + (WHOLE ? 0 : index % 2 * HALF);
#pragma unroll
    for (int i = 0; i < NT; i++) mine[i][warp][lane] = sum[i];
    workers_sync();
    if (tile < NT) {
      float4 all = mine[tile][0][lane];
#pragma unroll
      for (int from = 1; from < WARPS; from++) ::add(all, mine[tile][from][lane]);
      finish(tile, all);
    }
    index++, is_whole = WHOLE;
  }
};

// one(tiles), for the fewest tiles.
template <class One>
__device__ __forceinline__ void by_tiles(int count, One one) {
  if (TILES == 1 || count <= 8)
    one(Number<1>{});
  else if (TILES == 2 || count <= 16)
    one(Number<TILES < 2 ? 1 : 2>{});
  else
    one(Number<TILES>{});
}

// inner [B * ACTIVE, INNER]: gelu(u) * (g + 1) of each pair, where u and g are the halves of its expert's first map,
// [EXPERTS, 2 INNER, DIM]. `normed_x` and `inner` are in UNIT. Chooses `experts` and `shares` [B, ACTIVE]. `change`
// [B * ACTIVE, 2 INNER] float32, unless null, is added for tokens with a slot. The preceding kernel, which computes
// it, lets this one begin only after all other inputs were written.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) experts_up(
    const bf16* normed_x, const float* logits, const unsigned char* weights, const float* scales, bf16* inner,
    int* experts, float* shares, const float* change, const i64* slots, const i64* rows, int batch, int stages) {
  constexpr int STRIDE = DIM + Up::PADDING;
  __shared__ Routes routes;
  unsigned char* shared = shared_memory;
  Ring ring(shared, stages, Up::STAGE / 2), inputs(shared, 1, batch * STRIDE);
  Blocks blocks(shared);
  RowsOfScales row_scales(shared + sizeof(Blocks::Sums));
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, first = blockIdx.x * 8;
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init();
  const u32 adapted = change ? adapted_tokens(slots, rows, batch) : 0u;
  const auto index_of = [&](int e, int row) { return (i64)(e * 2 + row / 8) * INNER + first + row % 8; };  // of rows
  if (warp < WARPS) row_scales.load([&](int e, int row) { return scales + index_of(e, row); });
  __syncthreads();
  if (!change) wait_previous();
  launch_dependents();  // late: for later kernels all that this one waited for has ended
  if (warp > WARPS) {
    produce_tokens(inputs, batch, DIM, STRIDE, keep_policy(), [&](int token) { return normed_x + (i64)token * DIM; });
  } else if (warp < WARPS) {
    routes.choose(logits, batch);
    row_scales.store();
    routes.group(batch);
  }
  __syncthreads();
  if (warp > WARPS) copies_landed();
  if (warp > WARPS) return;
  if (warp == WARPS) {
    const u64 policy = stream_policy();
    for_touched(routes, [&](int e, int) {
      for (int i = 0; i < Up::CHUNKS; i++)
        Up::produce(ring, policy, weights, e * (INNER / 8) + blockIdx.x, i, [&](int row) { return index_of(e, row); });
    });
    copies_landed();
    return;
  }
  if (blockIdx.x == 0)
    for (int pair = threadIdx.x; pair < batch * ACTIVE; pair += WORKERS)
      experts[pair] = routes.expert[pair], shares[pair] = routes.share[pair];
  const int row = Up::row(g), inner_row = first + row;
  barrier_wait(inputs.full, 0);
  for_touched(routes, [&](int e, int count) {
    by_tiles(count, [&](auto tiles) {
      constexpr int NT = tiles.value;
      const bf16* from[NT];
#pragma unroll
      for (int tile = 0; tile < NT; tile++) {
        const int slot = min(tile * 8 + g, count - 1);  // without a token: unused
        from[tile] = inputs.data + routes.pairs[e][slot] / ACTIVE * STRIDE;
      }
      // Prefetched: of u and g, for two tokens.
      float more[2][2] = {};
      const int own = blocks.own<NT>();
      const auto fetch = [&] {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int slot = own * 8 + t * 2 + j;
          if (own >= NT || slot >= count) continue;
          const int pair = routes.pairs[e][slot];
          if (!(adapted >> pair / ACTIVE & 1u)) continue;
          more[0][j] = load_fresh_f32(change + (i64)pair * 2 * INNER + inner_row);
          more[1][j] = load_fresh_f32(change + (i64)pair * 2 * INNER + INNER + inner_row);
        }
      };
      if (adapted && blocks.index > 0) fetch();
      float4 sum[NT] = {};
      for (int i = 0; i < Up::CHUNKS; i++) {
        const HeldRows<Up> held(ring.get());
        ring.release(held.read());
        multiply_rows(sum, held, from);
#pragma unroll
        for (int tile = 0; tile < NT; tile++) from[tile] += Up::CHUNK;
      }
      if (change && blocks.index == 0) {
        wait_previous();
        fetch();
      }
      blocks.add(sum, [&](int tile, float4 all) {
        const float u_scale = row_scales.of(e, row), gate_scale = row_scales.of(e, row + 8);
        const float u[2] = {all.x * u_scale, all.y * u_scale}, gate[2] = {all.z * gate_scale, all.w * gate_scale};
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int slot = tile * 8 + t * 2 + j;
          if (slot >= count) continue;
          const float up = u[j] + more[0][j], by = gate[j] + more[1][j] + 1.f;
          inner[(i64)routes.pairs[e][slot] * INNER + inner_row] = to_bf16(gelu_exact(up) * by * UNIT);
        }
      });
    });
  });
}

// One warp; at(i, token) points at inputs of the i-th stage of weights, which meets a tile after the other.
template <class R, class At>
__device__ __forceinline__ void produce_steps(Ring& ring, int count, u64 policy, At at) {
  for (int i = 0; i < R::CHUNKS; i++)
    for (int first = 0; first < count; first += 8)
      produce_tokens(ring, min(8, count - first), R::CHUNK, R::CHUNK + R::PADDING, policy, [&](int token) {
        return at(i, first + token);
      });
}

// The workers.
template <class R, int NT>
__device__ __forceinline__ void multiply_stages(Ring& ring, Ring& inputs, float4 (&sum)[NT], int count) {
  const int g = threadIdx.x % 32 / 4;
  for (int i = 0; i < R::CHUNKS; i++) {
    const HeldRows<R> held(ring.get());
    ring.release(held.read());
#pragma unroll
    for (int tile = 0; tile < NT; tile++) {
      const int left = count - tile * 8;
      if (left <= 0) break;
      const bf16* from[1] = {inputs.get() + min(g, left - 1) * (R::CHUNK + R::PADDING)};
      float4 part[1] = {sum[tile]};
      inputs.release(multiply_rows(part, held, from));
      sum[tile] = part[0];
    }
  }
}

struct Terms {
  float pairs[TOKENS * ACTIVE][16], heads[TOKENS][16];
};

// x += heads * `proj` [DIM, DIM] + `bias` + each token's experts; `down` [EXPERTS, DIM, INNER]; rows of `proj` in 8 bits
// have `proj_scales`. The preceding kernels let this one begin only after `experts_up` had ended, so it waits only for `heads` and for `change` [B, DIM]
// float32, added unless null for tokens with a slot.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) experts_out(
    const bf16* inner, const int* experts, const float* shares, const bf16* heads, const unsigned char* down,
    const float* scales, const unsigned char* proj, const float* proj_scales, const bf16* bias, bf16* x, const float* change,
    const i64* slots, const i64* rows, int batch, int stages) {
  constexpr int MOST = Proj::STAGE > Down::STAGE ? Proj::STAGE : Down::STAGE;
  constexpr int MOST_INPUTS = Proj::CHUNK + Proj::PADDING > Down::CHUNK + Down::PADDING ? Proj::CHUNK + Proj::PADDING
                                                                                      : Down::CHUNK + Down::PADDING;
  __shared__ Routes routes;
  unsigned char* shared = shared_memory;
  Ring ring(shared, stages, MOST / 2), inputs(shared, INPUT_STAGES, min(batch, 8) * MOST_INPUTS);
  Blocks blocks(shared);
  auto& terms = *reinterpret_cast<Terms*>(shared + sizeof(Blocks::Sums));
  RowsOfScales row_scales(shared + sizeof(Blocks::Sums) + sizeof(Terms));
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, first = blockIdx.x * 16;
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init();
  const u32 adapted = change ? adapted_tokens(slots, rows, batch) : 0u;
  if (warp < WARPS) {
    row_scales.load([&](int e, int row) { return scales + (i64)e * DIM + first + row; });
    for (int pair = threadIdx.x; pair < batch * ACTIVE; pair += WORKERS) {
      routes.expert[pair] = (int)load_fresh_u32(experts + pair);
      routes.share[pair] = load_fresh_f32(shares + pair);
    }
    routes.group(batch);
    row_scales.store();
  }
  __syncthreads();
  launch_dependents();
  if (warp == WARPS) {
    const u64 policy = stream_policy();
    for_touched(routes, [&](int e, int) {
      for (int i = 0; i < Down::CHUNKS; i++)
        Down::produce(ring, policy, down, e * (DIM / 16) + blockIdx.x, i, [&](int row) { return (i64)e * DIM + first + row; });
    });
    for (int i = 0; i < Proj::CHUNKS; i++)
      Proj::produce(ring, policy, proj, blockIdx.x, i, [&](int row) { return first + row; });
    copies_landed();
    return;
  }
  if (warp > WARPS) {
    const u64 policy = keep_policy();
    for_touched(routes, [&](int e, int count) {
      produce_steps<Down>(inputs, count, policy, [&](int i, int slot) {
        return inner + (i64)routes.pairs[e][slot] * INNER + i * Down::CHUNK;
      });
    });
    wait_previous();
    produce_steps<Proj>(
        inputs, batch, policy, [&](int i, int token) { return heads + (i64)token * MIXED + i * Proj::CHUNK; });
    copies_landed();
    return;
  }
  const RowScales proj_row(proj_scales, first + g, first + g + 8);
  for_touched(routes, [&](int e, int count) {
    by_tiles(count, [&](auto tiles) {
      float4 sum[tiles.value] = {};
      multiply_stages<Down>(ring, inputs, sum, count);
      blocks.add(sum, [&](int tile, float4 all) {
        const int row = Down::row(g);
        const float low_scale = row_scales.of(e, row), high_scale = row_scales.of(e, row + 8);
        const float low[2] = {all.x * low_scale, all.y * low_scale}, high[2] = {all.z * high_scale, all.w * high_scale};
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int slot = tile * 8 + t * 2 + j;
          if (slot >= count) continue;
          float* out = terms.pairs[routes.pairs[e][slot]];
          out[row] = low[j];
          out[row + 8] = high[j];
        }
      });
    });
  });
  float4 sum[TILES] = {};
  multiply_stages<Proj>(ring, inputs, sum, batch);
  blocks.add(sum, [&](int tile, float4 all) {
    all = proj_row.of(all);
    const float low[2] = {all.x, all.y}, high[2] = {all.z, all.w};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float* out = terms.heads[tile * 8 + t * 2 + j];
      out[Proj::row(g)] = low[j];
      out[Proj::row(g) + 8] = high[j];
    }
  });
  workers_sync();
  for (int i = threadIdx.x; i < batch * 16; i += WORKERS) {
    const int token = i / 16, row = i % 16;
    float mlp = 0.f;
#pragma unroll
    for (int rank = 0; rank < ACTIVE; rank++) {
      const int pair = token * ACTIVE + rank;
      mlp += routes.share[pair] * terms.pairs[pair][row];
    }
    if (adapted >> token & 1u) mlp += load_fresh_f32(change + (i64)token * DIM + first + row);
    bf16* at = x + (i64)token * DIM + first + row;
    *at = to_bf16(to_float(*at) + terms.heads[token][row] + to_float(bias[first + row]) + mlp);
  }
}
