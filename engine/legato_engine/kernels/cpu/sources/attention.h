// Attention of rows to the positions that each sees: scores of all positions, a softmax, then values
// in ascending order. So a row's bits depend on its own positions only.
#pragma once

#include "pool.h"
#include "vectors.h"

namespace legato {

constexpr int SPAN = 64;   // positions whose values stay in the first cache
constexpr int PANEL = 16;  // positions whose keys are transposed together
constexpr int UNITS = 6;   // queries that share them in registers

// Keys and values of one layer, float32 or bfloat16, in pages of `slots` positions.
struct Pages {
    void* keys;
    void* values;
    int64_t page_stride, head_stride, slot_stride;
    int32_t bf16, slots, dims;

    long at(const int64_t* table, long position, int head) const {
        return table[position / slots] * page_stride + head * head_stride + position % slots * slot_stride;
    }

    // The same of `count` positions from `first` on, with one division.
    void at(const int64_t* table, long first, long count, int head, long* to) const {
        long page = first / slots, slot = first % slots;
        for (long i = 0; i < count; ++i) {
            to[i] = table[page] * page_stride + head * head_stride + slot * slot_stride;
            if (++slot == slots) {
                slot = 0;
                ++page;
            }
        }
    }
};

inline Floats wide(const void* from, bool bf16, long at) {
    return bf16 ? load_bf16(static_cast<const uint16_t*>(from) + at)
                : load(static_cast<const float*>(from) + at);
}

// Keys of PANEL positions from `first` on as [dims, PANEL]; the last of `end` stands for later ones.
inline void panel_of(const Pages& pages, const int64_t* table, int head, long first, long end, float* to) {
    long at[PANEL];
    long count = std::min<long>(PANEL, end - first);
    pages.at(table, first, count, head, at);
    std::fill(at + count, at + PANEL, at[count - 1]);
    for (int half = 0; half < PANEL; half += LANES) {
        for (int dim = 0; dim < pages.dims; dim += LANES) {
            Floats block[LANES];
#pragma GCC unroll 8
            for (int i = 0; i < LANES; ++i) block[i] = wide(pages.keys, pages.bf16, at[half + i] + dim);
            transpose(block);
#pragma GCC unroll 8
            for (int i = 0; i < LANES; ++i) store(to + (dim + i) * PANEL + half, block[i]);
        }
    }
}

// Pointers to the values of `count` positions, at most SPAN, from `first` on, as floats.
inline void find(const Pages& pages, const int64_t* table, int head, long first, long count, float* copies,
                 const float** to) {
    long at[SPAN];
    pages.at(table, first, count, head, at);
    for (long i = 0; i < count; ++i) {
        if (!pages.bf16) {
            to[i] = static_cast<const float*>(pages.values) + at[i];
            continue;
        }
        float* copy = copies + i * pages.dims;
        for (int dim = 0; dim < pages.dims; dim += LANES)
            store(copy + dim, wide(pages.values, true, at[i] + dim));
        to[i] = copy;
    }
}

// Scores of COUNT queries and the positions of a panel.
template <int COUNT>
inline void score(const float* panel, const float* const* queries, int dims, Floats scale, float* const* to) {
    Floats acc[COUNT][2];
#pragma GCC unroll 6
    for (int i = 0; i < COUNT; ++i) acc[i][0] = acc[i][1] = zero();
    for (int dim = 0; dim < dims; ++dim) {
        Floats low = load(panel + dim * PANEL), high = load(panel + dim * PANEL + LANES);
#pragma GCC unroll 6
        for (int i = 0; i < COUNT; ++i) {
            Floats query = all(queries[i][dim]);
            acc[i][0] = fma(query, low, acc[i][0]);
            acc[i][1] = fma(query, high, acc[i][1]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < COUNT; ++i) {
        store(to[i], acc[i][0] * scale);
        store(to[i] + LANES, acc[i][1] * scale);
    }
}

// Replace scores by their exponentials; return the sum.
inline float soften(float* scores, long length) {
    Floats most = all(-std::numeric_limits<float>::infinity());
    for (long i = length; i < (length + LANES - 1) / LANES * LANES; ++i) scores[i] = scores[length - 1];
    for (long i = 0; i < length; i += LANES) most = larger(most, load(scores + i));
    Floats top = all(largest(most)), total = zero();
    for (long i = 0; i < length; i += LANES) {
        store(scores + i, exp(load(scores + i) - top));
        for (long j = length; j < i + LANES; ++j) scores[j] = 0.0f;
        total = total + load(scores + i);
    }
    return sum(total);
}

// Add the values of positions `first` to `end` at VECTORS vectors from `dim` on, for COUNT queries.
template <int COUNT, int VECTORS>
inline void add_part(const float* const* shares, const float* const* values, long first, long end, int dim,
                     float* const* to) {
    Floats acc[COUNT][VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) acc[i][v] = load(to[i] + dim + v * LANES);
    for (long position = first; position < end; ++position) {
        const float* value = values[position] + dim;
#pragma GCC unroll 6
        for (int i = 0; i < COUNT; ++i) {
            Floats share = all(shares[i][position]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) acc[i][v] = fma(share, load(value + v * LANES), acc[i][v]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(to[i] + dim + v * LANES, acc[i][v]);
}

template <int COUNT>
inline void add_values(const float* const* shares, const float* const* values, long first, long end,
                       int dims, float* const* to) {
    constexpr int VECTORS = COUNT == 1 ? 8 : COUNT == 2 ? 4 : 2;
    int dim = 0;
    for (; dim + VECTORS * LANES <= dims; dim += VECTORS * LANES)
        add_part<COUNT, VECTORS>(shares, values, first, end, dim, to);
    for (; dim < dims; dim += LANES) add_part<COUNT, 1>(shares, values, first, end, dim, to);
}

// Adjacent rows of one sequence, and the heads that share a head of keys.
struct Tile {
    const int64_t* table;
    const float* queries;  // of the first row and head
    float* out;            // likewise
    long query_stride, out_stride;
    const int64_t* lengths;  // of each row
    int rows, heads, key_head;
};

// A query: one row's head.
struct Unit {
    const float* query;
    float* scores;
    float* out;
    long length;
};

// Call `add(count, first unit)` with compile-time counts of at most UNITS.
template <typename Add>
inline void by_units(long units, const Add& add) {
    for (long first = 0; first < units; first += UNITS) {
        switch (std::min<long>(UNITS, units - first)) {
            case 1: add(std::integral_constant<int, 1>(), first); break;
            case 2: add(std::integral_constant<int, 2>(), first); break;
            case 3: add(std::integral_constant<int, 3>(), first); break;
            case 4: add(std::integral_constant<int, 4>(), first); break;
            case 5: add(std::integral_constant<int, 5>(), first); break;
            default: add(std::integral_constant<int, 6>(), first); break;
        }
    }
}

inline void score_all(Thread& thread, const Pages& pages, const Tile& tile, const Unit* units, long count,
                      long most) {
    float* panel = thread.keys.room<float>(long(PANEL) * pages.dims);
    const Floats scale = all(1.0f / std::sqrt(float(pages.dims)));
    for (long first = 0; first < most; first += PANEL) {
        panel_of(pages, tile.table, tile.key_head, first, most, panel);
        by_units(count, [&](auto number, long unit) {
            const float* queries[number];
            float* to[number];
            for (int i = 0; i < number; ++i) {
                queries[i] = units[unit + i].query;
                to[i] = units[unit + i].scores + first;
            }
            score<number>(panel, queries, pages.dims, scale, to);
        });
    }
}

inline void add_all(Thread& thread, const Pages& pages, const Tile& tile, const Unit* units, long count,
                    long most) {
    float* copies = thread.keys.room<float>(long(SPAN) * pages.dims);
    const float* values[SPAN];
    for (long first = 0; first < most; first += SPAN) {
        long size = std::min<long>(SPAN, most - first);
        find(pages, tile.table, tile.key_head, first, size, copies, values);
        by_units(count, [&](auto number, long unit) {
            const float* shares[number];
            float* to[number];
            long seen = size;
            for (int i = 0; i < number; ++i) {
                shares[i] = units[unit + i].scores + first;
                to[i] = units[unit + i].out;
                seen = std::min(seen, std::max(0L, units[unit + i].length - first));
            }
            add_values<number>(shares, values, 0, seen, pages.dims, to);
            for (int i = 0; i < number; ++i) {  // what this one sees and another does not
                long own = std::min(size, units[unit + i].length - first);
                if (own > seen) add_values<1>(shares + i, values, seen, own, pages.dims, to + i);
            }
        });
    }
}

inline void attend(Thread& thread, const Pages& pages, const Tile& tile) {
    const long count = long(tile.rows) * tile.heads;
    long most = 0;
    for (int row = 0; row < tile.rows; ++row) most = std::max<long>(most, tile.lengths[row]);
    const long pitch = (most + PANEL - 1) / PANEL * PANEL;
    float* scores = thread.scores.room<float>(pitch * count);
    Unit* units = thread.units.room<Unit>(count);
    for (long i = 0; i < count; ++i) {
        long row = i / tile.heads, column = i % tile.heads * pages.dims;
        units[i] = {tile.queries + row * tile.query_stride + column, scores + i * pitch,
                    tile.out + row * tile.out_stride + column, tile.lengths[row]};
        std::memset(units[i].out, 0, sizeof(float) * pages.dims);
    }
    if (most == 0) return;  // padding
    score_all(thread, pages, tile, units, count, most);
    float* totals = thread.seen.room<float>(count);
    for (long i = 0; i < count; ++i) totals[i] = soften(units[i].scores, units[i].length);
    add_all(thread, pages, tile, units, count, most);
    for (long i = 0; i < count; ++i) {
        Floats share = all(1.0f / totals[i]);
        for (int dim = 0; dim < pages.dims; dim += LANES)
            store(units[i].out + dim, load(units[i].out + dim) * share);
    }
}

}  // namespace legato
