// Low-rank changes of a layer's experts, each token's by its own adapter: B (A x).
//
// FIRST: of the experts' first map. Slots as in low_rank_adapters.cu, with RANKS for each expert. A thread block has
// a token at a time, a warp a pair (expert_routes.cuh). Sums run in an order fixed by the sizes.
#include "expert_choice.cuh"
#include "low_rank.cuh"

constexpr float UNIT = EXPERT_WEIGHTS == 1 ? 1.f / LIFT : 1.f;  // of the experts' inputs; 1: E4M3

__device__ __forceinline__ i64 row_of(int slot, int expert) { return ((i64)slot * EXPERTS + expert) * RANKS; }

__device__ __forceinline__ int load_fresh_int(const int* address) { return (int)load_fresh_u32(address); }

#ifdef WIDTH
static_assert(WIDTH % 8 == 0, "unsupported sizes");

// low [B * ACTIVE, RANKS] float32 = A x, up to each token's own rank, of tokens [B, WIDTH] if FIRST, else of pairs.
// FIRST chooses the `experts` [B, ACTIVE]; otherwise the preceding kernel let this one begin only after that.
extern "C" __global__ void __launch_bounds__(ACTIVE * 32, 3) expert_shrink(
    const bf16* x, const float* logits, const bf16* a, const i64* ranks, const i64* slots, const i64* rows, int* experts,
    float* low, int batch) {
  const int token = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = token * ACTIVE + warp;
  const int slot = slot_of(slots, rows, token, batch), count = slot ? (int)ranks[slot] : 0;
  launch_dependents();
  int rank = blockIdx.x, expert = 0;
  LaneValues<WIDTH> own, in;
  const auto load = [&] { own.load(a + (row_of(slot, expert) + rank) * WIDTH, load_constant); };
  if (!FIRST && rank < count) {
    expert = load_fresh_int(experts + pair);
    load();
  }
  wait_previous();
  if (rank >= count) return;
  in.load(x + (i64)(FIRST ? token : pair) * WIDTH, [](const bf16* from) { return load_fresh(from); });
  if (FIRST) {
    Choice choices[1];
    choose_experts(choices, [&](int) { return logits + token * EXPERTS; });
    const u32 chosen = choices[0].expert;
    if (rank == 0 && warp == 0 && lane < ACTIVE) experts[token * ACTIVE + lane] = chosen;
    expert = __shfl_sync(~0u, chosen, warp);
    load();
  }
  for (;;) {
    in.keep_packed();
    const float sum = warp_sum(dot(own, in)) * UNIT;
    if (lane == 0) low[(i64)pair * RANKS + rank] = sum;
    if ((rank += gridDim.x) >= count) break;
    load();
  }
}
#endif

#ifdef OUTPUTS
constexpr int OUTS = 64, STEP = 4, AHEAD = 4;  // outputs of a block; ranks of a warp
static_assert(OUTPUTS % OUTS == 0, "unsupported sizes");

// FIRST: change [B * ACTIVE, OUTPUTS] float32 = B low. Else: change [B, OUTPUTS], the pairs' sum by `shares`. Tokens
// without an adapter are left out. FIRST: later kernels may begin once the kernel two before has ended. Else: the
// preceding kernels let this one begin only after all its inputs were written.
extern "C" __global__ void __launch_bounds__(ACTIVE * 32, 4) expert_expand(
    const float* low, const int* experts, const float* shares, const bf16* b, const i64* ranks, const i64* slots,
    const i64* rows, float* change, int batch) {
  __shared__ float parts[ACTIVE][OUTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sub = lane / 8, own = lane % 8 * 8;
  const int column = blockIdx.x * OUTS + own;
  int token = blockIdx.y, slot = slot_of(slots, rows, token, batch), count = slot ? (int)ranks[slot] : 0;
  const u64 policy = keep_policy();
  if (FIRST) wait_previous();
  launch_dependents();
  while (token < batch) {
    const int next = token + gridDim.y, next_slot = slot_of(slots, rows, next, batch);
    const int next_count = next_slot ? (int)ranks[next_slot] : 0;
    if (slot) {
      const int pair = token * ACTIVE + warp;
      const bf16* from = b + row_of(slot, load_fresh_int(experts + pair)) * OUTPUTS + column;
      const float* lows = low + (i64)pair * RANKS;
      float sum[8] = {};
      // Volatile: all loads of a turn are in flight at once.
      for (int rank = sub; rank < count; rank += STEP * AHEAD) {
        uint4 values[AHEAD];
        float factors[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          const int at = min(rank + i * STEP, count - 1);
          values[i] = load_stream(from + (i64)at * OUTPUTS, policy);
          factors[i] = load_fresh_f32(lows + at);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) factors[i] = rank + i * STEP < count ? factors[i] : 0.f;
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            sum[2 * e] += low_float((&values[i].x)[e]) * factors[i];
            sum[2 * e + 1] += high_float((&values[i].x)[e]) * factors[i];
          }
      }
      const float share = FIRST ? 1.f : load_fresh_f32(shares + pair);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        sum[e] += __shfl_xor_sync(~0u, sum[e], 8);
        sum[e] += __shfl_xor_sync(~0u, sum[e], 16);
        if (!FIRST && lane < 8) parts[warp][own + e] = sum[e] * share;
      }
      if (FIRST && lane < 8) {
        float4* to = reinterpret_cast<float4*>(change + (i64)pair * OUTPUTS + column);
        to[0] = {sum[0], sum[1], sum[2], sum[3]};
        to[1] = {sum[4], sum[5], sum[6], sum[7]};
      }
      if (!FIRST) {
        __syncthreads();
        for (int at = threadIdx.x; at < OUTS; at += ACTIVE * 32) {
          float total = 0.f;
#pragma unroll
          for (int i = 0; i < ACTIVE; i++) total += parts[i][at];
          change[(i64)token * OUTPUTS + blockIdx.x * OUTS + at] = total;
        }
        __syncthreads();
      }
    }
    token = next, slot = next_slot, count = next_count;
  }
  // One block waits for the preceding kernel, so that this one ends after it.
  if (!FIRST && blockIdx.x == 0 && blockIdx.y == 0) wait_previous();
}
#endif
