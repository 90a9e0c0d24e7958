// Rotation, page writes, sums and page copies, each in one pass. qkv [T, 3, HEADS, 64]; keys and values [pages,
// HEADS, PAGE, 64]; angles [positions, 16] float32.
#include "kv_element.cuh"

constexpr int HEAD = 64, HALF = 16;  // dimensions, and rotated pairs
constexpr int WIDTH = 8;             // values of a 16-byte access
constexpr int LANES = HEAD / WIDTH;  // threads of a head
constexpr int TURNED = 2 * HALF / WIDTH, GAP = HALF / WIDTH;  // those that turn; between a pair
constexpr int THREADS = 256;

__device__ __forceinline__ void after_previous() {
  wait_previous();
}

// The second of a pair adds where the first subtracts.
struct Angles {
  float4 cos[2], sin[2];

  __device__ __forceinline__ void load(const float* cosines, const float* sines, int position, int lane) {
    const int at = position * HALF + lane % GAP * WIDTH;
    const float sign = lane < GAP ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      cos[i] = reinterpret_cast<const float4*>(cosines + at)[i];
      sin[i] = reinterpret_cast<const float4*>(sines + at)[i];
      sin[i] = float4{sin[i].x * sign, sin[i].y * sign, sin[i].z * sign, sin[i].w * sign};
    }
  }
};

// Every operation rounds by itself, for the same bits as torch's.
__device__ __forceinline__ float turn(float own, float other, float cos, float sin) {
  return __fadd_rn(__fmul_rn(own, cos), __fmul_rn(other, sin));
}

// Another thread of the head holds the partners; whole warps come here.
__device__ __forceinline__ uint4 turned(const uint4& own, const Angles& angles) {
  uint4 out;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 a = (&own.x)[j], b = __shfl_xor_sync(~0u, a, GAP);
    const float* cos = &angles.cos[j / 2].x + j % 2 * 2;
    const float* sin = &angles.sin[j / 2].x + j % 2 * 2;
    (&out.x)[j] = pack(turn(low_float(a), low_float(b), cos[0], sin[0]),
                       turn(high_float(a), high_float(b), cos[1], sin[1]));
  }
  return out;
}

#if KV_BYTES == 1
typedef uint2 Kept;  // eight elements

// Rounds in place, and returns the stored form.
__device__ __forceinline__ Kept kept(uint4& v, float scale) {
  Kept out = {0, 0};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const Element low = to_element(low_float((&v.x)[j]), scale), high = to_element(high_float((&v.x)[j]), scale);
    (&out.x)[j / 2] |= ((u32)low | (u32)high << 8) << j % 2 * 16;
    (&v.x)[j] = pack(from_element(low, scale), from_element(high, scale));
  }
  return out;
}
#else
typedef uint4 Kept;
__device__ __forceinline__ Kept kept(uint4& v, float) { return v; }
#endif

// Token t of `count` has position start + t; with a `place` start and the number of tokens, up to `count`, are there,
// and nothing since the launches before this graph has written them. Each sequence is a row of blocks, its pages `apart`
// from the preceding one's. e4m3 is in units of `scales`, and qkv then holds what is read back. A thread has 16 bytes of a head's query,
// key and value; at four blocks per multiprocessor its registers hold all three loads in flight.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    rotate_and_cache(bf16* qkv, const float* cosines, const float* sines, const i64* pages, Kept* keys, Kept* values,
                     const float* scales, const i64* place, int start, int count, int apart) {
  const int index = blockIdx.x * THREADS + threadIdx.x;
  const int lane = index % LANES, head = index / LANES % HEADS, token = index / (LANES * HEADS);
  const int position = (place ? (int)place[0] : start) + token;
  const bool real = token < count && (!place || token < place[1]), turns = real && lane < TURNED;
  Angles angles = {};
  if (turns) angles.load(cosines, sines, position, lane);
  after_previous();
  const i64 row = (i64)blockIdx.y * count + token;
  uint4* const query = reinterpret_cast<uint4*>(qkv + row * (3 * HEADS * HEAD) + head * HEAD) + lane;
  uint4* const key = query + HEADS * LANES;
  uint4 q = {}, k = {}, v = {};
  i64 page = 0;
  if (turns) q = load_fresh(query);
  if (real) {
    k = load_fresh(key);
    v = load_fresh(key + HEADS * LANES);
    page = load_fresh_i64(pages + (i64)blockIdx.y * apart + position / PAGE);
  }
  const uint4 turned_q = turned(q, angles), turned_k = turned(k, angles);
  constexpr bool narrow = KV_BYTES == 1;
  if (turns) {
    *query = turned_q;
    k = turned_k;
  }
  if (real) {
    const i64 at = ((page * HEADS + head) * PAGE + position % PAGE) * LANES + lane;
    keys[at] = kept(k, narrow ? scales[0] : 1.f);
    values[at] = kept(v, narrow ? scales[1] : 1.f);
    if (turns || narrow) *key = k;
    if (narrow) key[HEADS * LANES] = v;
  }
}

// `loads` times eight values, rounded once.
extern "C" __global__ void __launch_bounds__(THREADS)
    add3(const uint4* x, const uint4* y, const uint4* z, uint4* out, int loads) {
  const int index = blockIdx.x * THREADS + threadIdx.x;
  after_previous();
  if (index >= loads) return;
  const uint4 a = x[index], b = y[index], c = z[index];
  uint4 sum;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 i = (&a.x)[j], k = (&b.x)[j], l = (&c.x)[j];
    (&sum.x)[j] = pack(low_float(i) + low_float(k) + low_float(l), high_float(i) + high_float(k) + high_float(l));
  }
  out[index] = sum;
}

// Of keys and values [layers, num_pages, page_loads], by `pairs` of source and destination.
extern "C" __global__ void __launch_bounds__(THREADS)
    copy_pages(uint4* keys, uint4* values, const i64* pairs, int num_pages, int page_loads) {
  const int index = blockIdx.x * THREADS + threadIdx.x;
  uint4* const cache = (blockIdx.z % 2 ? values : keys) + (i64)blockIdx.y * num_pages * page_loads;
  const i64* const pair = pairs + blockIdx.z / 2 * 2;
  after_previous();
  const i64 source = load_fresh_i64(pair), destination = load_fresh_i64(pair + 1);
  if (index >= page_loads || source == destination) return;
  cache[destination * page_loads + index] = load_fresh(cache + source * page_loads + index);
}
