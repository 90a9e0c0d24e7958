// Weights [outputs, inputs] in panels of 16 outputs, of which each input is one vector or two.
//
// float32   an input: 16 floats
// bfloat16  two inputs: a word of each output, the first input in the high half
// int8      32 inputs: 16 scales (half), then 512 bytes in the order that the processor's products want
// int4      32 inputs: 16 scales, 16 minima (half), then 256 bytes, likewise
//
// A weight is value * scale (int8) or value * scale + minimum (int4, 0 to 15), as in GGUF's Q8_0 and Q4_1. Kinds
// with SINGLE have float32 for half: for Q4_K, and for scales of more inputs, which each of their blocks repeats.
#pragma once

#include <algorithm>
#include <cstring>

#include "blocks.h"

namespace legato {

// Of the scales, or of the minima.
constexpr long column_bytes(int kind) { return (kind & SINGLE ? sizeof(float) : sizeof(uint16_t)) * WIDTH; }
constexpr long scale_bytes(int kind) { return column_bytes(kind) * (integers(kind) == INT8 ? 1 : 2); }
constexpr long block_bytes(int kind) {
    return scale_bytes(kind) + WIDTH * BLOCK / (integers(kind) == INT8 ? 1 : 2);
}

enum Rounding : int { TO_BF16 = 1, TO_INTEGERS = 2 };

struct Linear {
    const uint8_t* data;
    const float* bias;  // or null
    int32_t kind, inputs, outputs;

    bool rounds() const { return integers(kind) == INT8 || integers(kind) == INT4; }
    // How inputs are rounded for it: flags, 0 if they are not.
    int rounding() const { return rounds() ? TO_INTEGERS : kind == BFLOAT16 ? TO_BF16 : 0; }
    long panels() const { return (outputs + WIDTH - 1) / WIDTH; }
    long blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
    long pairs() const { return (inputs + 1) / 2; }
    long panel_bytes() const {
        switch (kind) {
            case FLOAT32: return 4L * WIDTH * inputs;
            case BFLOAT16: return 2L * WIDTH * pairs() * 2;
            default: return block_bytes(kind) * blocks();
        }
    }
    const uint8_t* panel(long index) const { return data + index * panel_bytes(); }
};

// The place of a bfloat16 in a panel. The order of a pair is that in which vdpbf16ps adds: high, then low.
inline long bf16_place(int column, long input) { return input / 2 * 2 * WIDTH + 2 * column + (1 - input % 2); }

// An output's block of integers.
struct Rounded {
    float scale, minimum;
    int8_t values[BLOCK];
};

// A weight as it comes, float32 or bfloat16; zero beyond its size.
struct Plain {
    const void* values;
    bool bf16;
    int inputs, outputs;

    float at(long output, long input) const {
        if (output >= outputs || input >= inputs) return 0.0f;
        long index = output * inputs + input;
        return bf16 ? bf16_to_float(static_cast<const uint16_t*>(values)[index])
                    : static_cast<const float*>(values)[index];
    }
    // Round what a block has.
    Rounded block(int kind, long output, long first) const;
};

// A quantised weight, a byte for each value: `groups` scales for each output, each of `group` inputs, and as
// many minima. It is zero beyond its size.
struct Coded {
    const int8_t* values;
    const float *scales, *minima;
    long group, groups;
    int inputs, outputs;

    Rounded block(int, long output, long first) const {
        Rounded block = {};
        if (output >= outputs) return block;
        long at = output * groups + first / group;
        block.scale = scales[at];
        block.minimum = minima == nullptr ? 0.0f : minima[at];
        std::memcpy(block.values, values + output * inputs + first, std::min<long>(BLOCK, inputs - first));
        return block;
    }
};

inline float rounded_to(int kind, float value) { return kind & SINGLE ? value : half_to_float(float_to_half(value)); }

inline Rounded Plain::block(int kind, long output, long first) const {
    float low = std::numeric_limits<float>::infinity(), high = -low;
    for (int i = 0; i < BLOCK; ++i) {
        low = std::min(low, at(output, first + i));
        high = std::max(high, at(output, first + i));
    }
    bool wide = integers(kind) == INT8;
    Rounded block;
    block.scale = rounded_to(kind, wide ? std::max(high, -low) / 127.0f : (high - low) / 15.0f);
    block.minimum = rounded_to(kind, wide ? 0.0f : low);
    for (int i = 0; i < BLOCK; ++i) {
        float exact = block.scale == 0.0f ? 0.0f : (at(output, first + i) - block.minimum) / block.scale;
        float least = wide ? -127.0f : 0.0f, most = wide ? 127.0f : 15.0f;
        block.values[i] = int8_t(std::nearbyint(std::min(most, std::max(least, exact))));
    }
    return block;
}

// A scale or minimum of an output: of a panel's `column`.
inline float scale_at(int kind, const uint8_t* scales, int column) {
    if (kind & SINGLE) return reinterpret_cast<const float*>(scales)[column];
    return half_to_float(reinterpret_cast<const uint16_t*>(scales)[column]);
}

inline void put_scale(int kind, uint8_t* scales, int column, float value) {
    if (kind & SINGLE) reinterpret_cast<float*>(scales)[column] = value;
    else reinterpret_cast<uint16_t*>(scales)[column] = float_to_half(value);
}

inline void pack_block(const Rounded& rounded, int kind, int column, uint8_t* block) {
    uint8_t* values = block + scale_bytes(kind);
    put_scale(kind, block, column, rounded.scale);
    if (integers(kind) == INT4) put_scale(kind, block + column_bytes(kind), column, rounded.minimum);
    for (int i = 0; i < BLOCK; ++i) {
        if (integers(kind) == INT8) {
            *int8_place(values, column, i) = rounded.values[i];
        } else {
            int shift;
            uint8_t* place = int4_place(values, column, i, shift);
            *place = uint8_t(*place | rounded.values[i] << shift);
        }
    }
}

// Fill a panel of integers with the blocks of a weight.
template <typename Weight>
inline void pack_blocks(const Weight& weight, const Linear& to, long panel, uint8_t* data) {
    uint8_t* start = data + panel * to.panel_bytes();
    if (integers(to.kind) == INT4) std::memset(start, 0, to.panel_bytes());  // two weights share a byte
    for (int column = 0; column < WIDTH; ++column)
        for (long block = 0; block < to.blocks(); ++block)
            pack_block(weight.block(to.kind, panel * WIDTH + column, block * BLOCK), to.kind, column,
                       start + block * block_bytes(to.kind));
}

// Fill a panel.
inline void pack_panel(const Plain& plain, const Linear& to, long panel, uint8_t* data) {
    if (to.rounds()) return pack_blocks(plain, to, panel, data);
    uint8_t* start = data + panel * to.panel_bytes();
    for (int column = 0; column < WIDTH; ++column) {
        long output = panel * WIDTH + column;
        if (to.kind == FLOAT32) {
            for (long input = 0; input < to.inputs; ++input)
                reinterpret_cast<float*>(start)[input * WIDTH + column] = plain.at(output, input);
        } else {
            for (long input = 0; input < 2 * to.pairs(); ++input)
                reinterpret_cast<uint16_t*>(start)[bf16_place(column, input)] = float_to_bf16(plain.at(output, input));
        }
    }
}

// One output's weights as floats.
inline void unpack_row(const Linear& from, long output, float* to) {
    auto* start = const_cast<uint8_t*>(from.panel(output / WIDTH));
    int column = int(output % WIDTH);
    for (long input = 0; input < from.inputs; ++input) {
        if (from.kind == FLOAT32) {
            to[input] = reinterpret_cast<float*>(start)[input * WIDTH + column];
        } else if (from.kind == BFLOAT16) {
            to[input] = bf16_to_float(reinterpret_cast<uint16_t*>(start)[bf16_place(column, input)]);
        } else {
            int inner = int(input % BLOCK), shift;
            uint8_t* block = start + input / BLOCK * block_bytes(from.kind);
            uint8_t* values = block + scale_bytes(from.kind);
            float scale = scale_at(from.kind, block, column);
            if (integers(from.kind) == INT8) {
                to[input] = float(*int8_place(values, column, inner)) * scale;
            } else {
                uint8_t* place = int4_place(values, column, inner, shift);
                float minimum = scale_at(from.kind, block + column_bytes(from.kind), column);
                to[input] = fmaf(float(*place >> shift & 15), scale, minimum);
            }
        }
    }
}

}  // namespace legato
