// What happens to a row between products.
#pragma once

#include "attention.h"
#include "products.h"

namespace legato {

// An RMS norm, with a bias a layer norm; none without a weight.
struct Norm {
    const float* weight;
    const float* bias;
    float epsilon;
};

inline void norm_row(const Norm& norm, const float* from, long width, float* to) {
    long whole = width / LANES * LANES;
    float mean = 0.0f;
    Floats total = zero();
    if (norm.bias != nullptr) {
        for (long i = 0; i < whole; i += LANES) total = total + load(from + i);
        mean = sum(total);
        for (long i = whole; i < width; ++i) mean += from[i];
        mean /= float(width);
    }
    total = zero();
    for (long i = 0; i < whole; i += LANES) {
        Floats x = load(from + i) - all(mean);
        total = fma(x, x, total);
    }
    float squares = sum(total);
    for (long i = whole; i < width; ++i) squares += (from[i] - mean) * (from[i] - mean);
    float factor = 1.0f / std::sqrt(squares / float(width) + norm.epsilon);
    for (long i = 0; i < whole; i += LANES) {
        Floats x = (load(from + i) - all(mean)) * all(factor);
        Floats bias = norm.bias == nullptr ? zero() : load(norm.bias + i);
        store(to + i, fma(x, load(norm.weight + i), bias));
    }
    for (long i = whole; i < width; ++i) {
        float bias = norm.bias == nullptr ? 0.0f : norm.bias[i];
        to[i] = fmaf((from[i] - mean) * factor, norm.weight[i], bias);
    }
}

// Rotate the pairs (i, i + half) of a head; the tables are a position's.
inline void rotate(float* head, const float* cosine, const float* sine, int half) {
    for (int i = 0; i < half; ++i) {
        float first = head[i], second = head[i + half];
        head[i] = first * cosine[i] - second * sine[i];
        head[i + half] = first * sine[i] + second * cosine[i];
    }
}

// Write a head's keys or values to a cache.
inline void keep(void* cache, bool bf16, long at, const float* from, int dims) {
    if (!bf16) {
        std::memcpy(static_cast<float*>(cache) + at, from, sizeof(float) * dims);
        return;
    }
    auto* to = static_cast<uint16_t*>(cache) + at;
    for (int i = 0; i < dims; ++i) to[i] = float_to_bf16(from[i]);
}

// Activations of `width` values, which with `gated` are two halves: silu of the first, times the second.
inline void activate(const float* from, long width, bool gated, float* to) {
    float padded[LANES];
    for (long i = 0; i < width; i += LANES) {
        long count = std::min<long>(LANES, width - i);
        Floats x, up = zero();
        if (count == LANES) {
            x = load(from + i);
            if (gated) up = load(from + width + i);
        } else {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, from + i, sizeof(float) * count);
            x = load(padded);
            if (gated) {
                std::memcpy(padded, from + width + i, sizeof(float) * count);
                up = load(padded);
            }
        }
        Floats value = gated ? silu(x) * up : gelu(x);
        if (count == LANES) {
            store(to + i, value);
        } else {
            store(padded, value);
            std::memcpy(to + i, padded, sizeof(float) * count);
        }
    }
}

// Rows of a width as inputs of products, in memory that lasts until the room is prepared again.
class Prepared {
   public:
    // `floats`: where the rows are; null: rows of the room, which `row` returns.
    Prepared(InputRoom& room, long rows, long width, const float* floats = nullptr, long stride = 0)
        : width_(width), blocks_((width + BLOCK - 1) / BLOCK) {
        own_ = floats == nullptr ? room.floats.room<float>(rows * width) : nullptr;
        narrow_width_ = (width + 1) / 2 * 2;
        narrow_ = room.narrow.room<Narrow>(rows * narrow_width_);
        values_ = room.values.room<int16_t>(rows * blocks_ * BLOCK);
        scales_ = room.scales.room<float>(rows * blocks_);
        totals_ = room.totals.room<float>(rows * blocks_);
        const float* start = own_ != nullptr ? own_ : floats;
        inputs_ = {start,   own_ != nullptr ? width : stride, narrow_, narrow_width_, values_, scales_,
                   totals_, blocks_};
    }

    float* row(long index) const { return own_ + index * width_; }
    const Inputs& inputs() const { return inputs_; }

    void round(long row, int rounding) const {
        const float* from = inputs_.floats + row * inputs_.stride;
        if (rounding & TO_BF16) put_narrow(from, width_, narrow_ + row * narrow_width_);
        if ((rounding & TO_INTEGERS) == 0) return;
        for (long block = 0; block < blocks_; ++block) {
            long at = row * blocks_ + block;
            int count = int(std::min<long>(BLOCK, width_ - block * BLOCK));
            Block16 rounded = round_inputs(from + block * BLOCK, count, values_ + at * BLOCK);
            scales_[at] = rounded.scale;
            totals_[at] = rounded.total;
        }
    }

   private:
    long width_, blocks_, narrow_width_;
    Narrow* narrow_;
    float* own_;
    int16_t* values_;
    float *scales_, *totals_;
    Inputs inputs_;
};

}  // namespace legato
