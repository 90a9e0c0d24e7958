// Products of rows and packed weights.
//
// An output of a row is a sum over inputs in ascending order: of single products in float32, and for
// int8 and int4 of blocks of 32, whose sums of integers are exact. So its bits depend neither on the
// other rows nor on who computes it. Inputs of int8 and int4 are rounded to 16 bits with a scale for
// each row and block: vpmaddwd multiplies as fast as vpmaddubsw with the correction of signs that
// 8 bits need, and cannot overflow (32 * 127 * 32767 < 2^31).
#pragma once

#include "pool.h"
#include "weights.h"

namespace legato {

constexpr int MOST = 6;         // rows that share one pass over a panel in registers
constexpr int DEPTH = 256;      // inputs of a part of a panel that stays in the first cache
constexpr int TALL = 126;       // rows whose parts stay in the second cache
constexpr int PANELS = 4;       // panels of a task of many rows

// Rows as a product reads them: floats, or integers of 16 bits with scales and sums of blocks.
struct Inputs {
    const float* floats;
    long stride;  // of floats
    const int16_t* values;
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
    const Floats sign = all(-0.0f);
    Floats most = zero(), odd = zero();
    for (int i = 0; i < BLOCK; i += LANES) {
        Floats x = load(from + i);
        most = _mm256_max_ps(most, _mm256_andnot_ps(sign, x));
        odd = _mm256_add_ps(odd, _mm256_sub_ps(x, x));
    }
    float high = largest(most);
    Floats factor = all(high > 0.0f ? 32767.0f / high : 0.0f);
    __m256i whole = _mm256_setzero_si256();
    for (int i = 0; i < BLOCK; i += 2 * LANES) {
        __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(load(from + i), factor));
        __m256i next = _mm256_cvtps_epi32(_mm256_mul_ps(load(from + i + LANES), factor));
        whole = _mm256_add_epi32(whole, _mm256_add_epi32(low, next));
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, next), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), packed);
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
            __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights) + input);
            low = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
            high = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))));
        }
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) {
            Floats value = _mm256_broadcast_ss(rows[row] + input);
            acc[row][0] = fma(value, low, acc[row][0]);
            acc[row][1] = fma(value, high, acc[row][1]);
        }
    }
    put<ROWS>(sums, acc);
}

template <int ROWS>
inline void add_pair(__m256i acc[ROWS][2], __m256i low, __m256i high, const int16_t* values, long stride) {
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

constexpr long block_bytes(int kind) { return kind == INT8 ? INT8_BLOCK : INT4_BLOCK; }

// Add the products of `count` blocks. `wide`: their values in 16 bits, instead of those in `weights`.
template <int ROWS, int KIND, bool WIDE>
inline void add_blocks(const uint8_t* weights, const int16_t* wide, const Inputs& x, long first,
                       long count, Sums* sums) {
    const long stride = x.blocks * BLOCK;
    for (long block = 0; block < count; ++block, weights += block_bytes(KIND)) {
        const int16_t* values = x.values + (first + block) * BLOCK;
        __m256i acc[ROWS][2];
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) acc[row][0] = acc[row][1] = _mm256_setzero_si256();
        if constexpr (WIDE) {
            auto* at = reinterpret_cast<const __m256i*>(wide + block * BLOCK * WIDTH);
            for (int pair = 0; pair < BLOCK / 2; ++pair)
                add_pair<ROWS>(acc, _mm256_load_si256(at + 2 * pair),
                               _mm256_load_si256(at + 2 * pair + 1), values + 2 * pair, stride);
        } else if constexpr (KIND == INT8) {
            for (int pair = 0; pair < BLOCK / 2; ++pair) {
                __m256i low, high;
                widen_int8(weights + 2 * WIDTH + pair * 2 * WIDTH, low, high);
                add_pair<ROWS>(acc, low, high, values + 2 * pair, stride);
            }
        } else {
            for (int pair = 0; pair < BLOCK / 2; pair += 2) {
                __m256i parts[4];
                widen_int4(weights + 4 * WIDTH + pair * WIDTH, parts);
                add_pair<ROWS>(acc, parts[0], parts[1], values + 2 * pair, stride);
                add_pair<ROWS>(acc, parts[2], parts[3], values + 2 * pair + 2, stride);
            }
        }
        auto* halves = reinterpret_cast<const __m128i*>(weights);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            Floats scale = _mm256_cvtph_ps(_mm_loadu_si128(halves + half));
            Floats minimum = zero();
            if constexpr (KIND == INT4) minimum = _mm256_cvtph_ps(_mm_loadu_si128(halves + 2 + half));
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                long at = row * x.blocks + first + block;
                float* to = sums[row] + half * LANES;
                Floats factor = _mm256_mul_ps(scale, all(x.scales[at]));
                Floats next = fma(_mm256_cvtepi32_ps(acc[row][half]), factor, load(to));
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
    const int16_t* wide;
    long first, count;  // inputs, or blocks
};

inline Slab unpack(const Linear& w, const uint8_t* panel, long input, Scratch& scratch) {
    long count = std::min<long>(DEPTH, w.inputs - input);
    if (w.kind == FLOAT32) return {panel + input * WIDTH * 4, nullptr, input, count};
    if (w.kind == BFLOAT16) {
        float* to = scratch.room<float>(DEPTH * WIDTH);
        auto* words = reinterpret_cast<const __m256i*>(panel) + input;
        for (long i = 0; i < count; ++i) {
            __m256i both = _mm256_loadu_si256(words + i);
            store(to + i * WIDTH, _mm256_castsi256_ps(_mm256_slli_epi32(both, 16)));
            both = _mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000)));
            store(to + i * WIDTH + LANES, _mm256_castsi256_ps(both));
        }
        return {reinterpret_cast<uint8_t*>(to), nullptr, input, count};
    }
    long first = input / BLOCK, blocks = (count + BLOCK - 1) / BLOCK;
    auto* to = reinterpret_cast<__m256i*>(scratch.room<int16_t>(DEPTH * WIDTH));
    const uint8_t* start = panel + first * block_bytes(w.kind);
    for (long block = 0; block < blocks; ++block) {
        const uint8_t* from = start + block * block_bytes(w.kind);
        __m256i* at = to + block * BLOCK;
        for (int pair = 0; pair < BLOCK / 2; pair += w.kind == INT8 ? 1 : 2) {
            if (w.kind == INT8)
                widen_int8(from + 2 * WIDTH + pair * 2 * WIDTH, at[2 * pair], at[2 * pair + 1]);
            else
                widen_int4(from + 4 * WIDTH + pair * WIDTH, at + 2 * pair);
        }
    }
    return {start, reinterpret_cast<int16_t*>(to), first, blocks};
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
            Floats value = _mm256_add_ps(load(sums[row] + i), load(bias + i));
            store(to + i, out.adds ? _mm256_add_ps(load(to + i), value) : value);
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
    for (long input = 0; input < w.inputs; input += DEPTH) {
        for (long panel = 0; panel < panels; ++panel) {
            Slab slab = unpack(w, w.panel(first_panel + panel), input, thread.slab);
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
