// Low-rank changes of a layer for a few tokens, each by its own adapter: B (A x), `shrink` and then `expand`.
//
// Constants: RANKS that a slot has room for; `shrink`: WIDTH inputs of A, cut into PARTS, NORM whether A reads
// the layer norm of x; `expand`: OUTPUTS of B. Slot s holds A [RANKS, WIDTH] and B [RANKS, OUTPUTS] as bf16, of
// which the first `ranks[s]` count; slot 0 is none. Token b reads slot `slots[rows[b]]`.
//
// Sums run over inputs and ranks in an order that the sizes fix: a token's change has the same bits whoever is
// beside it, and costs what its own rank does.
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int TOKENS = 4;  // of a thread block, which share what they read where their slot is one
constexpr int OUTS = 64;   // outputs of a thread block of `expand`

// The slots of a thread block's tokens; none behind the batch.
struct Slots {
  int of[TOKENS], first;
  bool any = false;
  __device__ Slots(const i64* slots, const i64* rows, int batch) : first(blockIdx.y * TOKENS) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      of[i] = first + i < batch ? (int)slots[rows[first + i]] : 0;
      any |= of[i] != 0;
    }
  }
};

#ifdef WIDTH
constexpr int SHARE = WIDTH / PARTS, STEPS = (SHARE + 255) / 256, RANKS_HERE = WARPS / PARTS;
static_assert(WIDTH % (8 * PARTS) == 0 && WARPS % PARTS == 0 && (PARTS == 1 || !NORM), "unsupported sizes");

// What a lane has of a warp's SHARE values.
struct Values {
  uint4 at[STEPS];
  template <class Load>
  __device__ Values(const bf16* from, Load load) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const int column = i * 256 + lane * 8;
      at[i] = column < SHARE ? load(from + column) : uint4{0, 0, 0, 0};
    }
  }
};

__device__ __forceinline__ float dot(const Values& a, const Values& x) {
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 p = (&a.at[i].x)[j], q = (&x.at[i].x)[j];
      sum[j] += low_float(p) * low_float(q) + high_float(p) * high_float(q);
    }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The same of the layer norm of all WIDTH values.
__device__ __forceinline__ float normed_dot(const Values& a, const Values& x, const Values& scale, const Values& shift) {
  const int lane = threadIdx.x % 32;
  float sum[4] = {}, squares[4] = {}, product[4] = {};
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) sum[j] += low_float((&x.at[i].x)[j]) + high_float((&x.at[i].x)[j]);
  const float mean = warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) / WIDTH;
#pragma unroll
  for (int i = 0; i < STEPS; i++)
    if (i * 256 + lane * 8 < SHARE) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float low = low_float((&x.at[i].x)[j]) - mean, high = high_float((&x.at[i].x)[j]) - mean;
        squares[j] += low * low + high * high;
      }
    }
  const float variance = warp_sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / WIDTH;
  const float inverse = rsqrtf(variance + 1e-5f);
#pragma unroll
  for (int i = 0; i < STEPS; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 p = (&a.at[i].x)[j], q = (&x.at[i].x)[j], g = (&scale.at[i].x)[j], b = (&shift.at[i].x)[j];
      product[j] += low_float(p) * ((low_float(q) - mean) * inverse * low_float(g) + low_float(b)) +
                    high_float(p) * ((high_float(q) - mean) * inverse * high_float(g) + high_float(b));
    }
  return (product[0] + product[1]) + (product[2] + product[3]);
}

// low [B, RANKS] float32 = A x, as far as each token's own rank goes; x [B, stride], scale and shift [WIDTH].
// A warp has one rank and one part of the inputs.
extern "C" __global__ void __launch_bounds__(WARPS * 32) shrink(
    const bf16* x, int stride, const bf16* scale, const bf16* shift, const bf16* a, const i64* ranks, const i64* slots,
    const i64* rows, float* low, int batch) {
  __shared__ float sums[TOKENS][WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % PARTS * SHARE;
  const int rank = blockIdx.x * RANKS_HERE + warp / PARTS;
  const Slots mine(slots, rows, batch);
  const auto load = [](const bf16* from) { return *reinterpret_cast<const uint4*>(from); };
  launch_dependents();
  wait_previous();
  if (!mine.any) return;
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    float sum = 0.f;
    if (mine.of[i] != 0 && rank < ranks[mine.of[i]]) {
      const Values own(a + ((i64)mine.of[i] * RANKS + rank) * WIDTH + part, load);
      const Values in(x + (i64)(mine.first + i) * stride + part, [](const bf16* from) { return load_fresh(from); });
      sum = NORM ? normed_dot(own, in, Values(scale, load), Values(shift, load)) : dot(own, in);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[i][warp] = sum;
  }
  __syncthreads();
  if (threadIdx.x < TOKENS * RANKS_HERE) {
    const int i = threadIdx.x / RANKS_HERE, which = threadIdx.x % RANKS_HERE, at = blockIdx.x * RANKS_HERE + which;
    float total = 0.f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) total += sums[i][which * PARTS + p];
    if (mine.first + i < batch && at < RANKS) low[(i64)(mine.first + i) * RANKS + at] = total;
  }
}
#endif

#ifdef OUTPUTS
static_assert(OUTPUTS % OUTS == 0, "unsupported sizes");

// change [B, OUTPUTS] float32 = B low, zero for tokens without an adapter. A warp has every eighth rank.
extern "C" __global__ void __launch_bounds__(WARPS * 32) expand(
    const float* low, const bf16* b, const i64* ranks, const i64* slots, const i64* rows, float* change, int batch) {
  constexpr int AHEAD = 8;  // loads in flight
  __shared__ float lows[TOKENS][RANKS];
  __shared__ float2 parts[WARPS][TOKENS][OUTS / 2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * OUTS + lane * 2;
  const Slots mine(slots, rows, batch);
  launch_dependents();
  wait_previous();
  for (int at = threadIdx.x; at < TOKENS * RANKS; at += WARPS * 32) {
    const int i = at / RANKS, token = mine.first + i;
    const int slot = token < batch ? (int)slots[rows[token]] : 0;
    const bool counts = slot != 0 && at % RANKS < ranks[slot];
    lows[i][at % RANKS] = counts ? load_fresh_f32(low + (i64)token * RANKS + at % RANKS) : 0.f;
  }
  __syncthreads();
  float2 sum[TOKENS] = {};
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    bool leads = mine.of[i] != 0;
#pragma unroll
    for (int j = 0; j < i; j++) leads &= mine.of[j] != mine.of[i];
    if (!leads) continue;
    const int count = (int)ranks[mine.of[i]];
    const bf16* from = b + (i64)mine.of[i] * RANKS * OUTPUTS + column;
    for (int rank = warp; rank < count; rank += WARPS * AHEAD) {
      u32 pairs[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        const int at = rank + k * WARPS;
        pairs[k] = at < count ? *reinterpret_cast<const u32*>(from + (i64)at * OUTPUTS) : 0;
      }
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        const int at = min(rank + k * WARPS, RANKS - 1);
#pragma unroll
        for (int j = i; j < TOKENS; j++)
          if (mine.of[j] == mine.of[i]) {
            sum[j].x += low_float(pairs[k]) * lows[j][at];
            sum[j].y += high_float(pairs[k]) * lows[j][at];
          }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TOKENS; i++) parts[warp][i][lane] = sum[i];
  __syncthreads();
  if (warp < TOKENS && mine.first + warp < batch) {
    float2 total = {0.f, 0.f};
#pragma unroll
    for (int from = 0; from < WARPS; from++) {
      const float2 part = parts[from][warp][lane];
      total.x += part.x, total.y += part.y;
    }
    *reinterpret_cast<float2*>(change + (i64)(mine.first + warp) * OUTPUTS + column) = total;
  }
}
#endif
