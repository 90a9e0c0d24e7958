// Eight floats at a time, by the instructions of vectors_avx2.h or vectors_neon.h. Products and sums are
// fused only where the code says so (the compiler is told not to), and lanes are added in one order, so
// that every kernel rounds alike, on x86 as on arm64.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace legato {

constexpr int LANES = 8;

}  // namespace legato

#if defined(__aarch64__)
#include "vectors_neon.h"
#else
#include "vectors_avx2.h"
#endif

namespace legato {

inline float bf16_to_float(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return uint16_t(bits >> 16) | 0x40;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x to two units in the last place; the range is that of normal floats, and NaN stays.
inline Floats exp(Floats x) {
    x = smaller(all(88.0f), larger(all(-87.0f), x));
    Floats n = nearest(x * all(1.44269504f));
    Floats r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Floats p = all(1.98756915e-4f);
    p = fma(p, r, all(1.39819995e-3f));
    p = fma(p, r, all(8.33345205e-3f));
    p = fma(p, r, all(4.16657962e-2f));
    p = fma(p, r, all(1.66666655e-1f));
    p = fma(p, r, all(0.5f));
    p = fma(p, r * r, r + all(1.0f));
    return p * power_of_two(to_ints(n));
}

inline Floats silu(Floats x) { return x / (all(1.0f) + exp(zero() - x)); }

// x * sigmoid(2u), which is the tanh form.
inline Floats gelu(Floats x) {
    Floats cubic = fma(all(0.044715f) * (x * x), x, x);
    return x / (all(1.0f) + exp(all(-2.0f * 0.79788456f) * cubic));
}

}  // namespace legato
