// A decode step of a decoder with parallel attention and MLP.
//
// CLUSTER thread blocks share the PARTS of the inputs of `layer_out`, X_CLUSTER read those of `layer_in` once.
// `stages` of weights fit shared memory; `batch` of B tokens are real.
#include "layer_maps.cuh"

static_assert(PARTS % CLUSTER == 0, "a thread block of a cluster has whole parts");

// `weights` [3 DIM + FF]: query, key and value map, then the MLP's first map, times the norm's scale; `folded` as in
// `normed`, in the maps' own order of rows. `change` [B, FF] float32 is added to the MLP's first map, unless null.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) layer_in(
    const bf16* x, const bf16* weights, const float2* folded, const float* cos_table, const float* sin_table,
    const i64* row, const i64* position, const i64* table, bf16* q, bf16* mixed, bf16* keys, bf16* values,
    const float* change, int batch, int stages) {
  __shared__ Slot slots[TILES * 8];
  normed_blocks<X_CLUSTER>(
      QKV_BLOCKS + FF / 16, weights, stages, x, batch,
      [&](int token) { slots[token] = slot_of(token, row, position, table); },
      [&](int block) {
        const Pair pair(block);
        return Folded{folded[pair.first], folded[pair.second]};
      },
      [&](int block, int tile, float4 sum, Folded rows, const float2* moments) {
        write_in(block, tile, sum, rows, moments, slots, cos_table, sin_table, q, mixed, keys, values, change, batch);
      });
}

// x += mixed * weights + biases + change; `weights`: the MLP's second map beside the heads' output map. `change` [B,
// DIM] float32 may be null.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) layer_out(
    const bf16* mixed, const bf16* weights, const bf16* proj_bias, const bf16* fc2_bias, bf16* x,
    const float* change, int batch, int stages) {
  constexpr int PART = MIXED / PARTS, CHUNK = chunk_of(PART), CHUNKS = PART / CHUNK, OWN = PARTS / CLUSTER;
  static_assert(MIXED % PARTS == 0 && DIM % (16 * PARTS) == 0, "unsupported sizes");
  unsigned char* shared = shared_memory;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int stride = CHUNK + PAD, tokens = columns<TILES>(batch);
  Ring ring(shared, stages, 16 * CHUNK), inputs(shared, INPUT_STAGES, tokens * stride);
  auto& sums = *reinterpret_cast<PartSums<TILES, PARTS>*>(shared);
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, first = blockIdx.x / CLUSTER * CLUSTER;
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init();
  if (warp < WARPS)
    for (int i = 0; i < INPUT_STAGES; i++) clear<TILES>(inputs.data + i * inputs.elements, stride, batch);
  __syncthreads();
  launch_dependents();
  const int out = (first + rank) * 16 + g;
  float2 bias = {0.f, 0.f}, old[2] = {};
  if (warp < WARPS) {
    if (warp < TILES)
      bias = float2{to_float(proj_bias[out]) + to_float(fc2_bias[out]),
                    to_float(proj_bias[out + 8]) + to_float(fc2_bias[out + 8])};
    wait_previous();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = warp * 8 + t * 2 + j;
      const bf16* at = x + (i64)token * DIM + out;
      if (token < batch) old[j] = float2{to_float(at[0]), to_float(at[8])};
    }
    multiply_parts<TILES, PARTS, CLUSTER, PART>(ring, inputs, sums, batch);
  } else if (threadIdx.x == WORKERS) {
    produce_weights<CHUNK>(ring, PARTS * CHUNKS, [&](int i) {
      return weights + parts_stage<PARTS, CLUSTER, PART>(i, first, rank) * (16 * CHUNK);
    });
  } else if (warp > WARPS) {
    wait_previous();
    produce_inputs<CHUNK>(inputs, OWN * CHUNKS, batch, [&](int i, int token) {
      return mixed + (i64)token * MIXED + rank * OWN * PART + i * CHUNK;
    });
  }
  __syncwarp();
  add_parts<TILES, PARTS, CLUSTER>(rank, sums, [&](int tile, float4 sum) {
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = tile * 8 + t * 2 + j;
      if (token >= batch) continue;
      bf16* at = x + (i64)token * DIM + out;
      float a = low[j] + bias.x, b = high[j] + bias.y;
      if (change) {
        a += load_fresh_f32(change + (i64)token * DIM + out);
        b += load_fresh_f32(change + (i64)token * DIM + out + 8);
      }
      at[0] = to_bf16(old[j].x + a);
      at[8] = to_bf16(old[j].y + b);
    }
  });
}
