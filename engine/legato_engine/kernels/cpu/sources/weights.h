// Weights [outputs, inputs] in panels of 16 outputs, of which each input is one vector or two.
//
// float32   an input: 16 floats
// bfloat16  an input: 8 words of two outputs, o in the low half and o + 8 in the high one
// int8      32 inputs: 16 scales (half), then two inputs of each output in 16 times 32 bytes
// int4      32 inputs: 16 scales, 16 minima (half), then 8 times 32 bytes; of each word of 16 bits,
//           which is one input of one output, the four nibbles are: outputs 0 to 7 and 8 to 15 of an
//           even pair of inputs, then of the next pair
//
// A weight is value * scale (int8, -127 to 127) or value * scale + minimum (int4, 0 to 15): as in
// GGUF's Q8_0 and Q4_1, whose values are found again.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace legato {

constexpr int WIDTH = 16;  // outputs of a panel
constexpr int BLOCK = 32;  // inputs that share a scale

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

constexpr long INT8_BLOCK = 2 * WIDTH + WIDTH * BLOCK;
constexpr long INT4_BLOCK = 4 * WIDTH + WIDTH * BLOCK / 2;

struct Linear {
    const uint8_t* data;
    const float* bias;  // or null
    int32_t kind, inputs, outputs;

    bool rounds() const { return kind == INT8 || kind == INT4; }
    long panels() const { return (outputs + WIDTH - 1) / WIDTH; }
    long blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
    long panel_bytes() const {
        switch (kind) {
            case FLOAT32: return 4L * WIDTH * inputs;
            case BFLOAT16: return 2L * WIDTH * inputs;
            case INT8: return INT8_BLOCK * blocks();
            default: return INT4_BLOCK * blocks();
        }
    }
    const uint8_t* panel(long index) const { return data + index * panel_bytes(); }
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
};

struct Rounded {
    uint16_t scale, minimum;
    int8_t values[BLOCK];
};

inline Rounded round_block(const Plain& plain, int kind, long output, long first) {
    float low = std::numeric_limits<float>::infinity(), high = -low;
    for (int i = 0; i < BLOCK; ++i) {
        low = std::min(low, plain.at(output, first + i));
        high = std::max(high, plain.at(output, first + i));
    }
    bool wide = kind == INT8;
    Rounded block;
    block.scale = float_to_half(wide ? std::max(high, -low) / 127.0f : (high - low) / 15.0f);
    block.minimum = float_to_half(wide ? 0.0f : low);
    float scale = half_to_float(block.scale), minimum = half_to_float(block.minimum);
    for (int i = 0; i < BLOCK; ++i) {
        float exact = scale == 0.0f ? 0.0f : (plain.at(output, first + i) - minimum) / scale;
        float least = wide ? -127.0f : 0.0f, most = wide ? 127.0f : 15.0f;
        block.values[i] = int8_t(std::nearbyint(std::min(most, std::max(least, exact))));
    }
    return block;
}

inline int8_t* int8_place(uint8_t* block, int output, int input) {
    return reinterpret_cast<int8_t*>(block) + 2 * WIDTH + input / 2 * (2 * WIDTH) + 2 * output + input % 2;
}

// The byte of an int4, and how far it is shifted there.
inline uint8_t* int4_place(uint8_t* block, int output, int input, int& shift) {
    int pair = input / 2, nibble = pair % 2 * 2 + output / 8;
    shift = nibble % 2 * 4;
    return block + 4 * WIDTH + pair / 2 * 32 + 2 * (output % 8 * 2 + input % 2) + nibble / 2;
}

inline void pack_block(const Plain& plain, int kind, long output, long first, uint8_t* block) {
    Rounded rounded = round_block(plain, kind, output, first);
    auto* scales = reinterpret_cast<uint16_t*>(block);
    int column = int(output % WIDTH);
    scales[column] = rounded.scale;
    if (kind == INT4) scales[WIDTH + column] = rounded.minimum;
    for (int i = 0; i < BLOCK; ++i) {
        if (kind == INT8) {
            *int8_place(block, column, i) = rounded.values[i];
        } else {
            int shift;
            uint8_t* place = int4_place(block, column, i, shift);
            *place = uint8_t(*place | rounded.values[i] << shift);
        }
    }
}

// Fill a panel, whose memory is zero.
inline void pack_panel(const Plain& plain, const Linear& to, long panel, uint8_t* data) {
    uint8_t* start = data + panel * to.panel_bytes();
    for (int column = 0; column < WIDTH; ++column) {
        long output = panel * WIDTH + column;
        if (to.rounds()) {
            long size = to.kind == INT8 ? INT8_BLOCK : INT4_BLOCK;
            for (long block = 0; block < to.blocks(); ++block)
                pack_block(plain, to.kind, output, block * BLOCK, start + block * size);
            continue;
        }
        for (long input = 0; input < to.inputs; ++input) {
            float value = plain.at(output, input);
            if (to.kind == FLOAT32)
                reinterpret_cast<float*>(start)[input * WIDTH + column] = value;
            else
                reinterpret_cast<uint16_t*>(start)[input * WIDTH + column % 8 * 2 + column / 8] =
                    float_to_bf16(value);
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
            long at = input * WIDTH + column % 8 * 2 + column / 8;
            to[input] = bf16_to_float(reinterpret_cast<uint16_t*>(start)[at]);
        } else {
            int inner = int(input % BLOCK), shift;
            uint8_t* block = start + input / BLOCK * (from.kind == INT8 ? INT8_BLOCK : INT4_BLOCK);
            auto* scales = reinterpret_cast<uint16_t*>(block);
            float scale = half_to_float(scales[column]);
            if (from.kind == INT8) {
                to[input] = float(*int8_place(block, column, inner)) * scale;
            } else {
                uint8_t* place = int4_place(block, column, inner, shift);
                to[input] = fmaf(float(*place >> shift & 15), scale, half_to_float(scales[WIDTH + column]));
            }
        }
    }
}

}  // namespace legato
