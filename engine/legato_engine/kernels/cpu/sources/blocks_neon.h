// Blocks by smlal, one input of eight outputs at a time: what every arm64 has.
//
// int8  16 outputs of each input; int4: blocks_arm.h
#pragma once

namespace legato {

constexpr const char* INSTRUCTIONS = "NEON";
constexpr int TOGETHER = 1;

}  // namespace legato

#include "blocks_arm.h"

namespace legato {

// Store 16 rounded inputs.
inline void put_inputs(int16_t* block, int first, Ints low, Ints high) {
    vst1q_s16(block + first, narrow(low));
    vst1q_s16(block + first + LANES, narrow(high));
}

template <int ROWS>
inline void add_input(Ints acc[ROWS][2], int8x16_t weights, const int16_t* values, long stride) {
    int16x8_t low = vmovl_s8(vget_low_s8(weights)), high = vmovl_high_s8(weights);
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row) {
        int16_t value = values[row * stride];
        acc[row][0].low = vmlal_n_s16(acc[row][0].low, vget_low_s16(low), value);
        acc[row][0].high = vmlal_high_n_s16(acc[row][0].high, low, value);
        acc[row][1].low = vmlal_n_s16(acc[row][1].low, vget_low_s16(high), value);
        acc[row][1].high = vmlal_high_n_s16(acc[row][1].high, high, value);
    }
}

// Sums of products of a block and ROWS rows, whose values are `stride` apart. `wide`: the block's
// weights unpacked.
template <int ROWS, int KIND, bool WIDE>
inline void multiply_block(const uint8_t* block, const Wide* wide, const int16_t* values, long stride,
                           Ints acc[ROWS][2]) {
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row) acc[row][0] = acc[row][1] = no_ints();
    for (int input = 0; input < BLOCK; input += 2) {
        Two weights = two_vectors<WIDE ? INT8 : KIND>(WIDE ? reinterpret_cast<const uint8_t*>(wide) : block, input / 2);
        add_input<ROWS>(acc, weights.first, values + input, stride);
        add_input<ROWS>(acc, weights.second, values + input + 1, stride);
    }
}

}  // namespace legato
