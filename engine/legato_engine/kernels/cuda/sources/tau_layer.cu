// The first kernels of a layer with gains on queries and values: the map, then the gains.
//
// EXACT: whether the gains' gelu is; EXPERTS replace this layer's MLP unless 0. WEIGHTS is the kind of the map. qkv and
// features [B, 3 DIM]: queries, keys and values, and their gelu.
#include "kv_element.cuh"
#include "norm_gemm.cuh"
#include "row_major_gemm.cuh"

constexpr int HEAD = 64;
constexpr int HALF = ROTARY / 2;
constexpr int MIXED = DIM + FF;
constexpr int QKV = 3 * DIM;
constexpr bool ROUTED = EXPERTS > 0;
// Of fewer bits an expert's logit is the sum of two rows, 8 apart: the second one is what rounding has left of the first.
constexpr bool SPLIT_ROUTER = WEIGHTS != BF16;
constexpr int ROUTER = SPLIT_ROUTER ? 2 * EXPERTS : EXPERTS;
static_assert(ROTARY == 32 && DIM == HEADS * HEAD && FF % 64 == 0 && EXPERTS % 16 == 0, "unsupported sizes");

// `weights`, `scales`, `folded` and `change` as in layer_maps.cu; with EXPERTS the router replaces the MLP's first map, and
// writes `logits` [B, EXPERTS], and `normed_x` [B, DIM] in the experts' unit.
extern "C" __global__ void __launch_bounds__(FINISHING, 1) tau_in(
    const bf16* x, const bf16* weights, const float* scales, const float2* folded, const bf16* norm_scale, const bf16* norm_shift, bf16* qkv,
    bf16* features, bf16* mixed, float* logits, bf16* normed_x, const float* change, int batch, int stages) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  normed_blocks<1>(
      (QKV + (ROUTED ? ROUTER : FF)) / 16, weights, stages, x, batch, [](int) {},
      [&](int block, int) { return Folded(folded, scales, block * 16 + g, block * 16 + g + 8); },
      [&](int block, int tile, float4 sum, Folded rows, const float2* moments) {
        const int row = block * 16 + g;
        sum = rows.scales.of(sum);
        const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const i64 token = tile * 8 + t * 2 + j;
          if (token >= batch) continue;
          float a = normed(low[j], moments[token], rows.low), b = normed(high[j], moments[token], rows.high);
          if (block < QKV / 16) {
            bf16 *out = qkv + token * QKV + row, *feature = features + token * QKV + row;
            out[0] = to_bf16(a);
            out[8] = to_bf16(b);
            feature[0] = to_bf16(EXACT ? gelu_exact(a) : gelu_tanh(a));
            feature[8] = to_bf16(EXACT ? gelu_exact(b) : gelu_tanh(b));
          } else if (ROUTED && SPLIT_ROUTER) {
            logits[token * EXPERTS + (row - QKV) / 16 * 8 + g] = a + b;
          } else if (ROUTED) {
            float* out = logits + token * EXPERTS + (row - QKV);
            out[0] = a;
            out[8] = b;
          } else {
            if (change) {
              a += load_fresh_f32(change + token * FF + (row - QKV));
              b += load_fresh_f32(change + token * FF + (row - QKV) + 8);
            }
            bf16* out = mixed + token * MIXED + (row - QKV);
            out[0] = to_bf16(gelu_tanh(a));
            out[8] = to_bf16(gelu_tanh(b));
          }
        }
      },
      [&](const HeldInputs<DIM>& inputs, int token, float2 moment) {
        if (!ROUTED || token % gridDim.x != blockIdx.x) return;
        for (int at = lane * 8; at < DIM; at += 32 * 8) {
          const uint4 v = *reinterpret_cast<const uint4*>(inputs.data + token * HeldInputs<DIM>::STRIDE + at);
          const uint4 scale = *reinterpret_cast<const uint4*>(norm_scale + at);
          const uint4 shift = *reinterpret_cast<const uint4*>(norm_shift + at);
          constexpr float unit = EXPERT_WEIGHTS == E4M3 ? LIFT : 1.f;
          uint4 out;
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const u32 pair = (&v.x)[j], w = (&scale.x)[j], c = (&shift.x)[j];
            const float low = (low_float(pair) - moment.x) * moment.y, high = (high_float(pair) - moment.x) * moment.y;
            (&out.x)[j] = pack((low * low_float(w) + low_float(c)) * unit, (high * high_float(w) + high_float(c)) * unit);
          }
          *reinterpret_cast<uint4*>(normed_x + (i64)token * DIM + at) = out;
        }
      });
}

constexpr int GROUP_TOKENS = WARPS;  // of a thread block of `gains`
constexpr int VECTORS = ceil_div(QKV / 8, WORKERS);

// Queries and values times tanh(w . features) + the position's part, queries and keys rotated. `weights` [2 HEADS, 3
// DIM]: the queries' rows, then the values'; `placed` [positions, HEADS]; `scales`: units of e4m3. A block is a head
// of 8 tokens. `follows_experts`: the preceding kernel let this one begin only after `tau_in` had ended, and wrote
// nothing read here; later kernels may then begin only after that kernel, too, has ended.
extern "C" __global__ void __launch_bounds__(WORKERS, 3) gains(
    const bf16* qkv, const bf16* features, const bf16* weights, const float* placed, const float* cos_table,
    const float* sin_table, const i64* row, const i64* position, const i64* table, bf16* q, Element* keys,
    Element* values, const float* scales, int batch, int follows_experts) {
  __shared__ float2 sums[GROUP_TOKENS][WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x, first = blockIdx.y * GROUP_TOKENS;
  uint4 query_weights[VECTORS], value_weights[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = (i * WORKERS + threadIdx.x) * 8;
    query_weights[i] = value_weights[i] = uint4{0, 0, 0, 0};
    if (at >= QKV) continue;
    query_weights[i] = *reinterpret_cast<const uint4*>(weights + (i64)head * QKV + at);
    value_weights[i] = *reinterpret_cast<const uint4*>(weights + (i64)(HEADS + head) * QKV + at);
  }
  if (!follows_experts) {
    launch_dependents();
    wait_previous();
  }
  const int count = min(GROUP_TOKENS, batch - first);
#pragma unroll 2
  for (int i = 0; i < count; i++) {
    float2 sum = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
      const int at = (j * WORKERS + threadIdx.x) * 8;
      const uint4 v = at < QKV ? load_fresh(features + (i64)(first + i) * QKV + at) : uint4{0, 0, 0, 0};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float low = low_float((&v.x)[k]), high = high_float((&v.x)[k]);
        const u32 wq = (&query_weights[j].x)[k], wv = (&value_weights[j].x)[k];
        sum.x += low * low_float(wq) + high * high_float(wq);
        sum.y += low * low_float(wv) + high * high_float(wv);
      }
    }
    sum.x = warp_sum(sum.x);
    sum.y = warp_sum(sum.y);
    if (lane == 0) sums[i][warp] = sum;
  }
  __syncthreads();
  const i64 token = first + warp;
  if (token < batch) {
    float2 sum = sums[warp][0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) sum.x += sums[warp][i].x, sum.y += sums[warp][i].y;
    const i64 at = position[token], page = table[row[token] * PAGES + at / PAGE];
    const float here = placed[at * HEADS + head];
    const float query_gain = tanhf(sum.x) + here, value_gain = tanhf(sum.y) + here;
    // A lane has a rotated pair, or adjacent dimensions after the rotated part.
    const bool turns = lane < HALF;
    const int low = turns ? lane : 2 * lane, high = turns ? lane + HALF : 2 * lane + 1;
    const float c = turns ? cos_table[at * HALF + lane] : 1.f, s = turns ? sin_table[at * HALF + lane] : 0.f;
    const bf16* from = qkv + token * QKV + head * HEAD;
    const i64 slot = ((page * HEADS + head) * PAGE + at % PAGE) * HEAD;
    const float a = to_float(from[low]) * query_gain, b = to_float(from[high]) * query_gain;
    q[token * DIM + head * HEAD + low] = to_bf16(a * c - b * s);
    q[token * DIM + head * HEAD + high] = to_bf16(a * s + b * c);
    const float k = to_float(from[DIM + low]), l = to_float(from[DIM + high]);
    const float key_unit = KV_BYTES == 1 ? scales[0] : 1.f, value_unit = KV_BYTES == 1 ? scales[1] : 1.f;
    keys[slot + low] = to_element(k * c - l * s, key_unit);
    keys[slot + high] = to_element(k * s + l * c, key_unit);
    values[slot + low] = to_element(to_float(from[2 * DIM + low]) * value_gain, value_unit);
    values[slot + high] = to_element(to_float(from[2 * DIM + high]) * value_gain, value_unit);
  }
  if (follows_experts) {
    wait_previous();
    launch_dependents();
  }
}
