// Products of rows and packed weights.
//
// An output of a row is a sum over inputs in ascending order: of single products in float32, and for
// int8 and int4 of blocks of 32, whose sums of integers are exact. So its bits depend neither on the
// other rows nor on who computes it. Inputs of int8 and int4 are rounded to 16 bits with a scale for
// each row and block.
#pragma once

#include "pool.h"
#include "weights.h"

namespace legato {

constexpr int MOST = 6;         // rows that share one pass over a panel in registers
constexpr int DEPTH = 320;      // inputs of a part of a panel that stays in the first cache, at most
constexpr int TALL = 126;       // rows whose parts stay in the second cache
constexpr int PANELS = 4;       // panels of a task of many rows

// Rows as a product reads them: floats, or integers of 16 bits with scales and sums of blocks.
struct Inputs {
    const float* floats;
    long stride;  // of floats
    const int16_t* values;  // of a block as `put_inputs` has them
    const float* scales;
    const float* totals;  // of the rounded values
    long blocks;          // of a row, for all three

    Inputs from(long row) const {
        return {floats + row * stride, stride, values + row * blocks * BLOCK, scales + row * blocks,
                totals + row * blocks, blocks};
    }
};

struct Block16 {
    float scale, total;
};

// Round a block to 16 bits. What is not finite makes the scale NaN.
inline Block16 round_inputs(const float* from, int count, int16_t* to) {
    float padded[BLOCK];
    if (count < BLOCK) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, from, sizeof(float) * count);
        from = padded;
    }
    Floats most = zero(), odd = zero();
    for (int i = 0; i < BLOCK; i += LANES) {
        Floats x = load(from + i);
        most = larger(most, absolute(x));
        odd = odd + (x - x);
    }
    float high = largest(most);
    Floats factor = all(high > 0.0f ? 32767.0f / high : 0.0f);
    Ints whole = no_ints();
    for (int i = 0; i < BLOCK; i += 2 * LANES) {
        Ints low = to_ints(load(from + i) * factor), next = to_ints(load(from + i + LANES) * factor);
        whole = add(whole, add(low, next));
        put_inputs(to, i, low, next);
    }
    float scale = high / 32767.0f + sum(odd);
    return {scale, scale * float(sum(whole))};
}

using Sums = float[WIDTH];  // of one row and panel

template <int ROWS>
inline void take(Floats to[ROWS][2], const Sums* from) {
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row) {
        to[row][0] = load(from[row]);
        to[row][1] = load(from[row] + LANES);
    }
}

template <int ROWS>
inline void put(Sums* to, const Floats from[ROWS][2]) {
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row) {
        store(to[row], from[row][0]);
        store(to[row] + LANES, from[row][1]);
    }
}

// Add the products of `count` inputs.
template <int ROWS, int KIND>
inline void add_floats(const uint8_t* weights, const Inputs& x, long first, long count, Sums* sums) {
    Floats acc[ROWS][2];
    take<ROWS>(acc, sums);
    const float* rows[ROWS];
    for (int row = 0; row < ROWS; ++row) rows[row] = x.floats + row * x.stride + first;
    for (long input = 0; input < count; ++input) {
        Floats low, high;
        if constexpr (KIND == FLOAT32) {
            const float* at = reinterpret_cast<const float*>(weights) + input * WIDTH;
            low = load(at);
            high = load(at + LANES);
        } else {
            split_bf16(weights + input * WIDTH * 2, low, high);
        }
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) {
            Floats value = all(rows[row][input]);
            acc[row][0] = fma(value, low, acc[row][0]);
            acc[row][1] = fma(value, high, acc[row][1]);
        }
    }
    put<ROWS>(sums, acc);
}

// Add the products of `count` blocks. `wide`: their values unpacked, instead of those in `weights`.
template <int ROWS, int KIND, bool WIDE>
inline void add_blocks(const uint8_t* weights, const Wide* wide, const Inputs& x, long first,
                       long count, Sums* sums) {
    const long stride = x.blocks * BLOCK;
    for (long block = 0; block < count; ++block, weights += block_bytes(KIND)) {
        const int16_t* values = x.values + (first + block) * BLOCK;
        const Wide* unpacked = WIDE ? wide + block * BLOCK * WIDTH : nullptr;
        Ints acc[ROWS][2];
        multiply_block<ROWS, KIND, WIDE>(weights + scale_bytes(KIND), unpacked, values, stride, acc);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            Floats scale = load_half(weights + half * 2 * LANES);
            Floats minimum = zero();
            if constexpr (KIND == INT4) minimum = load_half(weights + 2 * WIDTH + half * 2 * LANES);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                long at = row * x.blocks + first + block;
                float* to = sums[row] + half * LANES;
                Floats factor = scale * all(x.scales[at]);
                Floats next = fma(to_floats(acc[row][half]), factor, load(to));
                if constexpr (KIND == INT4) next = fma(minimum, all(x.totals[at]), next);
                store(to, next);
            }
        }
    }
}

template <int ROWS>
inline void add(const Linear& w, const uint8_t* panel, const Inputs& x, Sums* sums) {
    switch (w.kind) {
        case FLOAT32: return add_floats<ROWS, FLOAT32>(panel, x, 0, w.inputs, sums);
        case BFLOAT16: return add_floats<ROWS, BFLOAT16>(panel, x, 0, w.inputs, sums);
        case INT8: return add_blocks<ROWS, INT8, false>(panel, nullptr, x, 0, w.blocks(), sums);
        default: return add_blocks<ROWS, INT4, false>(panel, nullptr, x, 0, w.blocks(), sums);
    }
}

// Part of a panel, unpacked for many rows.
struct Slab {
    const uint8_t* weights;  // floats, or the panel's blocks for their scales
    const Wide* wide;
    long first, count;  // inputs, or blocks
};

inline Slab unpack(const Linear& w, const uint8_t* panel, long input, long depth, Scratch& scratch) {
    long count = std::min(depth, w.inputs - input);
    if (w.kind == FLOAT32) return {panel + input * WIDTH * 4, nullptr, input, count};
    if (w.kind == BFLOAT16) {
        float* to = scratch.room<float>(DEPTH * WIDTH);
        for (long i = 0; i < count; ++i) {
            Floats low, high;
            split_bf16(panel + (input + i) * WIDTH * 2, low, high);
            store(to + i * WIDTH, low);
            store(to + i * WIDTH + LANES, high);
        }
        return {reinterpret_cast<uint8_t*>(to), nullptr, input, count};
    }
    long first = input / BLOCK, blocks = (count + BLOCK - 1) / BLOCK;
    Wide* to = scratch.room<Wide>(DEPTH * WIDTH);
    const uint8_t* start = panel + first * block_bytes(w.kind);
    for (long block = 0; block < blocks; ++block)
        widen(w.kind, start + block * block_bytes(w.kind) + scale_bytes(w.kind), to + block * BLOCK * WIDTH);
    return {start, to, first, blocks};
}

template <int ROWS>
inline void add_slab(const Linear& w, const Slab& slab, const Inputs& x, Sums* sums) {
    if (!w.rounds())
        add_floats<ROWS, FLOAT32>(slab.weights, x, slab.first, slab.count, sums);
    else if (w.kind == INT8)
        add_blocks<ROWS, INT8, true>(slab.weights, slab.wide, x, slab.first, slab.count, sums);
    else
        add_blocks<ROWS, INT4, true>(slab.weights, slab.wide, x, slab.first, slab.count, sums);
}

// Call `add(rows, first row)` with compile-time numbers of rows that differ by one at most.
template <typename Add>
inline void by_groups(long rows, const Add& add) {
    long groups = (rows + MOST - 1) / MOST, row = 0;
    for (long group = 0; group < groups; ++group) {
        long count = rows / groups + (group < rows % groups);
        switch (count) {
            case 1: add(std::integral_constant<int, 1>(), row); break;
            case 2: add(std::integral_constant<int, 2>(), row); break;
            case 3: add(std::integral_constant<int, 3>(), row); break;
            case 4: add(std::integral_constant<int, 4>(), row); break;
            case 5: add(std::integral_constant<int, 5>(), row); break;
            default: add(std::integral_constant<int, 6>(), row); break;
        }
        row += count;
    }
}

// Where a product goes: `values` plus bias, or added to what is there.
struct Outputs {
    float* values;
    long stride;
    bool adds;
};

inline void finish(const Linear& w, long panel, const Sums* sums, long rows, long first, const Outputs& out) {
    long column = panel * WIDTH;
    long width = std::min<long>(WIDTH, w.outputs - column);
    float bias[WIDTH] = {};
    if (w.bias != nullptr) std::memcpy(bias, w.bias + column, sizeof(float) * width);
    for (long row = 0; row < rows; ++row) {
        float* to = out.values + (first + row) * out.stride + column;
        for (long i = 0; i < WIDTH && width == WIDTH; i += LANES) {
            Floats value = load(sums[row] + i) + load(bias + i);
            store(to + i, out.adds ? load(to + i) + value : value);
        }
        for (long i = 0; i < width && width < WIDTH; ++i) {
            float value = sums[row][i] + bias[i];
            to[i] = out.adds ? to[i] + value : value;
        }
    }
}

inline void few_rows(const Linear& w, const Inputs& x, long rows, const Outputs& out, long panel) {
    alignas(32) Sums sums[MOST] = {};
    by_groups(rows, [&](auto count, long) { add<count>(w, w.panel(panel), x, sums); });
    finish(w, panel, sums, rows, 0, out);
}

inline void many_rows(Thread& thread, const Linear& w, const Inputs& all_rows, long first, long rows,
                      const Outputs& out, long first_panel, long panels) {
    Sums* sums = thread.sums.room<Sums>(PANELS * rows);
    std::memset(sums, 0, sizeof(Sums) * panels * rows);
    const long parts = (w.inputs + DEPTH - 1) / DEPTH, blocks = (w.blocks() + parts - 1) / parts;
    for (long input = 0; input < w.inputs; input += blocks * BLOCK) {
        for (long panel = 0; panel < panels; ++panel) {
            Slab slab = unpack(w, w.panel(first_panel + panel), input, blocks * BLOCK, thread.slab);
            by_groups(rows, [&](auto count, long row) {
                add_slab<count>(w, slab, all_rows.from(first + row), sums + panel * rows + row);
            });
        }
    }
    for (long panel = 0; panel < panels; ++panel)
        finish(w, first_panel + panel, sums + panel * rows, rows, first, out);
}

// The tasks of a product, for `Pool::share`.
class Product {
   public:
    Product(const Linear& w, const Inputs& x, long rows, const Outputs& out, int threads)
        : w_(w), x_(x), rows_(rows), out_(out) {
        if (rows <= MOST) {
            panels_ = std::max(1L, w.panels() / (8L * threads));
            tall_ = rows;
        } else {
            panels_ = PANELS;
            long parts = (rows + TALL - 1) / TALL;
            tall_ = ((rows + parts - 1) / parts + MOST - 1) / MOST * MOST;
        }
        across_ = (w.panels() + panels_ - 1) / panels_;
        down_ = (rows + tall_ - 1) / tall_;
    }

    long count() const { return across_ * down_; }

    void operator()(Thread& thread, long task) const {
        long first = task / down_ * panels_, row = task % down_ * tall_;
        long panels = std::min(panels_, w_.panels() - first);
        if (rows_ <= MOST) {
            for (long panel = first; panel < first + panels; ++panel) few_rows(w_, x_, rows_, out_, panel);
        } else {
            many_rows(thread, w_, x_, row, std::min(tall_, rows_ - row), out_, first, panels);
        }
    }

   private:
    const Linear& w_;
    const Inputs& x_;
    long rows_;
    Outputs out_;
    long panels_, tall_, across_, down_;
};

}  // namespace legato
