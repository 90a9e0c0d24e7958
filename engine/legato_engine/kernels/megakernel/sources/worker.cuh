// A worker of the megakernel: its arguments, its shared memory, and the step's tokens.
//
// Constants: DIM width, FF inner width, VOCAB, CHUNK inputs of a stage, STAGE_PAGES KV pages of a stage,
// PARTS (split K) of a layer's output map, RING stages of the ring, at most UNDER_WAY of them being copied at a time, TILES groups
// of 8 tokens, SHARED bytes.
// VALUES: whether tokens may have values (see values.cuh). DRAFTS: whether rows also feed draft tokens (see drafts.cuh).
// T tokens of a step, at most TOKENS: one of each of B rows, or with DRAFTS as many as the step before has placed.
#pragma once
#include "common.cuh"
#include "program.cuh"
#include "sample.cuh"

constexpr int THREADS = WARPS * 32;  // consumers; the warps after them are two loaders, the polling and the signalling warp
constexpr int TOKENS = TILES * 8;
constexpr int WORKERS = DIM / BLOCK;
constexpr int HEADS = DIM / HEAD_DIM;
constexpr int CHUNKS = DIM / CHUNK;
constexpr int STAGE_BYTES = BLOCK * CHUNK * 2;
constexpr int SLOT_BYTES = STAGE_BYTES > PAGE_BYTES ? STAGE_BYTES : PAGE_BYTES;
constexpr int OWN_PAGES = 32;       // of a row in a worker's quarter, at most
constexpr int BLOCKS_AT_ONCE = 4;   // whose sums shared memory holds
constexpr int COUNTER_WORDS = 32;   // from one counter to the next

// A kind of value: its encoder's frequencies and map, and the two maps of its decoder.
struct ValueKind {
  const bf16 *frequencies, *encoder, *encoder_bias, *fc1, *fc1_bias, *fc2, *fc2_bias;
};

// Arguments of the instructions of drafts, as in `Arguments`.
struct Drafting;  // see drafts.cuh
struct DraftArguments {
  const Drafting* drafting;
  const u32* abort;
  const int *token, *stop;
  const i64 (*successors)[2];
  const float* row_temperature;
  const float4* value;
  float2* row_payload;
  const i64* pages;
  int row_pages, rows, steps;
};
// Arguments of the instructions of values, as in `Arguments`.
struct ValueArguments {
  ValueKind scalar, pair;
  const bf16* embedding;
  bf16 *x0, *x1;
  const int* token;
  const float* scores;
  bf16* inner;     // [TOKENS, 2 * INNER]: inner activations, where `place_of` says
  float* bins;     // [TOKENS, SCALAR_BINS + PAIR_BINS]
  float4* value;   // [TOKENS]: both values, and the certainties of their kind and of them
  int rows;
};

// Partial results of drawn rows, by range of distance from the row's highest score.
struct Weighed {
  uint4* share;  // [TOKENS, WORKERS, RANGES]: a range's mass, in two words, and its number of tokens
  uint4* best;   // likewise: score with noise, score and id of the best token of this range and all before it
};

// Arguments of draws, as in `Arguments`: in shared memory, because called functions share no registers with their callers.
struct DrawArguments {
  const float *scores, *row_temperature, *row_top_p;
  const i64 *row_top_k, *row_seed, *sample_position;
  const uint2* best;
  Weighed weighed;
};

struct Arguments {
  const Instruction* table;  // [WORKERS, count]
  u32* counters;
  u32* epoch;    // steps of all launches before
  u32* abort;    // not zero: all waits return immediately
  int* report;   // host memory: the first wait that timed out
  const bf16* weights;  // [WORKERS, stream_stages] stages
  const float2* folded;       // [layers, 3 * DIM + FF]: of QKV, then of FC1, in the order of blocks
  const float2* head_folded;  // [VOCAB]
  const float* out_bias;      // [layers, DIM]
  const bf16* embedding;      // [VOCAB, DIM]
  bf16 *x0, *x1, *act, *q;    // [TOKENS, DIM] and act [TOKENS, FF]; all but q lie as `place_of` says
  float* part;   // [TOKENS, WORKERS, OWN_LINES, HEAD_DIM]: attention over a worker's quarter
  float2* ends;  // [TOKENS, WORKERS, OWN_LINES]: top and sum of each part
  bf16* heads;   // likewise [TOKENS, DIM]: of all quarters
  uint2* best;   // [WORKERS, TOKENS]: key, and id with BROKEN
  float* scores; // [TOKENS, VOCAB]: logits with constraints, of rows that are not greedy, or of all with VALUES
  int* token;    // [TOKENS], -1: not finite
  int* stop;     // the host's stop flag, as the first worker read it in this step
  bf16 *keys, *values;           // [layers, pages, HEADS, PAGE, HEAD_DIM]
  const float *cosines, *sines;  // [positions, ROTARY_DIM / 2]
  // Of the launch's rows, by index: the row of the state R, its constraint C, and positions of the first step.
  const i64 *row, *constraint, *sample_position;  // [B]
  i64* position;                 // [B]: also where a launch behind this one continues, except for drafting rows
  const i64* pages;              // [R, row_pages]
  i64* row_token;                // [R]: the newest token, which the first step reads and every step writes
  const float *row_temperature, *row_top_p;  // [R]
  const i64 *row_top_k, *row_seed;           // [R]
  const float* constraints;      // [C, VOCAB], added to logits
  const i64 (*successors)[2];    // [C], as in decode_loop.cuh
  volatile i64 *ring, *words;    // the host's, as in decode_loop.cuh
  // With VALUES only, which saves registers in the other builds: the ring's other fields, [steps, B] at the same stride.
  volatile float2 *payload_ring, *certainty_ring;
  float2* row_payload;           // [R]: as row_token
  const float4* value;           // [TOKENS]: as in `ValueArguments`
  float* logits;                 // [steps, TOKENS, VOCAB] without constraints, or null
  bf16* trace;                   // [steps, layers, TOKENS, DIM]: the residual stream after each layer, or null
  i64* profile;                  // [WORKERS, steps, count, 3]: clocks, or null
  int count, layers, stream_stages, layer_pages, row_pages, rows, steps, ring_stride, patience_ms;
  u32 zero;  // opaque to the compiler
  const Drafting* drafting;  // with DRAFTS
};

__device__ __forceinline__ bool is_of_values(const Instruction& it) { return VALUES && it.op >= OP_EMBED && it.op <= OP_VALUE; }
__device__ __forceinline__ bool is_of_drafts(const Instruction& it) { return DRAFTS && (it.op == OP_COMMIT || it.op >= OP_SETTLE); }

constexpr u32 BROKEN = 0x80000000u;  // of an id: some logit is not finite
constexpr u32 GOES_ON = 0, ENDED = 1, ABORTED = 2;

// Partial sampling results of the warps.
struct Sampling {
  Share shares[WARPS];
  Best best[WARPS];
};

// Tokens that share attention's reads, at most UNIT_TOKENS: with DRAFTS those of one row, at consecutive positions; else those of
// rows that have leading pages in common, of which `common` are in the worker's quarter.
constexpr int UNIT_TOKENS = 8;
struct Unit {
  int token, count, common;  // the first token
};
using PackedUnit = unsigned short;  // read at once
__device__ __forceinline__ PackedUnit packed(const Unit& unit) { return unit.token | unit.count - 1 << 5 | unit.common << 8; }

struct __align__(16) Shared {
  unsigned char ring[RING][SLOT_BYTES];
  float4 sums[WARPS][BLOCKS_AT_ONCE][TILES][32];  // by warp; also attention's parts
  // Of a layer's output map: each warp's sums of the first part of the inputs, and the total of finished parts.
  float4 first_part[WARPS][TILES][32], parts[TILES][32];
  float2 slices[WARPS][TOKENS], moments[TOKENS];
  union {
    float2 ends[TOKENS][WARPS];  // attention's
    uint2 best[WARPS][TOKENS];   // the head's
  };
  u64 full[RING], empty[RING];
  u32 begun[RING];  // 1 + the lap in which copies to a stage have begun; 0: none
  Sampling sampling;
  DrawArguments draw;
  int token[TOKENS];      // input of the step; -1 is published only
  int chosen[TOKENS];     // output of the finished step, to publish
  int row[TOKENS], constraint[TOKENS];
  int position[TOKENS];
  int pages[TOKENS][OWN_PAGES];  // of the worker's quarter, by row, or by unit with DRAFTS
  ValueArguments values;
  float4 value[TOKENS];   // of the step's input tokens
  float2 read[2];  // VALUE's results for one token
  u32 needed;  // value decoders that the step needs, as a bit mask
  u32 drawn;   // rows of the step that are not greedy, as a bit mask
  bool draws;  // whether the launch has any
  u32 kept;    // rows whose scores are stored, as a bit mask
  u32 epoch;
  u32 passed;  // completed waits of the program
  u32 ended;   // GOES_ON, ENDED or ABORTED
  int num_units;
  PackedUnit unit[TOKENS + 1];  // the last one is prefetched and never used
  unsigned char common[TOKENS + 1];  // of a row's pages, those in common with its unit; likewise
#if DRAFTS
  DraftArguments drafts;
  int first[TOKENS];  // of the positions that its row writes in the step
  int count, chosen_count;
  u32 placed;  // steps whose tokens have been placed here
  int longest, groups, sums_of_warps[WARPS];  // of PLACE and SETTLE
  bool goes_on;  // PLACE's decision
#endif
};
static_assert(sizeof(Shared) <= SHARED, "the host allots less");
static_assert(TOKENS <= MAX_TOKENS && MAX_TOKENS <= 32, "a lane for each row");

// Tokens of the step, and a token's position. `Taken` has the rows of the launch.
template <class Taken>
__device__ __forceinline__ int num_tokens(const Taken& a, const Shared& shared) {
#if DRAFTS
  return shared.count;
#else
  return a.rows;
#endif
}
__device__ __forceinline__ int position_of(const Shared& shared, int token, int step) {
  return shared.position[token] + (DRAFTS ? 0 : step);
}
// Positions before it are cached: earlier steps wrote them.
__device__ __forceinline__ int first_position(const Shared& shared, int token, int step) {
#if DRAFTS
  return shared.first[token];
#else
  return shared.position[token] + step;
#endif
}

__device__ __forceinline__ Shared& worker_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return *reinterpret_cast<Shared*>(memory);
}

// The worker's instructions, which follow the rest in shared memory.
__device__ __forceinline__ Instruction* instructions(Shared& shared) {
  return reinterpret_cast<Instruction*>(&shared + 1);
}
