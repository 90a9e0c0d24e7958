// What lies between the products of a text decoder's layer, one pass each, for T tokens of bf16.
//
// qkv [T, HEADS + 2 * KV_HEADS, HEAD]; keys and values [pages, KV_HEADS, PAGE, HEAD]; angles [T, HALF] float32; gains
// [HEAD] of the RMS norms of queries and of keys, if NORMED.
#include "common.cuh"

constexpr int WIDTH = 8;  // values of a 16-byte access
constexpr int THREADS = 256;

__device__ __forceinline__ void after_previous() {
  wait_previous();
}

// Every operation rounds by itself, for the same bits as torch's.
__device__ __forceinline__ float turn(float own, float other, float cos, float sin) {
  return __fadd_rn(__fmul_rn(own, cos), __fmul_rn(other, sin));
}

// Eight pairs: `low` and `high` are their first and second values.
__device__ __forceinline__ void rotate(uint4& low, uint4& high, const float* cosines, const float* sines) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 &a = (&low.x)[j], &b = (&high.x)[j];
    const float c0 = cosines[2 * j], c1 = cosines[2 * j + 1], s0 = sines[2 * j], s1 = sines[2 * j + 1];
    const u32 first = pack(turn(low_float(a), low_float(b), c0, -s0), turn(high_float(a), high_float(b), c1, -s1));
    b = pack(turn(low_float(b), low_float(a), c0, s0), turn(high_float(b), high_float(a), c1, s1));
    a = first;
  }
}

#ifdef HEAD
constexpr int LANES = HEAD / WIDTH, PAIRS = HALF / WIDTH, REST = LANES - 2 * PAIRS;
static_assert(HEAD % WIDTH == 0 && HALF % WIDTH == 0 && REST >= 0, "unsupported sizes");
static_assert(!NORMED || REST == 0 && PAIRS <= 32 && (PAIRS & PAIRS - 1) == 0, "a head's threads are of one warp");

// A head's RMS norm, by its threads: each has eight pairs.
__device__ __forceinline__ void normalise(uint4& low, uint4& high, const uint4* gains, float epsilon) {
  float square = 0.f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 a = (&low.x)[j], b = (&high.x)[j];
    square += low_float(a) * low_float(a) + high_float(a) * high_float(a);
    square += low_float(b) * low_float(b) + high_float(b) * high_float(b);
  }
  const u32 lanes = ~0u >> (32 - PAIRS) << threadIdx.x % 32 / PAIRS * PAIRS;
#pragma unroll
  for (int i = 1; i < PAIRS; i <<= 1) square += __shfl_xor_sync(lanes, square, i);
  const float inverse = rsqrtf(square / HEAD + epsilon);
  const uint4 first = gains[0], second = gains[PAIRS];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 &a = (&low.x)[j], &b = (&high.x)[j];
    const u32 c = (&first.x)[j], d = (&second.x)[j];
    a = pack(low_float(a) * (inverse * low_float(c)), high_float(a) * (inverse * high_float(c)));
    b = pack(low_float(b) * (inverse * low_float(d)), high_float(b) * (inverse * high_float(d)));
  }
}

// A block per token. A thread has eight pairs of a query or key, or eight values that do not turn. Queries and keys
// turn in place; keys and values go to their slots as well.
extern "C" __global__ void __launch_bounds__(THREADS)
    rotate_and_cache(uint4* qkv, const float* cosines, const float* sines, const i64* page, const i64* slot,
                     uint4* keys, uint4* values, const uint4* query_gains, const uint4* key_gains, float epsilon) {
  constexpr int TURNS = (HEADS + KV_HEADS) * PAIRS, STRAIGHT = KV_HEADS * REST, ITEMS = TURNS + STRAIGHT + KV_HEADS * LANES;
  const i64 token = blockIdx.x;
  uint4* const heads = qkv + token * ((HEADS + 2 * KV_HEADS) * LANES);
  after_previous();
  const i64 slots = page[token] * (KV_HEADS * PAGE) + slot[token];
  const auto kept = [&](int head, int lane) { return (slots + head * PAGE) * LANES + lane; };
  for (int item = threadIdx.x; item < ITEMS; item += THREADS) {
    if (item < TURNS) {
      const int head = item / PAIRS, lane = item % PAIRS;
      uint4* const at = heads + head * LANES + lane;
      uint4 low = at[0], high = at[PAIRS];
      if (NORMED) normalise(low, high, (head < HEADS ? query_gains : key_gains) + lane, epsilon);
      rotate(low, high, cosines + token * HALF + lane * WIDTH, sines + token * HALF + lane * WIDTH);
      at[0] = low, at[PAIRS] = high;
      if (head < HEADS) continue;
      keys[kept(head - HEADS, lane)] = low;
      keys[kept(head - HEADS, lane + PAIRS)] = high;
    } else if (item < TURNS + STRAIGHT) {
      const int rest = item - TURNS, head = rest / max(REST, 1), lane = 2 * PAIRS + rest % max(REST, 1);
      keys[kept(head, lane)] = heads[(HEADS + head) * LANES + lane];
    } else {
      const int rest = item - TURNS - STRAIGHT, head = rest / LANES, lane = rest % LANES;
      values[kept(head, lane)] = heads[(HEADS + KV_HEADS + head) * LANES + lane];
    }
  }
}
#endif

// out [T, loads * 8] = silu(first half) * second half of both [T, 2 * loads * 8], rounded once.
extern "C" __global__ void __launch_bounds__(THREADS) gate(const uint4* both, uint4* out, int loads) {
  const int index = blockIdx.x * THREADS + threadIdx.x;
  const i64 row = blockIdx.y;
  after_previous();
  if (index >= loads) return;
  const uint4 g = both[row * 2 * loads + index], u = both[(row * 2 + 1) * loads + index];
  uint4 product;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 a = (&g.x)[j], b = (&u.x)[j];
    (&product.x)[j] = pack(silu(low_float(a)) * low_float(b), silu(high_float(a)) * high_float(b));
  }
  out[row * loads + index] = product;
}
