// Blocks by vpmaddwd, which adds the products of two inputs of 16 bits. It multiplies as fast as
// vpmaddubsw with the correction of signs that 8 bits need, and cannot overflow (32 * 127 * 32767 < 2^31).
//
// int8  16 times 32 bytes: two inputs of each output
// int4  8 times 32 bytes; of each word of 16 bits, which is one input of one output, the four nibbles
//       are: outputs 0 to 7 and 8 to 15 of an even pair of inputs, then of the next pair
#pragma once

namespace legato {

constexpr const char* INSTRUCTIONS = "AVX2";

using Wide = int16_t;  // an unpacked weight

inline int8_t* int8_place(uint8_t* block, int output, int input) {
    return reinterpret_cast<int8_t*>(block) + input / 2 * (2 * WIDTH) + 2 * output + input % 2;
}

// The byte of an int4, and how far it is shifted there.
inline uint8_t* int4_place(uint8_t* block, int output, int input, int& shift) {
    int pair = input / 2, nibble = pair % 2 * 2 + output / 8;
    shift = nibble % 2 * 4;
    return block + pair / 2 * 32 + 2 * (output % 8 * 2 + input % 2) + nibble / 2;
}

// Store 16 rounded inputs.
inline void put_inputs(int16_t* block, int first, Ints low, Ints high) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(block + first), packed);
}

inline void widen_int8(const uint8_t* from, __m256i& low, __m256i& high) {
    auto* at = reinterpret_cast<const __m128i*>(from);
    low = _mm256_cvtepi8_epi16(_mm_loadu_si128(at));
    high = _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1));
}

inline void widen_int4(const uint8_t* from, __m256i out[4]) {
    __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i nibble = _mm256_set1_epi16(15);
    out[0] = _mm256_and_si256(words, nibble);
    out[1] = _mm256_and_si256(_mm256_srli_epi16(words, 4), nibble);
    out[2] = _mm256_and_si256(_mm256_srli_epi16(words, 8), nibble);
    out[3] = _mm256_srli_epi16(words, 12);
}

// Unpack the weights of a block.
inline void widen(int kind, const uint8_t* block, Wide* to) {
    auto* at = reinterpret_cast<__m256i*>(to);
    for (int pair = 0; pair < BLOCK / 2; pair += kind == INT8 ? 1 : 2) {
        if (kind == INT8) widen_int8(block + pair * 2 * WIDTH, at[2 * pair], at[2 * pair + 1]);
        else widen_int4(block + pair * WIDTH, at + 2 * pair);
    }
}

template <int ROWS>
inline void add_pair(Ints acc[ROWS][2], __m256i low, __m256i high, const int16_t* values, long stride) {
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row) {
        int32_t pair;
        std::memcpy(&pair, values + row * stride, sizeof pair);
        __m256i value = _mm256_set1_epi32(pair);
        acc[row][0] = _mm256_add_epi32(acc[row][0], _mm256_madd_epi16(value, low));
        acc[row][1] = _mm256_add_epi32(acc[row][1], _mm256_madd_epi16(value, high));
        asm("" : "+x"(acc[row][0]), "+x"(acc[row][1]));  // in this order all fit into registers
    }
}

// Sums of products of a block and ROWS rows, whose values are `stride` apart. `wide`: the block's
// weights unpacked.
template <int ROWS, int KIND, bool WIDE>
inline void multiply_block(const uint8_t* block, const Wide* wide, const int16_t* values, long stride,
                           Ints acc[ROWS][2]) {
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row) acc[row][0] = acc[row][1] = no_ints();
    if constexpr (WIDE) {
        auto* at = reinterpret_cast<const __m256i*>(wide);
        for (int pair = 0; pair < BLOCK / 2; ++pair)
            add_pair<ROWS>(acc, at[2 * pair], at[2 * pair + 1], values + 2 * pair, stride);
    } else if constexpr (KIND == INT8) {
        for (int pair = 0; pair < BLOCK / 2; ++pair) {
            __m256i low, high;
            widen_int8(block + pair * 2 * WIDTH, low, high);
            add_pair<ROWS>(acc, low, high, values + 2 * pair, stride);
        }
    } else {
        for (int pair = 0; pair < BLOCK / 2; pair += 2) {
            __m256i parts[4];
            widen_int4(block + pair * WIDTH, parts);
            add_pair<ROWS>(acc, parts[0], parts[1], values + 2 * pair, stride);
            add_pair<ROWS>(acc, parts[2], parts[3], values + 2 * pair + 2, stride);
        }
    }
}

}  // namespace legato
