// How arm64 keeps blocks: in vectors of 16 bytes with TOGETHER inputs of an output side by side; int4
// has two such vectors in the nibbles of one.
#pragma once

namespace legato {

using Wide = int8_t;  // an unpacked weight

// Where a value is in an unpacked block.
inline int offset(int output, int input) {
    return input / TOGETHER * (TOGETHER * WIDTH) + output * TOGETHER + input % TOGETHER;
}

inline int8_t* int8_place(uint8_t* block, int output, int input) {
    return reinterpret_cast<int8_t*>(block) + offset(output, input);
}

// The byte of an int4, and how far it is shifted there.
inline uint8_t* int4_place(uint8_t* block, int output, int input, int& shift) {
    int at = offset(output, input);
    shift = at / 16 % 2 * 4;
    return block + at / 32 * 16 + at % 16;
}

struct Two {
    int8x16_t first, second;
};

// Vectors 2 * `index` and 2 * `index` + 1 of a block.
template <int KIND>
inline Two two_vectors(const uint8_t* block, int index) {
    if constexpr (KIND == INT8) {
        auto* at = reinterpret_cast<const int8_t*>(block) + index * 32;
        return {vld1q_s8(at), vld1q_s8(at + 16)};
    } else {
        uint8x16_t both = vld1q_u8(block + index * 16);
        return {vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(both, 4))};
    }
}

// Unpack the weights of a block.
inline void widen(int kind, const uint8_t* block, Wide* to) {
    for (int index = 0; index < BLOCK * WIDTH / 32; ++index) {
        Two weights = kind == INT8 ? two_vectors<INT8>(block, index) : two_vectors<INT4>(block, index);
        vst1q_s8(to + index * 32, weights.first);
        vst1q_s8(to + index * 32 + 16, weights.second);
    }
}

inline int16x8_t narrow(Ints values) { return vqmovn_high_s32(vqmovn_s32(values.low), values.high); }

}  // namespace legato
