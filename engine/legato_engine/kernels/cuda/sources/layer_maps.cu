// A decode step of a decoder with parallel attention and MLP.
//
// X_CLUSTER thread blocks, a cluster, read the inputs of `layer_in` once. SPREAD thread blocks have a part each of those of
// `layer_out`, and OUT_CLUSTER of the same part, a cluster, read it once. `stages` of weights fit shared memory; `batch` of B
// tokens are real.
#include "layer_maps.cuh"

// `weights` [3 DIM + FF]: query, key and value map, then the MLP's first map, times the norm's scale; `folded` as in
// `normed`, in the maps' own order of rows. `change` [B, FF] float32 is added to the MLP's first map, unless null.
extern "C" __global__ void __launch_bounds__(FINISHING, 1) layer_in(
    const bf16* x, const bf16* weights, const float* scales, const float2* folded, const float* cos_table,
    const float* sin_table, const i64* row, const i64* position, const i64* table, bf16* q, bf16* mixed, Element* keys,
    Element* values, const float* units, const float* change, int batch, int stages) {
  __shared__ i64 offsets[TILES * 8];
  normed_blocks<X_CLUSTER>(
      QKV_BLOCKS + FF / 16, weights, stages, x, batch,
      [&](int token) { offsets[token] = offset_of(token, row, position, table); },
      [&](int block, int tile) { return BlockIn(block, tile, scales, folded, cos_table, sin_table, position, batch); },
      [&](int block, int tile, float4 sum, const BlockIn& in, const float2* moments) {
        write_in(block, tile, sum, in, moments, offsets, q, mixed, keys, values, units, change, batch);
      });
}

constexpr int PART = MIXED / PARTS, CHUNK = chunk_of(PART), CHUNKS = PART / CHUNK;
constexpr int OWN = PARTS / SPREAD;  // parts of a thread block, which has SPREAD blocks of 16 columns
constexpr int UNITS = SPREAD * TILES, SHARE = ceil_div(UNITS, WARPS);  // of a thread block, and of a warp
static_assert(SPREAD == 1 || SPREAD == PARTS, "a thread block has all parts or one");
static_assert(MIXED % PARTS == 0 && DIM % (16 * SPREAD * OUT_CLUSTER) == 0, "unsupported sizes");

// A thread block's sums over its parts.
struct Sums {
  float4 of[OWN][UNITS][32];
};

// x += mixed * weights + biases + change; `weights`: the MLP's second map beside the heads' output map. `change` [B,
// DIM] float32 may be null. Thread blocks that share columns leave their own of `sums`, and the last one, by their one of
// `counts`, adds them up.
extern "C" __global__ void __launch_bounds__(WORKERS + 64, 1) layer_out(
    const bf16* mixed, const bf16* weights, const float* scales, const bf16* proj_bias, const bf16* fc2_bias, bf16* x,
    const float* change, Sums* sums, u32* counts, int batch, int stages) {
  unsigned char* shared = shared_memory;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // OUT_CLUSTER groups of SPREAD thread blocks, those of one part beside each other.
  const int part = blockIdx.x / OUT_CLUSTER % SPREAD, rank = blockIdx.x % OUT_CLUSTER;
  const int first = (blockIdx.x / (SPREAD * OUT_CLUSTER) * OUT_CLUSTER + rank) * SPREAD;
  const int stride = CHUNK + PAD, tokens = columns<TILES>(batch);
  Ring ring(shared, stages, Span<CHUNK, CHUNKS>::ELEMENTS), inputs(shared, INPUT_STAGES, tokens * stride);
  Sums& mine = SPREAD > 1 ? sums[first + part] : *reinterpret_cast<Sums*>(shared);
  if (threadIdx.x == WORKERS) ring.init();
  if (threadIdx.x == WORKERS + 32) inputs.init(OUT_CLUSTER);
  if (warp < WARPS) clear<TILES>(inputs, stride, batch);
  if (OUT_CLUSTER > 1) cluster_sync(); else __syncthreads();
  launch_dependents();
  Unit units[SHARE];
  const auto load_units = [&] {
#pragma unroll
    for (int i = 0; i < SHARE; i++)
      if (i * WARPS + warp < UNITS) {
        units[i].begin(i * WARPS + warp, first, scales, proj_bias, fc2_bias);
        units[i].load(x, batch);
      }
  };
  if (warp < WARPS) {
    wait_previous();
    if (SPREAD == 1) load_units();
    multiply_parts<TILES, OWN, SPREAD, PART, OUT_CLUSTER>(ring, inputs, batch, [&](int i, int tile, float4 sum) {
      mine.of[i / SPREAD][i % SPREAD * TILES + tile][lane] = sum;
    });
  } else if (warp == WARPS) {
    produce_parts<PARTS, OWN, SPREAD, PART>(ring, weights, first, part);
  } else if (warp > WARPS) {
    wait_previous();
    const auto at = [&](int i, int token) { return mixed + (i64)token * MIXED + part * PART + i * CHUNK; };
    produce_inputs<CHUNK, OUT_CLUSTER>(inputs, OWN * CHUNKS, batch, at, rank);
  }
  __syncthreads();
  if (SPREAD > 1) {
    u32& adds = *reinterpret_cast<u32*>(inputs.data);  // no longer read
    if (threadIdx.x == 0) adds = is_last_signal(counts + first / SPREAD, SPREAD);
    __syncthreads();
    if (!adds) return;
  }
  if (warp >= WARPS) return;
  float4 parts[SHARE][PARTS];
#pragma unroll
  for (int i = 0; i < SHARE; i++)
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const int unit = i * WARPS + warp;
      if (unit < UNITS)
        parts[i][p] = SPREAD > 1 ? load_fresh_float4(&sums[first + p].of[0][unit][lane]) : mine.of[p][unit][lane];
    }
  if (SPREAD > 1) load_units();
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    if (i * WARPS + warp >= UNITS) continue;
    float4 all = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int p = 0; p < PARTS; p++) add(all, parts[i][p]);
    units[i].write(all, change, x, batch);
  }
}
