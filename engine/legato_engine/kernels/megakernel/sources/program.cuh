// Written by `python -m legato_engine.kernels.megakernel.program`.
#pragma once

constexpr int BLOCK = 16;
constexpr int HEAD_DIM = 64;
constexpr int ROTARY_DIM = 32;
constexpr int SPLITS = 4;
constexpr int GROUP = 64;
constexpr int WARPS = 8;
constexpr int LOADERS = 2;
constexpr int MAX_TOKENS = 16;
constexpr int PAGE = 16;
constexpr int PAGE_BYTES = 4096;
constexpr int RANGES = 32;
constexpr int NEAR_RANGES = 28;
constexpr int NEAR_DIGITS = 6;
constexpr int FAR_DIGITS = 211;
constexpr int NONE = -1;

constexpr int OP_FC1 = 0;
constexpr int OP_QKV = 1;
constexpr int OP_FC2 = 2;
constexpr int OP_ATTEND = 3;
constexpr int OP_MERGE = 4;
constexpr int OP_OUT = 5;
constexpr int OP_LISTEN = 6;
constexpr int OP_HEAD = 7;
constexpr int OP_WEIGH = 8;
constexpr int OP_SAMPLE = 9;
constexpr int OP_COMMIT = 10;
constexpr int OP_EMBED = 11;
constexpr int OP_INNER = 12;
constexpr int OP_BINS = 13;
constexpr int OP_VALUE = 14;
constexpr int OP_SETTLE = 15;
constexpr int OP_PLACE = 16;

constexpr int SOURCE_X0 = 0;
constexpr int SOURCE_X1 = 1;
constexpr int SOURCE_EMBED = 2;

struct __align__(16) Instruction {
  short op, layer, wait, wait_count, wait_stride, signal, src, dst, block, num_blocks, chunk, num_chunks, stage, only_draws;
  short unused[2];
};
static_assert(sizeof(Instruction) == 32, "an instruction has 16 words");
