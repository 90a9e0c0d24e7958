// Low-rank changes of a layer, as in low_rank_adapters.cu, on tensor cores: a thread block has up to 8 tokens of one slot.
//
// Tokens are columns of the products, which never mix, and sums run in an order fixed by the sizes.
#include "low_rank.cuh"

constexpr int WARPS = 8, TOKENS = 8;
constexpr int ROOM = (RANKS + 15) / 16 * 16;

// The lowest of the set bits after `before` others, at most 7; -1 if there are no more.
__device__ __forceinline__ int bit_after(u32 bits, int before) {
#pragma unroll
  for (int i = 0; i < TOKENS - 1; i++)
    if (i < before) bits &= bits - 1;
  return __ffs(bits) - 1;
}

// Of the batch's tiles that of a number, or one without tokens. Whole warps make it; a lane has the slot of its token.
struct Tile {
  int slot = 0, rank = 0;
  u32 tokens = 0;
  __device__ __forceinline__ Tile(int own_slot, const i64* ranks, int number) {
    u32 left = __ballot_sync(~0u, own_slot != 0);
    while (left) {
      const int its = __shfl_sync(~0u, own_slot, __ffs(left) - 1);
      const u32 same = __ballot_sync(~0u, own_slot == its) & left;
      u32 rest = same;
#pragma unroll
      for (int i = 0; i < TOKENS; i++) rest &= rest - 1;
      left ^= same ^ rest;
      if (number-- > 0) continue;
      slot = its, rank = (int)ranks[its], tokens = same ^ rest;
      return;
    }
  }
};

#ifdef WIDTH
constexpr int RUNS = WIDTH / 32, AHEAD = NORM ? 4 : 8;  // a warp's runs of 32 inputs that are being read
static_assert(WIDTH % 32 == 0, "unsupported sizes");

// Mean and inverse deviation of a token, by a warp.
__device__ __forceinline__ float2 moments_of(const bf16* x) {
  const auto over = [&](auto value) {
    float sum = 0.f;
    for (int at = threadIdx.x % 32 * 8; at < WIDTH; at += 256) {
      const uint4 v = load_fresh(x + at);
#pragma unroll
      for (int j = 0; j < 4; j++) sum += value(low_float((&v.x)[j])) + value(high_float((&v.x)[j]));
    }
    return warp_sum(sum) / WIDTH;
  };
  const float mean = over([](float value) { return value; });
  const float variance = over([&](float value) { return (value - mean) * (value - mean); });
  return float2{mean, rsqrtf(variance + 1e-5f)};
}

__device__ __forceinline__ uint4 normed(uint4 x, float2 moment, const bf16* scale, const bf16* shift) {
  const uint4 scales = load_constant(scale), shifts = load_constant(shift);
  const auto one = [&](float value, float by, float more) { return (value - moment.x) * moment.y * by + more; };
  uint4 out;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 v = (&x.x)[j], s = (&scales.x)[j], c = (&shifts.x)[j];
    (&out.x)[j] = pack(one(low_float(v), low_float(s), low_float(c)), one(high_float(v), high_float(s), high_float(c)));
  }
  return out;
}

// low [B, ROOM] float32 = A x, up to each token's own rank rounded up to 16. A thread block has 16 ranks, its warps every
// WARPS-th run of inputs. Adapters do not change while kernels run, so the first of A is read before the preceding kernel
// has ended.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) shrink(
    const bf16* x, int stride, const bf16* scale, const bf16* shift, const bf16* a, const i64* ranks, const i64* slots,
    const i64* rows, float* low, int batch) {
  __shared__ float4 sums[WARPS][32];
  __shared__ float2 moments[TOKENS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, rank = blockIdx.x * 16 + g;
  const Tile tile(slot_of(slots, rows, lane, batch), ranks, blockIdx.y);
  launch_dependents();
  if (blockIdx.x * 16 >= tile.rank) return wait_previous();
  const int token = bit_after(tile.tokens, g);
  const bf16* own = a + ((i64)tile.slot * RANKS + rank) * WIDTH;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int first = warp; first == warp || first < RUNS; first += WARPS * AHEAD) {
    uint4 upper[AHEAD], lower[AHEAD], in[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int run = first + i * WARPS, at = run * 32 + t * 8;
      upper[i] = run < RUNS && rank < tile.rank ? load_constant(own + at) : uint4{0, 0, 0, 0};
      lower[i] = run < RUNS && rank + 8 < tile.rank ? load_constant(own + 8 * WIDTH + at) : uint4{0, 0, 0, 0};
    }
    if (first == warp) {
      wait_previous();
      if (NORM) {
        const int measured = bit_after(tile.tokens, warp);
        if (measured >= 0) moments[warp] = moments_of(x + (i64)measured * stride);
        __syncthreads();
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int run = first + i * WARPS, at = run * 32 + t * 8;
      in[i] = uint4{0, 0, 0, 0};
      if (run >= RUNS || token < 0) continue;
      in[i] = load_fresh(x + (i64)token * stride + at);
      if (NORM) in[i] = normed(in[i], moments[g], scale + at, shift + at);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      mma(sum, upper[i].x, lower[i].x, upper[i].y, lower[i].y, in[i].x, in[i].y);
      mma(sum, upper[i].z, lower[i].z, upper[i].w, lower[i].w, in[i].z, in[i].w);
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int from = 1; from < WARPS; from++) add(sum, sums[from][lane]);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int to = bit_after(tile.tokens, 2 * t + j);
    if (to < 0) continue;
    low[(i64)to * ROOM + rank] = j ? sum.y : sum.x;
    low[(i64)to * ROOM + rank + 8] = j ? sum.w : sum.z;
  }
}
#endif

#ifdef OUTPUTS
constexpr int OWN = (ROOM / 16 + WARPS - 1) / WARPS;  // a warp has every WARPS-th 16 ranks
static_assert(OUTS % 32 == 0 && OUTPUTS % OUTS == 0, "unsupported sizes");

// change [B, OUTPUTS] float32 = B low, zero without an adapter. A thread block has OUTS outputs.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) expand(
    const float* low, const bf16* b, const i64* ranks, const i64* slots, const i64* rows, float* change, int batch) {
  __shared__ float parts[WARPS][TOKENS][OUTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, column = blockIdx.x * OUTS;
  const int slot = slot_of(slots, rows, lane, batch);
  const Tile tile(slot, ranks, blockIdx.y);
  launch_dependents();
  // A lane's 16 bytes are 8 outputs of ranks g and g + 8 of each 16.
  uint4 words[OWN][OUTS / 32][2];
#pragma unroll
  for (int i = 0; i < OWN; i++)
#pragma unroll
    for (int part = 0; part < OUTS / 32; part++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int rank = (i * WARPS + warp) * 16 + half * 8 + g;
        const bf16* from = b + ((i64)tile.slot * RANKS + rank) * OUTPUTS + column + part * 32 + t * 8;
        words[i][part][half] = rank < tile.rank ? load_constant(from) : uint4{0, 0, 0, 0};
      }
  wait_previous();
  if (blockIdx.y == 0)
    for (u32 left = __ballot_sync(~0u, slot == 0 && lane < batch); left; left &= left - 1)
      if (threadIdx.x < OUTS) change[(i64)(__ffs(left) - 1) * OUTPUTS + column + threadIdx.x] = 0.f;
  if (!tile.tokens) return;
  const int token = bit_after(tile.tokens, g);
  float4 sum[OUTS / 16] = {};
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int rank = (i * WARPS + warp) * 16;
    if (rank >= tile.rank) continue;
    float2 lows[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (token >= 0)
        lows[half] = load_fresh_float2(reinterpret_cast<const float2*>(low + (i64)token * ROOM + rank + half * 8 + t * 2));
    const u32 in[2] = {pack(lows[0].x, lows[0].y), pack(lows[1].x, lows[1].y)};
#pragma unroll
    for (int part = 0; part < OUTS / 32; part++)
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        const uint4 &first = words[i][part][0], &second = words[i][part][1];
        mma(sum[part * 2 + pair], transposed((&first.x)[pair * 2]), transposed((&first.x)[pair * 2 + 1]),
            transposed((&second.x)[pair * 2]), transposed((&second.x)[pair * 2 + 1]), in[0], in[1]);
      }
  }
  // Rows g and g + 8 of a product are two outputs of 8 that lane g / 2 of four has read.
#pragma unroll
  for (int i = 0; i < OUTS / 16; i++) {
    const int out = i / 2 * 32 + g / 2 * 8 + i % 2 * 4 + g % 2;
    parts[warp][2 * t][out] = sum[i].x, parts[warp][2 * t + 1][out] = sum[i].y;
    parts[warp][2 * t][out + 2] = sum[i].z, parts[warp][2 * t + 1][out + 2] = sum[i].w;
  }
  __syncthreads();
  for (int at = threadIdx.x; at < TOKENS * OUTS; at += WARPS * 32) {
    const int to = bit_after(tile.tokens, at / OUTS);
    if (to < 0) continue;
    float total = 0.f;
#pragma unroll
    for (int from = 0; from < WARPS; from++) total += parts[from][at / OUTS][at % OUTS];
    change[(i64)to * OUTPUTS + column + at % OUTS] = total;
  }
}
#endif
