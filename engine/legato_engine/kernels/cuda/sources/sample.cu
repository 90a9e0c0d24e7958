// The next token of every row: constraint, temperature, top-k, top-p, position-keyed noise.
//
// CLUSTER thread blocks share a row. A thread's values are in shared memory, or unless HELD in `spilled`. Logits are read
// once, and every sum is of integers, so a token depends neither
// on other rows nor on the order of threads.
#include "sample.cuh"

constexpr int THREADS = 1024, SPAN = CLUSTER * THREADS * 4;
constexpr int GROUPS = (VOCAB + SPAN - 1) / SPAN, VALUES = GROUPS * 4;  // a thread's
static_assert(VOCAB % 4 == 0 && VOCAB <= 65536 && VALUES <= 64, "unsupported vocabulary");

constexpr int BURST = 4;                     // groups in flight
constexpr u32 MASKED = 0xff800000u;          // -inf

// A bit for each of a thread's values.
template <bool FEW>
struct MaskOf {
  typedef u32 Type;
};
template <>
struct MaskOf<false> {
  typedef u64 Type;
};
typedef MaskOf<VALUES <= 32>::Type Mask;
__device__ __forceinline__ int lowest(u32 mask) { return __ffs(mask) - 1; }
__device__ __forceinline__ int lowest(u64 mask) { return __ffsll(mask) - 1; }
static_assert(BINS == THREADS, "a thread has a bin");
struct Shared {
  Bin bins[2][BINS];
  uint4 records[2];  // a block's best, and its flag
  Best warps[THREADS / 32];
  Share sums[THREADS / 32];
  u32 rough[THREADS / 32];
  Choice choice;
#if HELD
  float values[VALUES][THREADS];  // each thread's own: more than registers hold
#else
  float (*values)[THREADS];
#endif
};
static_assert(sizeof(Shared) <= SHARED, "the host allots less");

__device__ __forceinline__ void sync_row() {
  if (CLUSTER == 1)
    __syncthreads();
  else
    cluster_sync();
}

__device__ __forceinline__ uint4 of_block(const void* shared, int rank) {
  if (CLUSTER == 1) return *static_cast<const uint4*>(shared);
  const float4 v = load_peer(shared, rank);
  return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}

__device__ __forceinline__ int token_id(int i, int rank) {
  return ((i / 4 * CLUSTER + rank) * THREADS + (int)threadIdx.x) * 4 + i % 4;
}

// The row's best and whether any flag is set, in every thread. A `slot` serves once.
__device__ __forceinline__ Best cluster_best(Shared& shared, int slot, Best mine, bool& flag) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  mine = warp_best(mine);
  if (lane == 0) shared.warps[warp] = mine;
  flag = __syncthreads_or(flag);
  if (warp == 0) {
    mine = warp_best(shared.warps[lane]);
    if (lane == 0) shared.records[slot] = make_uint4(mine.first, mine.second, mine.id, flag);
    __syncwarp();
  }
  sync_row();
  Best best = {0u, 0u, ~0u};
#pragma unroll
  for (int rank = 0; rank < CLUSTER; rank++) {
    const uint4 v = of_block(&shared.records[slot], rank);
    const Best other = {v.x, v.y, v.z};
    const bool more = other.second > best.second || (other.second == best.second && other.id < best.id);
    if (other.first > best.first || (other.first == best.first && more)) best = other;
    flag |= v.w != 0;
  }
  return best;
}

// Over the cluster, added to all bins before it; `total` of all.
__device__ __forceinline__ Share prefix(Shared& shared, const Share& mine, Share& total) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Share through = warp_prefix(mine);
  if (lane == 31) shared.sums[warp] = through;
  __syncthreads();
  const Share sums = warp_prefix(shared.sums[lane]);
  total.mass = __shfl_sync(~0u, sums.mass, 31);
  total.count = __shfl_sync(~0u, sums.count, 31);
  const u64 mass = __shfl_sync(~0u, sums.mass, max(warp - 1, 0));
  const u32 count = __shfl_sync(~0u, sums.count, max(warp - 1, 0));
  if (warp > 0) through.mass += mass, through.count += count;
  return through;
}

// A token stays while the mass before it is at most top_p and the tokens before it are fewer than top_k; both only
// grow, so one last token is looked for, digit by digit. Invariant: the first candidate stays, and what is no
// candidate is decided. `bins[0]` is zero.
__device__ __forceinline__ Mask select(Shared& shared, Mask candidates, float peak, float top_p, i64 top_k, int rank) {
  Bounds most = {0, count_limit(top_k)};
  Choice before = {};
  Mask kept = 0;
  for (int pass = 0; pass < PASSES; pass++) {
    Bin* bins = shared.bins[pass % 2];
    for (Mask left = candidates; left; left &= left - 1) {
      const int i = lowest(left);
      const float x = shared.values[i][threadIdx.x];
      add(bins[digit_of(pass, x, peak, token_id(i, rank))], mass_of(x, peak));
    }
    __syncwarp();
    sync_row();
    shared.bins[(pass + 1) % 2][threadIdx.x] = Bin{};  // peers read it before they came here
    Share mine = {}, total = {};
#pragma unroll
    for (int peer = 0; peer < CLUSTER; peer++) {
      const uint4 v = of_block(&bins[threadIdx.x], peer);
      mine.mass += mass_in(v.x, v.y, v.z);
      mine.count += v.w;
    }
    const Share through = prefix(shared, mine, total);
    if (pass == 0) most.mass = mass_limit(top_p, total);
    Choice last;
    if (has_last(mine, through, before, total, most, (int)threadIdx.x, last)) shared.choice = last;
    __syncthreads();
    const Choice choice = shared.choice;
    for (Mask left = candidates; left; left &= left - 1) {
      const int i = lowest(left);
      const int digit = digit_of(pass, shared.values[i][threadIdx.x], peak, token_id(i, rank));
      if (digit < choice.digit) kept |= Mask(1) << i;
      if (digit != choice.digit) candidates &= ~(Mask(1) << i);
    }
    if (choice.settled) break;
    before = choice;
  }
  return kept | candidates;
}

// Only tokens whose rough score is near the block's highest are scored exactly, because double logarithms are
// expensive.
__device__ __forceinline__ Best draw(Shared& shared, Mask kept, float peak, u64 key, int rank) {
  float rough = -INFINITY;
  for (Mask left = kept; left; left &= left - 1) {
    const int i = lowest(left);
    const float x = shared.values[i][threadIdx.x];
    rough = fmaxf(rough, x - peak + rough_noise(mix(key + (u64)token_id(i, rank)) >> 11));
  }
  __syncwarp();
  const u32 highest = __reduce_max_sync(~0u, to_key(rough));
  if (threadIdx.x % 32 == 0) shared.rough[threadIdx.x / 32] = highest;
  __syncthreads();
  const float near = from_key(__reduce_max_sync(~0u, shared.rough[threadIdx.x % 32])) - NOISE_SLACK;
  Best best = {0u, 0u, ~0u};
  if (!(rough >= near)) return best;
  for (Mask left = kept; left; left &= left - 1) {
    const int i = lowest(left), id = token_id(i, rank);
    const float x = shared.values[i][threadIdx.x];
    const u64 bits = mix(key + (u64)id) >> 11;
    if (!(x - peak + rough_noise(bits) >= near)) continue;
    const u32 score = to_key(x - peak + exact_noise(bits)), value = to_key(x);
    if (score > best.first || (score == best.first && value > best.second)) best = {score, value, (u32)id};
  }
  return best;
}

// `constraint` is by token, or by entry[token] with an `entry`. row_token [R] and tokens [B] are 0 and -1 where a logit is not finite, or none is left once divided by the
// temperature. The state's `scratch` row gets 0.
extern "C" __global__ void __launch_bounds__(THREADS) sample(
    const float* logits, const float* constraints, const i64* constraint, const i64* entry, const i64* rows,
    const i64* position,
    const float* row_temperature, const float* row_top_p, const i64* row_top_k, const i64* row_seed, i64* row_token,
    i64* tokens, float* spilled, int scratch) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const int batch = blockIdx.x / CLUSTER, rank = CLUSTER == 1 ? 0 : cluster_rank();
  const bool writes = rank == 0 && threadIdx.x == 0;
  launch_dependents();
  shared.bins[0][threadIdx.x] = Bin{};
#if !HELD
  shared.values = reinterpret_cast<float(*)[THREADS]>(spilled + (i64)batch * (VALUES * THREADS));  // the same by all threads
#endif
  wait_previous();
  const i64 row = load_fresh_i64(rows + batch);
  if (row == scratch) {
    if (writes) row_token[row] = tokens[batch] = 0;
    return;
  }
  const float* allowed = constraints + load_fresh_i64(constraint + (entry ? load_fresh_i64(entry + batch) : batch)) * VOCAB;
  logits += (i64)batch * VOCAB;
  const float temperature = load_fresh_f32(row_temperature + row);
  const bool greedy = temperature <= GREEDY_TEMPERATURE;
  u32 magnitude = 0;
  Best best = {0u, 0u, ~0u};
#pragma unroll
  for (int begin = 0; begin < GROUPS; begin += BURST) {
    uint4 raw[BURST], mask[BURST];
#pragma unroll
    for (int g = begin; g < begin + BURST && g < GROUPS; g++) {
      const int first = token_id(g * 4, rank);
      const bool inside = (g + 1) * SPAN <= VOCAB || first < VOCAB;
      raw[g - begin] = inside ? load_fresh(logits + first) : uint4{};
      mask[g - begin] = inside ? load_fresh(allowed + first) : make_uint4(MASKED, MASKED, MASKED, MASKED);
    }
#pragma unroll
    for (int i = begin * 4; i < (begin + BURST) * 4 && i < VALUES; i++) {
      const u32 bits = (&raw[i / 4 - begin].x)[i % 4];
      const float x = __uint_as_float(bits) + __uint_as_float((&mask[i / 4 - begin].x)[i % 4]);
      const u32 key = to_key(x);
      magnitude = max(magnitude, bits & 0x7fffffffu);
      if (key > best.first) best = {key, 0u, (u32)token_id(i, rank)};
      if (!greedy) shared.values[i][threadIdx.x] = x;
    }
  }
  bool broken = magnitude >= 0x7f800000u, unused = false;
  best = cluster_best(shared, 0, best, broken);
  float peak = from_key(best.first);
  if (!broken && !greedy && peak > -INFINITY) {
    peak = __fdiv_rn(peak, temperature);
    Mask kept = 0;
#pragma unroll 4
    for (int i = 0; i < VALUES; i++) {
      const float x = __fdiv_rn(shared.values[i][threadIdx.x], temperature) + 0.f;  // a zero has one sign only
      shared.values[i][threadIdx.x] = x;
      if (peak - x < REACH) kept |= Mask(1) << i;
    }
    const float top_p = load_fresh_f32(row_top_p + row);
    const i64 top_k = load_fresh_i64(row_top_k + row);
    if (top_p < 1.f || top_k > 0) kept = select(shared, kept, peak, top_p, top_k, rank);
    const u64 key = noise_key(load_fresh_i64(row_seed + row), load_fresh_i64(position + batch));
    best = cluster_best(shared, 1, draw(shared, kept, peak, key, rank), unused);
  }
  broken |= best.id >= VOCAB;
  if (writes) {
    row_token[row] = broken ? 0 : best.id;
    tokens[batch] = broken ? -1 : (i64)best.id;
  }
  sync_row();  // no block exits while a peer reads its memory
}
