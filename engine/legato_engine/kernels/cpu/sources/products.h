// Products of rows and packed weights.
//
// An output of a row is a sum over inputs in ascending order: of single products in float32, and for
// int8 and int4 of blocks of 32, whose sums of integers are exact. So its bits depend neither on the
// other rows nor on who computes it, nor on the processor. Inputs of int8 and int4 are rounded to 16 bits
// with a scale for each row and block, inputs of bfloat16 to bfloat16, whose products are exact in float32.
// (vdpbf16ps takes what is below 2^-126 for zero; others do not.)
#pragma once

#include "pool.h"
#include "weights.h"

namespace legato {

constexpr int MOST = 6;         // rows that share one pass over a panel in registers
constexpr int DEPTH = 320;      // inputs of a part of a panel that stays in the first cache, at most
constexpr long SLAB = long(DEPTH) * WIDTH;  // weights of such a part
constexpr int TALL = 126;       // rows whose parts stay in the second cache
constexpr int PANELS = 4;       // panels of a task of many rows

// Rows as a product reads them: floats, floats rounded to bfloat16, or integers of 16 bits with scales and
// sums of blocks.
struct Inputs {
    const float* floats;
    long stride;           // of floats
    const Narrow* narrow;  // as `put_narrow` has them
    long narrow_stride;
    const int16_t* values;  // of a block as `put_inputs` has them
    const float* scales;
    const float* totals;  // of the rounded values
    long blocks;          // of a row, for the last three

    Inputs from(long row) const {
        return {floats + row * stride, stride, narrow + row * narrow_stride, narrow_stride,
                values + row * blocks * BLOCK, scales + row * blocks, totals + row * blocks, blocks};
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

// Panels side by side, each `stride` bytes behind the one before, with sums `sums_stride` apart.
struct Across {
    const uint8_t* weights;
    long stride;
    Sums* sums;
    long sums_stride;
};

template <int ROWS, int COUNT>
inline void take(Sixteen to[COUNT][ROWS], const Across& panels) {
#pragma GCC unroll 2
    for (int p = 0; p < COUNT; ++p)
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) to[p][row] = load16(panels.sums[p * panels.sums_stride + row]);
}

template <int ROWS, int COUNT>
inline void put(const Across& panels, const Sixteen from[COUNT][ROWS]) {
#pragma GCC unroll 2
    for (int p = 0; p < COUNT; ++p)
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) store(panels.sums[p * panels.sums_stride + row], from[p][row]);
}

template <int ROWS, int COUNT>
inline void add_products(Sixteen acc[COUNT][ROWS], const Sixteen weights[COUNT], const float* const rows[ROWS], long input) {
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row) {
        Sixteen value = all16(rows[row][input]);
#pragma GCC unroll 2
        for (int p = 0; p < COUNT; ++p) acc[p][row] = fma(value, weights[p], acc[p][row]);
    }
}

// Add the products of `count` inputs from `x` on, whose rows are `stride` apart.
template <int ROWS, int COUNT>
inline void add_floats(const Across& panels, const float* x, long stride, long count) {
    Sixteen acc[COUNT][ROWS];
    take<ROWS, COUNT>(acc, panels);
    const float* rows[ROWS];
    for (int row = 0; row < ROWS; ++row) rows[row] = x + row * stride;
    for (long input = 0; input < count; ++input) {
        Sixteen weights[COUNT];
#pragma GCC unroll 2
        for (int p = 0; p < COUNT; ++p)
            weights[p] = load16(reinterpret_cast<const float*>(panels.weights + p * panels.stride) + input * WIDTH);
        add_products<ROWS, COUNT>(acc, weights, rows, input);
    }
    put<ROWS, COUNT>(panels, acc);
}

// The same of `count` pairs of inputs with weights in bfloat16.
template <int ROWS, int COUNT>
inline void add_pairs(const Across& panels, const Narrow* x, long stride, long count) {
    Sixteen acc[COUNT][ROWS];
    take<ROWS, COUNT>(acc, panels);
    const Narrow* rows[ROWS];
    for (int row = 0; row < ROWS; ++row) rows[row] = x + row * stride;
    for (long pair = 0; pair < count; ++pair) {
        const uint8_t* at = panels.weights + pair * WIDTH * 4;
#ifdef __AVX512BF16__
        __m512bh weights[COUNT];
#pragma GCC unroll 2
        for (int p = 0; p < COUNT; ++p) weights[p] = (__m512bh)_mm512_loadu_si512(at + p * panels.stride);
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) {
            int32_t both;
            std::memcpy(&both, rows[row] + 2 * pair, sizeof both);
#pragma GCC unroll 2
            for (int p = 0; p < COUNT; ++p)
                acc[p][row] = _mm512_dpbf16_ps(acc[p][row], weights[p], (__m512bh)_mm512_set1_epi32(both));
        }
#else
        Sixteen weights[COUNT];
#pragma GCC unroll 2
        for (int p = 0; p < COUNT; ++p) weights[p] = half_words<true>(at + p * panels.stride);
        add_products<ROWS, COUNT>(acc, weights, rows, 2 * pair);
#pragma GCC unroll 2
        for (int p = 0; p < COUNT; ++p) weights[p] = half_words<false>(at + p * panels.stride);
        add_products<ROWS, COUNT>(acc, weights, rows, 2 * pair + 1);
#endif
    }
    put<ROWS, COUNT>(panels, acc);
}

template <int KIND>
inline Sixteen load_scales(const uint8_t* from) {
    if constexpr ((KIND & SINGLE) != 0) return load16(reinterpret_cast<const float*>(from));
    else return load_half16(from);
}

// Add the products of `count` blocks. `wide`: their values unpacked, instead of those in `weights`.
template <int ROWS, int COUNT, int KIND, bool WIDE>
inline void add_blocks(Across panels, const Wide* wide, const Inputs& x, long first, long count) {
    const long stride = x.blocks * BLOCK;
    for (long block = 0; block < count; ++block, panels.weights += block_bytes(KIND)) {
        const int16_t* values = x.values + (first + block) * BLOCK;
        const uint8_t* blocks[COUNT];
        const Wide* unpacked[COUNT];
        for (int p = 0; p < COUNT; ++p) {
            blocks[p] = panels.weights + p * panels.stride + scale_bytes(KIND);
            unpacked[p] = WIDE ? wide + p * SLAB + block * BLOCK * WIDTH : nullptr;
        }
        Ints16 acc[COUNT][ROWS];
        multiply_blocks<ROWS, COUNT, integers(KIND), WIDE>(blocks, unpacked, values, stride, acc);
#pragma GCC unroll 2
        for (int p = 0; p < COUNT; ++p) {
            const uint8_t* scales = panels.weights + p * panels.stride;
            const Sixteen scale = load_scales<KIND>(scales);
            Sixteen minimum = all16(0.0f);
            if constexpr (integers(KIND) == INT4) minimum = load_scales<KIND>(scales + column_bytes(KIND));
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                long at = row * x.blocks + first + block;
                float* to = panels.sums[p * panels.sums_stride + row];
                Sixteen factor = scale * all16(x.scales[at]);
                Sixteen next = fma(to_floats(acc[p][row]), factor, load16(to));
                if constexpr (integers(KIND) == INT4) next = fma(minimum, all16(x.totals[at]), next);
                store(to, next);
            }
        }
    }
}

template <int ROWS>
inline void add(const Linear& w, const Across& panel, const Inputs& x) {
    switch (w.kind) {
        case FLOAT32: return add_floats<ROWS, 1>(panel, x.floats, x.stride, w.inputs);
        case BFLOAT16: return add_pairs<ROWS, 1>(panel, x.narrow, x.narrow_stride, w.pairs());
        case INT8: return add_blocks<ROWS, 1, INT8, false>(panel, nullptr, x, 0, w.blocks());
        case INT8_SINGLE: return add_blocks<ROWS, 1, INT8_SINGLE, false>(panel, nullptr, x, 0, w.blocks());
        case INT4_SINGLE: return add_blocks<ROWS, 1, INT4_SINGLE, false>(panel, nullptr, x, 0, w.blocks());
        default: return add_blocks<ROWS, 1, INT4, false>(panel, nullptr, x, 0, w.blocks());
    }
}

// Parts of panels side by side, unpacked for many rows where that helps.
struct Slab {
    const uint8_t* weights;  // floats, pairs, or the panel's blocks for their scales
    long stride;             // bytes between panels
    const Wide* wide;
    long first, count;  // inputs, or blocks
};

inline Slab unpack(const Linear& w, long panel, long panels, long input, long depth, Scratch& scratch) {
    const long count = std::min(depth, w.inputs - input);
    const uint8_t* start = w.panel(panel);
    if (w.kind == FLOAT32) return {start + input * WIDTH * 4, w.panel_bytes(), nullptr, input, count};
    if (w.kind == BFLOAT16) {
        start += input * WIDTH * 2;
#ifdef __AVX512BF16__
        return {start, w.panel_bytes(), nullptr, input, count};
#else
        float* to = scratch.room<float>(ACROSS * SLAB);
        for (long p = 0; p < panels; ++p) {
            for (long i = 0; i < count; i += 2) {
                const uint8_t* from = start + p * w.panel_bytes() + i * WIDTH * 2;
                store(to + p * SLAB + i * WIDTH, half_words<true>(from));
                store(to + p * SLAB + (i + 1) * WIDTH, half_words<false>(from));
            }
        }
        return {reinterpret_cast<uint8_t*>(to), SLAB * 4, nullptr, input, count};
#endif
    }
    const long first = input / BLOCK, blocks = (count + BLOCK - 1) / BLOCK;
    Wide* to = scratch.room<Wide>(ACROSS * SLAB);
    start += first * block_bytes(w.kind);
    for (long p = 0; p < panels; ++p) {
        const uint8_t* from = start + p * w.panel_bytes() + scale_bytes(w.kind);
        for (long block = 0; block < blocks; ++block)
            widen(integers(w.kind), from + block * block_bytes(w.kind), to + p * SLAB + block * BLOCK * WIDTH);
    }
    return {start, w.panel_bytes(), to, first, blocks};
}

template <int ROWS, int COUNT>
inline void add_slab(const Linear& w, const Slab& slab, const Inputs& x, Sums* sums, long sums_stride) {
    const Across panels{slab.weights, slab.stride, sums, sums_stride};
    switch (w.kind) {
        case FLOAT32: return add_floats<ROWS, COUNT>(panels, x.floats + slab.first, x.stride, slab.count);
#ifdef __AVX512BF16__
        case BFLOAT16:
            return add_pairs<ROWS, COUNT>(panels, x.narrow + slab.first, x.narrow_stride, (slab.count + 1) / 2);
#else
        case BFLOAT16: return add_floats<ROWS, COUNT>(panels, x.narrow + slab.first, x.narrow_stride, slab.count);
#endif
        case INT8: return add_blocks<ROWS, COUNT, INT8, true>(panels, slab.wide, x, slab.first, slab.count);
        case INT8_SINGLE:
            return add_blocks<ROWS, COUNT, INT8_SINGLE, true>(panels, slab.wide, x, slab.first, slab.count);
        case INT4_SINGLE:
            return add_blocks<ROWS, COUNT, INT4_SINGLE, true>(panels, slab.wide, x, slab.first, slab.count);
        default: return add_blocks<ROWS, COUNT, INT4, true>(panels, slab.wide, x, slab.first, slab.count);
    }
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

// Call `add(panels, first panel)` with compile-time numbers of panels, as many at a time as there may be.
template <typename Add>
inline void by_panels(long panels, const Add& add) {
    long panel = 0;
    for (; panel + ACROSS <= panels; panel += ACROSS) add(std::integral_constant<int, ACROSS>(), panel);
    for (; panel < panels; ++panel) add(std::integral_constant<int, 1>(), panel);
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

// One panel after the other: side by side they are read from memory more slowly.
inline void few_rows(const Linear& w, const Inputs& x, long rows, const Outputs& out, long panel) {
    alignas(64) Sums sums[MOST] = {};
    const Across one{w.panel(panel), 0, sums, 0};
    by_groups(rows, [&](auto count, long) { add<count>(w, one, x); });
    finish(w, panel, sums, rows, 0, out);
}

inline void many_rows(Thread& thread, const Linear& w, const Inputs& all_rows, long first, long rows,
                      const Outputs& out, long first_panel, long panels) {
    Sums* sums = thread.sums.room<Sums>(PANELS * rows);
    std::memset(sums, 0, sizeof(Sums) * panels * rows);
    const long parts = (w.inputs + DEPTH - 1) / DEPTH, blocks = (w.blocks() + parts - 1) / parts;
    for (long input = 0; input < w.inputs; input += blocks * BLOCK) {
        by_panels(panels, [&](auto across, long panel) {
            Slab slab = unpack(w, first_panel + panel, across, input, blocks * BLOCK, thread.slab);
            by_groups(rows, [&](auto count, long row) {
                add_slab<count, across>(w, slab, all_rows.from(first + row), sums + panel * rows + row, rows);
            });
        });
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
