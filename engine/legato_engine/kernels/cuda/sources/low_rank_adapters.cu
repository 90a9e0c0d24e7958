// Low-rank changes of a layer, each token's by its own adapter: B (A x).
//
// NORM: A reads the layer norm of x. Slot s holds bf16 A [RANKS, WIDTH], cut into PARTS, and B [RANKS, OUTPUTS], of
// which the first `ranks[s]` count; slot 0 is none. Token b reads slot `slots[rows[b]]`. Sums run in an order fixed
// by the sizes.
#include "low_rank.cuh"

constexpr int WARPS = 8;
constexpr int OUTS = 64;  // outputs of a thread block of `expand`

#ifdef WIDTH
constexpr int SHARE = WIDTH / PARTS, STEPS = (SHARE + 255) / 256;
constexpr int PAIRS = WARPS / PARTS, RANKS_HERE = PAIRS / TOKENS;  // of a rank and a token
static_assert(WIDTH % (8 * PARTS) == 0 && PAIRS % TOKENS == 0 && (PARTS == 1 || !NORM), "unsupported sizes");

using Values = LaneValues<SHARE>;

__device__ __forceinline__ float normed_dot(const Values& a, const Values& x, const bf16* scale, const bf16* shift) {
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
  for (int i = 0; i < STEPS; i++) {
    const int column = i * 256 + lane * 8;
    if (column >= SHARE) continue;
    const uint4 scales = load_constant(scale + column), shifts = load_constant(shift + column);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 p = (&a.at[i].x)[j], q = (&x.at[i].x)[j], g = (&scales.x)[j], b = (&shifts.x)[j];
      product[j] += low_float(p) * ((low_float(q) - mean) * inverse * low_float(g) + low_float(b)) +
                    high_float(p) * ((high_float(q) - mean) * inverse * high_float(g) + high_float(b));
    }
  }
  return (product[0] + product[1]) + (product[2] + product[3]);
}

// low [B, RANKS] float32 = A x, up to each token's own rank. A warp has one rank, one part of the inputs, and `turns`
// tokens; while their slot stays, it keeps A's part. Adapters do not change while kernels run, so A is read before
// the preceding kernel has ended.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) shrink(
    const bf16* x, int stride, const bf16* scale, const bf16* shift, const bf16* a, const i64* ranks, const i64* slots,
    const i64* rows, float* low, int batch, int turns) {
  __shared__ float sums[2][WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = warp / PARTS, part = warp % PARTS * SHARE;
  const int rank = blockIdx.x * RANKS_HERE + pair / TOKENS, first = blockIdx.y * turns * TOKENS + pair % TOKENS;
  Values own, in;
  int held = 0;
  auto hold = [&](int slot) {
    if (slot != held) own.load(a + ((i64)slot * RANKS + rank) * WIDTH + part, load_constant);
    held = slot;
  };
  auto wanted = [&](int token) {
    const int slot = slot_of(slots, rows, token, batch);
    return slot != 0 && rank < ranks[slot] ? slot : 0;
  };
  int slot = wanted(first);
  launch_dependents();
  if (slot) hold(slot);
  wait_previous();
  for (int turn = 0; turn < turns; turn++) {
    const int token = first + turn * TOKENS, next = turn + 1 < turns ? wanted(token + TOKENS) : 0;
    float sum = 0.f;
    if (slot) {
      hold(slot);
      in.load(x + (i64)token * stride + part, [](const bf16* from) { return load_fresh(from); });
      sum = warp_sum(NORM ? normed_dot(own, in, scale, shift) : dot(own, in));
    }
    if (lane == 0) sums[turn % 2][warp] = sum;
    if (PARTS > 1) __syncthreads();
    if (slot && lane == 0 && warp % PARTS == 0) {
      float total = 0.f;
#pragma unroll
      for (int p = 0; p < PARTS; p++) total += sums[turn % 2][warp + p];
      low[(i64)token * RANKS + rank] = total;
    }
    slot = next;
  }
}
#endif

#ifdef OUTPUTS
static_assert(OUTPUTS % OUTS == 0, "unsupported sizes");

// change [B, OUTPUTS] float32 = B low, zero without an adapter. A block's tokens share what they read of one slot.
extern "C" __global__ void __launch_bounds__(WARPS * 32) expand(
    const float* low, const bf16* b, const i64* ranks, const i64* slots, const i64* rows, float* change, int batch) {
  constexpr int STEP = 4 * WARPS, AHEAD = TOKENS == 1 ? 8 : 2;  // loads in flight, of each slot
  __shared__ float lows[TOKENS][RANKS];
  __shared__ float parts[WARPS][TOKENS][OUTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sub = warp * 4 + lane / 8, own = lane % 8 * 8;
  const int column = blockIdx.x * OUTS + own, first = blockIdx.y * TOKENS;
  int slot[TOKENS], counts[TOKENS], most = 0;  // ranks of a slot that no token before it has
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    slot[i] = slot_of(slots, rows, first + i, batch);
    bool leads = slot[i] != 0;
#pragma unroll
    for (int j = 0; j < i; j++) leads &= slot[j] != slot[i];
    counts[i] = leads ? (int)ranks[slot[i]] : 0;
    most = max(most, counts[i]);
  }
  uint4 pairs[TOKENS][AHEAD];
  auto load = [&](int rank) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        const i64 at = (i64)slot[i] * RANKS + rank + k * STEP;
        pairs[i][k] = rank + k * STEP < counts[i] ? *reinterpret_cast<const uint4*>(b + at * OUTPUTS + column)
                                                  : uint4{0, 0, 0, 0};
      }
  };
  launch_dependents();
  load(sub);
  wait_previous();
  for (int at = threadIdx.x; at < TOKENS * RANKS; at += WARPS * 32) {
    const int token = first + at / RANKS, its = slot_of(slots, rows, token, batch);
    const bool here = its != 0 && at % RANKS < ranks[its];
    lows[at / RANKS][at % RANKS] = here ? load_fresh_f32(low + (i64)token * RANKS + at % RANKS) : 0.f;
  }
  __syncthreads();
  float sum[TOKENS][8] = {};
  for (int rank = 0; rank < most; rank += STEP * AHEAD) {
    if (rank) load(rank + sub);
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      if (rank >= counts[i]) continue;
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        const int at = min(rank + sub + k * STEP, RANKS - 1);
#pragma unroll
        for (int j = i; j < TOKENS; j++)
          if (slot[j] == slot[i]) {
            const float factor = lows[j][at];
#pragma unroll
            for (int e = 0; e < 4; e++) {
              sum[j][2 * e] += low_float((&pairs[i][k].x)[e]) * factor;
              sum[j][2 * e + 1] += high_float((&pairs[i][k].x)[e]) * factor;
            }
          }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < TOKENS; i++)
#pragma unroll
    for (int e = 0; e < 8; e++) {
      sum[i][e] += __shfl_xor_sync(~0u, sum[i][e], 8);
      sum[i][e] += __shfl_xor_sync(~0u, sum[i][e], 16);
      if (lane < 8) parts[warp][i][own + e] = sum[i][e];
    }
  __syncthreads();
  for (int at = threadIdx.x; at < TOKENS * OUTS; at += WARPS * 32) {
    const int token = first + at / OUTS;
    float total = 0.f;
#pragma unroll
    for (int from = 0; from < WARPS; from++) total += parts[from][at / OUTS][at % OUTS];
    if (token < batch) change[(i64)token * OUTPUTS + blockIdx.x * OUTS + at % OUTS] = total;
  }
}
#endif
