// Blocks by vpdpwssd (VNNI), which adds the products of two inputs of 16 bits to a sum, or by vpmaddwd and
// an addition; 16 outputs in a register. Sums are those of blocks_avx2.h, as no product or sum overflows.
//
// int8  16 times 32 bytes: two inputs of each output
// int4  4 times 64 bytes; of each word of 16 bits, which is one input of one output, the four nibbles are
//       of four pairs of inputs
#pragma once

namespace legato {

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
constexpr const char* INSTRUCTIONS = "AVX-512 with VNNI and BF16";
#elif defined(__AVX512VNNI__)
constexpr const char* INSTRUCTIONS = "AVX-512 with VNNI";
#else
constexpr const char* INSTRUCTIONS = "AVX-512";
#endif

using Wide = int16_t;  // an unpacked weight

inline int8_t* int8_place(uint8_t* block, int output, int input) {
    return reinterpret_cast<int8_t*>(block) + input / 2 * (2 * WIDTH) + 2 * output + input % 2;
}

// The byte of an int4, and how far it is shifted there.
inline uint8_t* int4_place(uint8_t* block, int output, int input, int& shift) {
    int pair = input / 2, nibble = pair % 4;
    shift = nibble % 2 * 4;
    return block + pair / 4 * 64 + 2 * (output * 2 + input % 2) + nibble / 2;
}

// Store 16 rounded inputs.
inline void put_inputs(int16_t* block, int first, Ints low, Ints high) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(block + first), packed);
}

inline __m512i widen_int8(const uint8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Four pairs of inputs.
inline void widen_int4(const uint8_t* from, __m512i out[4]) {
    const __m512i words = _mm512_loadu_si512(from), nibble = _mm512_set1_epi16(15);
    out[0] = _mm512_and_si512(words, nibble);
    out[1] = _mm512_and_si512(_mm512_srli_epi16(words, 4), nibble);
    out[2] = _mm512_and_si512(_mm512_srli_epi16(words, 8), nibble);
    out[3] = _mm512_srli_epi16(words, 12);
}

// Unpack the weights of a block.
inline void widen(int kind, const uint8_t* block, Wide* to) {
    auto* at = reinterpret_cast<__m512i*>(to);
    for (int pair = 0; pair < BLOCK / 2; pair += kind == INT8 ? 1 : 4) {
        if (kind == INT8) at[pair] = widen_int8(block + pair * 2 * WIDTH);
        else widen_int4(block + pair * WIDTH, at + pair);
    }
}

template <int ROWS, int COUNT>
inline void add_pair(Ints16 acc[COUNT][ROWS], const __m512i weights[COUNT], const int16_t* values, long stride) {
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row) {
        int32_t pair;
        std::memcpy(&pair, values + row * stride, sizeof pair);
        const __m512i value = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
        for (int p = 0; p < COUNT; ++p) {
#ifdef __AVX512VNNI__
            acc[p][row] = _mm512_dpwssd_epi32(acc[p][row], weights[p], value);
#else
            acc[p][row] = _mm512_add_epi32(acc[p][row], _mm512_madd_epi16(weights[p], value));
#endif
        }
    }
}

// Sums of products of a block of each of COUNT panels and ROWS rows, whose values are `stride` apart.
// `wide`: the blocks' weights unpacked.
template <int ROWS, int COUNT, int KIND, bool WIDE>
inline void multiply_blocks(const uint8_t* const blocks[COUNT], const Wide* const wide[COUNT], const int16_t* values,
                            long stride, Ints16 acc[COUNT][ROWS]) {
#pragma GCC unroll 2
    for (int p = 0; p < COUNT; ++p)
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) acc[p][row] = _mm512_setzero_si512();
    if constexpr (WIDE || KIND == INT8) {
#pragma GCC unroll 4
        for (int pair = 0; pair < BLOCK / 2; ++pair) {
            __m512i weights[COUNT];
#pragma GCC unroll 2
            for (int p = 0; p < COUNT; ++p)
                weights[p] = WIDE ? _mm512_loadu_si512(wide[p] + pair * 2 * WIDTH) : widen_int8(blocks[p] + pair * 2 * WIDTH);
            add_pair<ROWS, COUNT>(acc, weights, values + 2 * pair, stride);
        }
    } else {
        for (int first = 0; first < BLOCK / 2; first += 4) {
            __m512i parts[COUNT][4];
#pragma GCC unroll 2
            for (int p = 0; p < COUNT; ++p) widen_int4(blocks[p] + first * WIDTH, parts[p]);
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) {
                __m512i weights[COUNT];
#pragma GCC unroll 2
                for (int p = 0; p < COUNT; ++p) weights[p] = parts[p][part];
                add_pair<ROWS, COUNT>(acc, weights, values + 2 * (first + part), stride);
            }
        }
    }
}

}  // namespace legato
