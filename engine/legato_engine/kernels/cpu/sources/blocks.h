// Blocks of 32 inputs with integers for weights: how these lie in a panel, and their exact products
// with inputs of 16 bits, by the instructions of this processor.
#pragma once

#include "vectors.h"

namespace legato {

constexpr int WIDTH = 16;  // outputs of a panel
constexpr int BLOCK = 32;  // inputs that share a scale

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, SINGLE = 4, INT8_SINGLE = 6, INT4_SINGLE = 7 };

// The integers of a kind, whose scales are halves, or floats with SINGLE.
constexpr int integers(int kind) { return kind & ~SINGLE; }

}  // namespace legato

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "blocks_avx512.h"
#elif !defined(__aarch64__)
#include "blocks_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "blocks_dotprod.h"
#else
#include "blocks_neon.h"
#endif

#if !defined(__AVX512F__)
namespace legato {

// `multiply_block` for one panel.
template <int ROWS, int COUNT, int KIND, bool WIDE>
inline void multiply_blocks(const uint8_t* const blocks[COUNT], const Wide* const wide[COUNT], const int16_t* values,
                            long stride, Ints16 acc[COUNT][ROWS]) {
    static_assert(COUNT == 1);
    multiply_block<ROWS, KIND, WIDE>(blocks[0], wide[0], values, stride, acc[0]);
}

}  // namespace legato
#endif
