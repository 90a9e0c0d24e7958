// Blocks by sdot, which adds the products of four inputs of 8 bits. An input of 16 bits is two bytes:
// 256 * high + low. As sdot wants both signed, low is less by 128, and what that lacks is 128 times the
// sum of the weights; sudot (i8mm) takes low as it is. All sums are exact, and those of smlal.
//
// int8  8 times 64 bytes: four inputs of each output; int4: blocks_arm.h
// inputs of a block: 32 high bytes, then 32 low ones
#pragma once

namespace legato {

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr const char* INSTRUCTIONS = "NEON with dotprod and i8mm";
constexpr bool UNSIGNED_LOW = true;
#else
constexpr const char* INSTRUCTIONS = "NEON with dotprod";
constexpr bool UNSIGNED_LOW = false;
#endif
constexpr int TOGETHER = 4;
constexpr int PASS = 2;  // rows whose sums of high and of low bytes fit into registers

}  // namespace legato

#include "blocks_arm.h"

namespace legato {

using Quad = int32x4_t[4];  // of a row: sums of 16 outputs

// Store 16 rounded inputs.
inline void put_inputs(int16_t* block, int first, Ints low, Ints high) {
    int16x8_t values[2] = {narrow(low), narrow(high)};
    auto* to = reinterpret_cast<int8_t*>(block) + first;
    vst1q_s8(to, vcombine_s8(vshrn_n_s16(values[0], 8), vshrn_n_s16(values[1], 8)));
    int8x16_t low_bytes = vcombine_s8(vmovn_s16(values[0]), vmovn_s16(values[1]));
    vst1q_s8(to + BLOCK, UNSIGNED_LOW ? low_bytes : veorq_s8(low_bytes, vdupq_n_s8(-128)));
}

template <int LANE>
inline int32x4_t add_low(int32x4_t acc, int8x16_t weights, int8x16_t inputs) {
#ifdef __ARM_FEATURE_MATMUL_INT8
    return vsudotq_laneq_s32(acc, weights, vreinterpretq_u8_s8(inputs), LANE);
#else
    return vdotq_laneq_s32(acc, weights, inputs, LANE);
#endif
}

// Add the products of four inputs; `ones`: the sums of the weights.
template <int ROWS, bool SUMS, int LANE>
inline void add_four(const int8x16_t weights[4], const int8x16_t inputs[ROWS][2], Quad high[ROWS],
                     Quad low[ROWS], Quad ones) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        if constexpr (SUMS) ones[v] = vdotq_s32(ones[v], weights[v], vdupq_n_s8(1));
#pragma GCC unroll 2
        for (int row = 0; row < ROWS; ++row) {
            high[row][v] = vdotq_laneq_s32(high[row][v], weights[v], inputs[row][0], LANE);
            low[row][v] = add_low<LANE>(low[row][v], weights[v], inputs[row][1]);
        }
    }
}

template <int ROWS, int KIND, bool SUMS>
inline void multiply_rows(const uint8_t* block, const int16_t* values, long stride, Ints acc[ROWS][2],
                          Quad ones) {
    Quad high[ROWS], low[ROWS];
    for (int row = 0; row < ROWS; ++row)
        for (int v = 0; v < 4; ++v) high[row][v] = low[row][v] = vdupq_n_s32(0);
    for (int half = 0; half < 2; ++half) {
        int8x16_t inputs[ROWS][2];
        for (int row = 0; row < ROWS; ++row) {
            auto* at = reinterpret_cast<const int8_t*>(values + row * stride) + half * 16;
            inputs[row][0] = vld1q_s8(at);
            inputs[row][1] = vld1q_s8(at + BLOCK);
        }
        auto four = [&](auto lane) {
            Two first = two_vectors<KIND>(block, half * 8 + lane * 2);
            Two second = two_vectors<KIND>(block, half * 8 + lane * 2 + 1);
            int8x16_t weights[4] = {first.first, first.second, second.first, second.second};
            add_four<ROWS, SUMS, lane>(weights, inputs, high, low, ones);
        };
        four(std::integral_constant<int, 0>());
        four(std::integral_constant<int, 1>());
        four(std::integral_constant<int, 2>());
        four(std::integral_constant<int, 3>());
    }
    for (int row = 0; row < ROWS; ++row) {
        int32x4_t sums[4];
        for (int v = 0; v < 4; ++v) {
            sums[v] = vaddq_s32(vshlq_n_s32(high[row][v], 8), low[row][v]);
            if constexpr (!UNSIGNED_LOW) sums[v] = vaddq_s32(sums[v], vshlq_n_s32(ones[v], 7));
        }
        acc[row][0] = {sums[0], sums[1]};
        acc[row][1] = {sums[2], sums[3]};
    }
}

template <int ROWS, int KIND, bool SUMS>
inline void multiply_passes(const uint8_t* block, const int16_t* values, long stride, Ints acc[ROWS][2],
                            Quad ones) {
    constexpr int COUNT = ROWS < PASS ? ROWS : PASS;
    multiply_rows<COUNT, KIND, SUMS>(block, values, stride, acc, ones);
    if constexpr (ROWS > COUNT)
        multiply_passes<ROWS - COUNT, KIND, false>(block, values + COUNT * stride, stride, acc + COUNT, ones);
}

// Sums of products of a block and ROWS rows, whose values are `stride` apart. `wide`: the block's
// weights unpacked.
template <int ROWS, int KIND, bool WIDE>
inline void multiply_block(const uint8_t* block, const Wide* wide, const int16_t* values, long stride,
                           Ints acc[ROWS][2]) {
    if constexpr (WIDE) {
        block = reinterpret_cast<const uint8_t*>(wide);
        multiply_block<ROWS, INT8, false>(block, nullptr, values, stride, acc);
    } else if constexpr (KIND == INT4 && ROWS > PASS) {
        Wide unpacked[BLOCK * WIDTH];
        widen(INT4, block, unpacked);
        multiply_block<ROWS, INT4, true>(nullptr, unpacked, values, stride, acc);
    } else {
        Quad ones;
        for (int v = 0; v < 4; ++v) ones[v] = vdupq_n_s32(0);
        multiply_passes<ROWS, KIND, !UNSIGNED_LOW>(block, values, stride, acc, ones);
    }
}

}  // namespace legato
