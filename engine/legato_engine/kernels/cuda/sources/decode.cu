// One decode step of a decoder with parallel attention and MLP: three kernels a layer, and the head.
//
// Constants: DIM width, FF inner width, HEADS heads of 64, ROTARY rotated dimensions of a head (32),
// VOCAB, PAGE positions per page, PAGES pages of a row's table, TILES groups of 8 tokens, PARTS that the
// inputs of `layer_out` are cut into, SPLIT whether a cluster shares them, INPUT_STAGES of their ring. `stages` is
// how many stages of weights shared memory holds. B tokens, `batch` of them real.
//
// Memory: x [B, DIM] residual stream; q [B, DIM]; mixed [B, DIM + FF]: the heads' output, then the MLP's
// inner activations; keys and values [pages, HEADS, PAGE, 64]; `table` [rows, PAGES] page ids, `row`
// and `position` [B].
#include "stream.cuh"

constexpr int HEAD = 64;
constexpr int HALF = ROTARY / 2;
constexpr int MIXED = DIM + FF;
static_assert(ROTARY == 32 && DIM == HEADS * HEAD && DIM % 64 == 0 && FF % 64 == 0, "unsupported sizes");

constexpr int IN_CHUNK = chunk_of(DIM), IN_CHUNKS = DIM / IN_CHUNK;

// Mean and inverse deviation of each token's residual stream, a warp a token.
__device__ __forceinline__ void measure(float2* moments, const Ring& inputs, int batch) {
  constexpr int STEPS = ceil_div(DIM, 256);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int token = warp; token < batch; token += WARPS) {
    uint4 v[STEPS];
    float sum[4] = {}, squares[4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const int at = i * 256 + lane * 8;
      v[i] = at < DIM ? *reinterpret_cast<const uint4*>(
                            inputs.data + at / IN_CHUNK * inputs.elements + token * (IN_CHUNK + PAD) + at % IN_CHUNK)
                      : uint4{0, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < 4; j++) sum[j] += low_float((&v[i].x)[j]) + high_float((&v[i].x)[j]);
    }
    const float mean = warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) / DIM;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      if (i * 256 + lane * 8 < DIM) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float low = low_float((&v[i].x)[j]) - mean, high = high_float((&v[i].x)[j]) - mean;
          squares[j] += low * low + high * high;
        }
      }
    const float variance = warp_sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / DIM;
    if (lane == 0) moments[token] = float2{mean, rsqrtf(variance + 1e-5f)};
  }
}

// A map of normed inputs, where `sum` is the product of the raw ones with weights that hold the norm's own
// scale: rows[0] is what a row's weights add up to, rows[1] its bias with the norm's.
__device__ __forceinline__ float normed(float sum, float2 moment, float2 row) {
  return moment.y * (sum - moment.x * row.x) + row.y;
}

// Which rows a block of 16 of the joint query, key and value map holds, as packed, at g and at g + 8: in
// the rotated part of a head they are the two dimensions of a pair.
__device__ __forceinline__ int qkv_row(int block, int g, int& partner) {
  const int part = block % 4, head = block / 4 * HEAD;
  if (part < 2) {
    partner = head + HALF + part * 8 + g;
    return head + part * 8 + g;
  }
  partner = head + part * 16 + 8 + g;
  return head + part * 16 + g;
}

// The frame of a kernel whose blocks of rows all read the normed batch; finish(block, tile, sum, moments).
template <class Finish>
__device__ __forceinline__ void normed_blocks(
    int blocks, const bf16* weights, int stages, const bf16* x, int batch, Finish finish) {
  __shared__ float2 moments[TILES * 8];
  unsigned char* shared = shared_memory;
  const int elements = places<TILES>(batch) * (IN_CHUNK + PAD), late = HELD<TILES> ? elements * IN_CHUNKS / (16 * IN_CHUNK) : 0;
  Ring ring(shared, stages, 16 * IN_CHUNK, late), inputs(shared, IN_CHUNKS, elements);
  ring.late_data = inputs.data;  // free when the tokens are held
  auto& sums = *reinterpret_cast<BlockSums<TILES>*>(shared);
  const int first = blockIdx.x, step = gridDim.x, count = (blocks - first + step - 1) / step, warp = threadIdx.x / 32;
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init();
  if (warp < WARPS)
    for (int i = 0; i < IN_CHUNKS; i++) clear<TILES>(inputs.data + i * inputs.elements, IN_CHUNK + PAD, batch);
  __syncthreads();
  launch_dependents();
  if (warp > WARPS) {
    wait_previous();
    produce_inputs<IN_CHUNK>(inputs, IN_CHUNKS, batch, [&](int i, int token) { return x + (i64)token * DIM + i * IN_CHUNK; });
  } else if (warp == WARPS) {
    if (threadIdx.x == WORKERS)
      produce_weights<IN_CHUNK>(ring, count * IN_CHUNKS, [&](int i) {
        const i64 block = first + i / IN_CHUNKS * step;
        return weights + (block * IN_CHUNKS + i % IN_CHUNKS) * (16 * IN_CHUNK);
      });
  } else {
    wait_previous();
    multiply_blocks<TILES, DIM>(
        count, ring, inputs, sums, batch, [&] { measure(moments, inputs, batch); },
        [&](int i, int tile, float4 sum) { finish(first + i * step, tile, sum, moments); });
  }
}

// `weights` [3 DIM + FF]: the joint query, key and value map, then the MLP's first map, each times the norm's
// scale; `folded` [3 DIM + FF] as in `normed`, in the maps' own order of rows. `change` [B, FF] float32 is added
// to the MLP's first map, unless it is null.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) layer_in(
    const bf16* x, const bf16* weights, const float2* folded, const float* cos_table, const float* sin_table,
    const i64* row, const i64* position, const i64* table, bf16* q, bf16* mixed, bf16* keys, bf16* values,
    const float* change, int batch, int stages) {
  constexpr int QKV_BLOCKS = 3 * DIM / 16;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  normed_blocks(
      QKV_BLOCKS + FF / 16, weights, stages, x, batch, [&](int block, int tile, float4 sum, const float2* moments) {
        const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
        int second_row = block * 16 + g + 8;
        const int first_row = block < QKV_BLOCKS ? qkv_row(block, g, second_row) : block * 16 + g;
        const float2 first_folded = folded[first_row], second_folded = folded[second_row];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int token = tile * 8 + t * 2 + j;
          if (token >= batch) continue;
          float a = normed(low[j], moments[token], first_folded), b = normed(high[j], moments[token], second_folded);
          if (block >= QKV_BLOCKS) {
            const int inner = first_row - 3 * DIM;
            if (change) {
              a += load_fresh_f32(change + (i64)token * FF + inner);
              b += load_fresh_f32(change + (i64)token * FF + inner + 8);
            }
            bf16* out = mixed + (i64)token * MIXED + DIM + inner;
            out[0] = to_bf16(gelu_tanh(a));
            out[8] = to_bf16(gelu_tanh(b));
            continue;
          }
          const int which = first_row / DIM, column = first_row % DIM, gap = second_row - first_row;
          const int dim = column % HEAD, head = column / HEAD;
          const i64 at = position[token];
          if (which < 2 && dim < ROTARY) {
            const float c = cos_table[at * HALF + dim], s = sin_table[at * HALF + dim];
            const float turned = a * c - b * s;
            b = a * s + b * c;
            a = turned;
          }
          bf16* out;
          if (which == 0) {
            out = q + (i64)token * DIM + column;
          } else {
            const i64 page = table[row[token] * PAGES + at / PAGE];
            out = (which == 1 ? keys : values) + ((page * HEADS + head) * PAGE + at % PAGE) * HEAD + dim;
          }
          out[0] = to_bf16(a);
          out[gap] = to_bf16(b);
        }
      });
}

// x += mixed * weights + biases + change; `weights`: the heads' output map beside the MLP's second map. The
// inputs are cut into PARTS; with SPLIT a cluster shares them. `change` [B, DIM] float32 may be null.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) layer_out(
    const bf16* mixed, const bf16* weights, const bf16* proj_bias, const bf16* fc2_bias, bf16* x,
    const float* change, int batch, int stages) {
  constexpr int PART = MIXED / PARTS, CHUNK = chunk_of(PART), CHUNKS = PART / CHUNK;
  static_assert(MIXED % PARTS == 0 && DIM % (16 * PARTS) == 0, "unsupported sizes");
  unsigned char* shared = shared_memory;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int stride = CHUNK + PAD, tokens = places<TILES>(batch);
  Ring ring(shared, stages, 16 * CHUNK), inputs(shared, INPUT_STAGES, tokens * stride);
  auto& sums = *reinterpret_cast<PartSums<TILES, PARTS>*>(shared);
  const int rank = SPLIT ? cluster_rank() : 0, first = SPLIT ? blockIdx.x / PARTS * PARTS : blockIdx.x;
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init();
  if (warp < WARPS)
    for (int i = 0; i < INPUT_STAGES; i++) clear<TILES>(inputs.data + i * inputs.elements, stride, batch);
  __syncthreads();
  launch_dependents();
  if (warp < WARPS) {
    wait_previous();
    multiply_parts<TILES, PARTS, SPLIT, PART>(ring, inputs, sums, batch);
  } else if (threadIdx.x == WORKERS) {
    produce_weights<CHUNK>(ring, PARTS * CHUNKS, [&](int i) {
      const i64 block = SPLIT ? first + i % PARTS : first;
      const int chunk = SPLIT ? rank * CHUNKS + i / PARTS : i;
      return weights + (block * (PARTS * CHUNKS) + chunk) * (16 * CHUNK);
    });
  } else if (warp > WARPS) {
    wait_previous();
    produce_inputs<CHUNK>(inputs, SPLIT ? CHUNKS : PARTS * CHUNKS, batch, [&](int i, int token) {
      return mixed + (i64)token * MIXED + (SPLIT ? rank * PART : 0) + i * CHUNK;
    });
  }
  __syncwarp();
  add_parts<TILES, PARTS, SPLIT>(rank, sums, [&](int tile, float4 sum) {
    const int out = (first + rank) * 16 + g;
    const float bias[2] = {to_float(proj_bias[out]) + to_float(fc2_bias[out]),
                           to_float(proj_bias[out + 8]) + to_float(fc2_bias[out + 8])};
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = tile * 8 + t * 2 + j;
      if (token >= batch) continue;
      bf16* at = x + (i64)token * DIM + out;
      float a = low[j] + bias[0], b = high[j] + bias[1];
      if (change) {
        a += load_fresh_f32(change + (i64)token * DIM + out);
        b += load_fresh_f32(change + (i64)token * DIM + out + 8);
      }
      at[0] = to_bf16(to_float(at[0]) + a);
      at[8] = to_bf16(to_float(at[8]) + b);
    }
  });
}

// logits [B, VOCAB] float32 of the normed residual stream.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) head(
    const bf16* x, const bf16* weights, const float2* folded, float* logits, int batch, int stages) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  normed_blocks(VOCAB / 16, weights, stages, x, batch, [&](int block, int tile, float4 sum, const float2* moments) {
    const int out = block * 16 + g;
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
    const float2 first_folded = folded[out], second_folded = folded[out + 8];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = tile * 8 + t * 2 + j;
      if (token >= batch) continue;
      logits[(i64)token * VOCAB + out] = normed(low[j], moments[token], first_folded);
      logits[(i64)token * VOCAB + out + 8] = normed(high[j], moments[token], second_folded);
    }
  });
}
