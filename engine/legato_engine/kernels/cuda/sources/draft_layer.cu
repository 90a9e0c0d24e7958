// One token of a one-layer draft, which reads keys and values that the model has cached.
//
// ANGLES are rotated pairs of a head of 64. R rows of the state. A warp has one output and loads its weights before
// it waits for the preceding kernel; ROWS rows share them.
#include "common.cuh"

constexpr int ROWS = 4, WARPS = 8, HEAD = 64;
constexpr float EPSILON = 1e-5f;

// COUNT weights of an output, over a warp's lanes.
template <int COUNT>
struct Weights {
  static constexpr int VECTORS = COUNT / 8, EACH = (VECTORS + 31) / 32;
  uint4 held[EACH];

  __device__ __forceinline__ void load(const bf16* row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      held[i] = lane + 32 * i < VECTORS ? __ldg((const uint4*)row + lane + 32 * i) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ float dot(const float* values) const {
    const int lane = threadIdx.x % 32;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (lane + 32 * i >= VECTORS) break;
      const float4* eight = (const float4*)values + 2 * (lane + 32 * i);
      const float4 a = eight[0], b = eight[1];
      const uint4 w = held[i];
      sum += low_float(w.x) * a.x + high_float(w.x) * a.y + low_float(w.y) * a.z + high_float(w.y) * a.w;
      sum += low_float(w.z) * b.x + high_float(w.z) * b.y + low_float(w.w) * b.z + high_float(w.w) * b.w;
    }
    return warp_sum(sum);
  }
};

// Value `lane + 32 i` at index i.
struct Row {
  static constexpr int EACH = DIM / 32;
  float values[EACH];

  __device__ __forceinline__ void load(const float* row) {
#pragma unroll
    for (int i = 0; i < EACH; i++) values[i] = load_fresh_f32(row + threadIdx.x % 32 + 32 * i);
  }
  __device__ __forceinline__ void load(const bf16* row) {
#pragma unroll
    for (int i = 0; i < EACH; i++) values[i] = to_float(row[threadIdx.x % 32 + 32 * i]);
  }
  __device__ __forceinline__ void store(float* row) const {
#pragma unroll
    for (int i = 0; i < EACH; i++) row[threadIdx.x % 32 + 32 * i] = values[i];
  }
  __device__ __forceinline__ void normalise(const bf16* weight, const bf16* bias) {
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += values[i];
    const float mean = warp_sum(sum) / DIM;
#pragma unroll
    for (int i = 0; i < EACH; i++) squares += (values[i] - mean) * (values[i] - mean);
    const float scale = rsqrtf(warp_sum(squares) / DIM + EPSILON);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int place = threadIdx.x % 32 + 32 * i;
      values[i] = (values[i] - mean) * scale * to_float(weight[place]) + to_float(bias[place]);
    }
  }
};

// pre [R, DIM]: the map of both norms, of `stream` and of `said`'s embeddings. The first token takes `hidden` and
// `history` [R, context] at `newest` instead, and writes `stream`.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    draft_join(const bf16* hidden, const i64* history, const i64* newest, const i64* said, const bf16* words,
               const bf16* state_norm, const bf16* state_shift, const bf16* word_norm, const bf16* word_shift,
               const bf16* weights, const bf16* bias, float* stream, float* pre, int rows, int context, int first) {
  __shared__ __align__(16) float joined[ROWS][2 * DIM];
  const int warp = threadIdx.x / 32, output = blockIdx.x * WARPS + warp, row = blockIdx.y * ROWS + warp / 2;
  launch_dependents();
  Weights<2 * DIM> held;
  held.load(weights + (i64)output * 2 * DIM);
  wait_previous();
  if (row < rows) {
    Row part;
    if (warp % 2) {
      const i64 token = first ? max(history[(i64)row * context + newest[row]], 0ll) : load_fresh_i64(said + row);
      part.load(words + token * DIM);
      part.normalise(word_norm, word_shift);
    } else {
      if (first) {
        part.load(hidden + (i64)row * DIM);
        if (blockIdx.x == 0) part.store(stream + (i64)row * DIM);
      } else {
        part.load(stream + (i64)row * DIM);
      }
      part.normalise(state_norm, state_shift);
    }
    part.store(joined[warp / 2] + warp % 2 * DIM);
  }
  __syncthreads();
  for (int i = 0; i < ROWS && blockIdx.y * ROWS + i < rows; i++) {
    const float sum = held.dot(joined[i]);
    if (threadIdx.x % 32 == 0) pre[(i64)(blockIdx.y * ROWS + i) * DIM + output] = sum + to_float(bias[output]);
  }
}

// queries are not rotated.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    draft_in(const float* pre, const bf16* norm, const bf16* shift, const bf16* query, const bf16* query_bias,
             const bf16* fc1, const bf16* fc1_bias, float* queries, float* inner, int rows) {
  __shared__ __align__(16) float joined[ROWS][DIM];
  const int warp = threadIdx.x / 32, output = blockIdx.x * WARPS + warp, row = blockIdx.y * ROWS + warp;
  const bool is_query = output < DIM;
  launch_dependents();
  Weights<DIM> held;
  held.load(is_query ? query + (i64)output * DIM : fc1 + (i64)(output - DIM) * DIM);
  wait_previous();
  if (warp < ROWS && row < rows) {
    Row part;
    part.load(pre + (i64)row * DIM);
    part.normalise(norm, shift);
    part.store(joined[warp]);
  }
  __syncthreads();
  for (int i = 0; i < ROWS && blockIdx.y * ROWS + i < rows; i++) {
    const i64 at = blockIdx.y * ROWS + i;
    const float sum = held.dot(joined[i]);
    if (threadIdx.x % 32) continue;
    if (is_query)
      queries[at * DIM + output] = sum + to_float(query_bias[output]);
    else
      inner[at * INNER + output - DIM] = gelu_tanh(sum + to_float(fc1_bias[output - DIM]));
  }
}

constexpr int READERS = 32, TOGETHER = 4;  // warps of a head; keys per fetch

// Attention to positions before the newest; queries rotate to newest + step.
extern "C" __global__ void __launch_bounds__(32 * READERS)
    draft_attend(const float* queries, const i64* newest, const i64* pages, const bf16* keys, const bf16* values,
                 const float* cosines, const float* sines, float* seen, int step, int last) {
  __shared__ float turned[HEAD];
  __shared__ float parts[READERS][HEAD], tops[READERS], sums[READERS];
  const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, place = lane % 8 * 8;
  launch_dependents();
  const i64* table = pages + (i64)row * PAGES;
  wait_previous();
  const int count = max((int)newest[row], 1);
  if (threadIdx.x < HEAD) {
    const int at = threadIdx.x, angle = at % ANGLES;
    const float* query = queries + (i64)row * DIM + head * HEAD;
    float x = load_fresh_f32(query + at);
    if (at < 2 * ANGLES) {
      const int where = min((int)newest[row] + step, last) * ANGLES + angle;
      const float y = load_fresh_f32(query + (at + ANGLES) % (2 * ANGLES));
      x = x * cosines[where] + (at < ANGLES ? -y : y) * sines[where];
    }
    turned[at] = x * 0.125f * 1.4426950408889634f;
  }
  __syncthreads();
  float query[8], found[8] = {};
  for (int i = 0; i < 8; i++) query[i] = turned[place + i];
  float top = -INFINITY, sum = 0.f;
  for (int from = warp * 4 + lane / 8; from - lane / 8 < count; from += READERS * 4 * TOGETHER) {
    uint4 k[TOGETHER], v[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const int position = min(from + READERS * 4 * i, count - 1);
      const i64 at = ((table[position / PAGE] * HEADS + head) * PAGE + position % PAGE) * HEAD + place;
      k[i] = *(const uint4*)(keys + at);
      v[i] = *(const uint4*)(values + at);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      float score = low_float(k[i].x) * query[0] + high_float(k[i].x) * query[1] + low_float(k[i].y) * query[2] +
                    high_float(k[i].y) * query[3] + low_float(k[i].z) * query[4] + high_float(k[i].z) * query[5] +
                    low_float(k[i].w) * query[6] + high_float(k[i].w) * query[7];
#pragma unroll
      for (int lanes = 4; lanes; lanes >>= 1) score += __shfl_xor_sync(~0u, score, lanes);
      if (from + READERS * 4 * i >= count) continue;
      const float higher = fmaxf(top, score), kept = exp2f(top - higher), more = exp2f(score - higher);
      top = higher;
      sum = sum * kept + more;
      const u32 pairs[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int pair = 0; pair < 4; pair++) {
        found[2 * pair] = found[2 * pair] * kept + more * low_float(pairs[pair]);
        found[2 * pair + 1] = found[2 * pair + 1] * kept + more * high_float(pairs[pair]);
      }
    }
  }
#pragma unroll
  for (int lanes = 8; lanes < 32; lanes <<= 1) {  // the four keys of a warp
    const float other_top = __shfl_xor_sync(~0u, top, lanes), other_sum = __shfl_xor_sync(~0u, sum, lanes);
    const float higher = fmaxf(fmaxf(top, other_top), -1e30f);
    const float kept = exp2f(top - higher), more = exp2f(other_top - higher);
    sum = sum * kept + other_sum * more;
#pragma unroll
    for (int i = 0; i < 8; i++) found[i] = found[i] * kept + __shfl_xor_sync(~0u, found[i], lanes) * more;
    top = higher;
  }
  if (lane < 8) {
    for (int i = 0; i < 8; i++) parts[warp][place + i] = found[i];
    tops[warp] = top;
    sums[warp] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= HEAD) return;
  float highest = -1e30f, all = 0.f, out = 0.f;
  for (int i = 0; i < READERS; i++) highest = fmaxf(highest, tops[i]);
  for (int i = 0; i < READERS; i++) {
    const float weight = exp2f(tops[i] - highest);
    all += weight * sums[i];
    out += weight * parts[i][threadIdx.x];
  }
  seen[(i64)row * DIM + head * HEAD + threadIdx.x] = out / all;
}

// stream += the maps of `seen` and `inner`.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    draft_out(const float* seen, const float* inner, const bf16* proj, const bf16* proj_bias, const bf16* fc2,
              const bf16* fc2_bias, float* stream, int rows) {
  __shared__ __align__(16) float inputs[ROWS][DIM + INNER];
  const int warp = threadIdx.x / 32, output = blockIdx.x * WARPS + warp;
  launch_dependents();
  Weights<DIM> of_seen;
  Weights<INNER> of_inner;
  of_seen.load(proj + (i64)output * DIM);
  of_inner.load(fc2 + (i64)output * INNER);
  wait_previous();
  const int first = blockIdx.y * ROWS, count = min(ROWS, rows - first);
  for (int i = threadIdx.x; i < count * (DIM + INNER); i += 32 * WARPS) {
    const i64 row = first + i / (DIM + INNER);
    const int at = i % (DIM + INNER);
    inputs[0][i] = load_fresh_f32(at < DIM ? seen + row * DIM + at : inner + row * INNER + at - DIM);
  }
  __syncthreads();
  for (int i = 0; i < count; i++) {
    const float sum = of_seen.dot(inputs[i]) + of_inner.dot(inputs[i] + DIM);
    float* place = stream + (i64)(first + i) * DIM + output;
    if (threadIdx.x % 32 == 0)
      *place = load_fresh_f32(place) + sum + to_float(proj_bias[output]) + to_float(fc2_bias[output]);
  }
}

// The likeliest, the lowest id of equals, to said [R] and drafts [R, stride]. best [R] and done [R / ROWS] are 0
// before and after.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    draft_head(const float* stream, const bf16* norm, const bf16* shift, const bf16* weights, const bf16* bias,
               u64* best, u32* done, i64* said, i64* drafts, int rows, int stride, int step) {
  __shared__ __align__(16) float joined[ROWS][DIM];
  __shared__ u64 bests[ROWS][WARPS];
  __shared__ bool is_last;
  const int warp = threadIdx.x / 32, token = blockIdx.x * WARPS + warp, first = blockIdx.y * ROWS;
  launch_dependents();
  Weights<DIM> held;
  held.load(weights + (i64)token * DIM);
  wait_previous();
  if (warp < ROWS && first + warp < rows) {
    Row part;
    part.load(stream + (i64)(first + warp) * DIM);
    part.normalise(norm, shift);
    part.store(joined[warp]);
  }
  __syncthreads();
  const int count = min(ROWS, rows - first);
  for (int i = 0; i < count; i++) {
    const u32 bits = __float_as_uint(held.dot(joined[i]) + to_float(bias[token]));
    const u32 rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if (threadIdx.x % 32 == 0) bests[i][warp] = (u64)rising << 32 | (u32)(VOCAB - token);
  }
  __syncthreads();
  if (threadIdx.x < count) {
    u64 most = 0;
    for (int i = 0; i < WARPS; i++) most = max(most, bests[threadIdx.x][i]);
    atomicMax(best + first + threadIdx.x, most);
    __threadfence();
  }
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(done + blockIdx.y, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!is_last || threadIdx.x >= count) return;
  const int row = first + threadIdx.x;
  __threadfence();
  const i64 likeliest = VOCAB - (i64)(u32)atomicExch(best + row, 0ull);
  said[row] = drafts[(i64)row * stride + step] = likeliest;
  if (threadIdx.x == 0) done[blockIdx.y] = 0;
}
