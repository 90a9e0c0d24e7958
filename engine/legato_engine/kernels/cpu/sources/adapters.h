// Low-rank changes of rows: B(A x) of each row's slot.
#pragma once

#include "rows.h"

namespace legato {

// Matrices [slot, rank, width], float32 or bfloat16, of one layer and adjacent outputs of a map.
struct LowRank {
    const void* a;
    const void* b;
    int64_t inputs, outputs;
};

// Of all outputs of a map, in their order; the first without matrices ends them.
struct LowRanks {
    LowRank parts[3];
};

// Row r has slot `slots[r]`, with one slot for all `slots[0]`; slot 0 is none.
struct Adapters {
    LowRanks qkv, out, up, down;  // of the first layer
    const int64_t* slots;  // null: no row has an adapter
    const int64_t* ranks;  // of each slot
    int64_t layer_slots;   // slots of a layer
    int32_t capacity, bf16, shared;

    int64_t slot(long row) const { return slots[shared ? 0 : row]; }
};

template <typename T>
inline Floats widened(const T* from) {
    if constexpr (sizeof(T) == 4) return load(from);
    else return load_bf16(from);
}

template <typename T>
inline float narrow(T value) {
    if constexpr (sizeof(T) == 4) return value;
    else return bf16_to_float(value);
}

template <typename T>
inline void add_low_rank(const T* a, const T* b, long rank, long inputs, long outputs, const float* x,
                         float* hidden, float* to) {
    for (long r = 0; r < rank; ++r, a += inputs) {
        Floats total = zero();
        long i = 0;
        for (; i + LANES <= inputs; i += LANES) total = fma(widened(a + i), load(x + i), total);
        float rest = 0.0f;
        for (; i < inputs; ++i) rest = fmaf(narrow(a[i]), x[i], rest);
        hidden[r] = sum(total) + rest;
    }
    long o = 0;
    for (; o + LANES <= outputs; o += LANES) {
        Floats change = zero();
        for (long r = 0; r < rank; ++r) change = fma(all(hidden[r]), widened(b + r * outputs + o), change);
        store(to + o, load(to + o) + change);
    }
    for (; o < outputs; ++o) {
        float change = 0.0f;
        for (long r = 0; r < rank; ++r) change = fmaf(hidden[r], narrow(b[r * outputs + o]), change);
        to[o] += change;
    }
}

// Add a map's change to a row of its results.
inline void adapt(Thread& thread, const Adapters& adapters, const LowRanks& map, int layer, long row,
                  const float* x, float* to) {
    int64_t slot = adapters.slot(row);
    if (slot == 0) return;
    long index = (layer * adapters.layer_slots + slot) * adapters.capacity, rank = adapters.ranks[slot];
    float* hidden = thread.hidden.room<float>(rank);
    for (const LowRank& part : map.parts) {
        if (part.a == nullptr) break;
        auto run = [&](auto* a, auto* b) {
            add_low_rank(a + index * part.inputs, b + index * part.outputs, rank, part.inputs, part.outputs,
                         x, hidden, to);
        };
        if (adapters.bf16)
            run(static_cast<const uint16_t*>(part.a), static_cast<const uint16_t*>(part.b));
        else
            run(static_cast<const float*>(part.a), static_cast<const float*>(part.b));
        to += part.outputs;
    }
}

}  // namespace legato
