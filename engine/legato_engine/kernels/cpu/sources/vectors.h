// Eight floats at a time, by the instructions of vectors_avx2.h or vectors_neon.h, and sixteen: two such
// vectors, or one of AVX-512, whose lanes are independent, so that results are the same. Products and sums are
// fused only where the code says so (the compiler is told not to), and lanes are added in one order, so
// that every kernel rounds alike, on x86 as on arm64.
#pragma once

#include <algorithm>
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

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "vectors_avx512.h"
#else

namespace legato {

struct Sixteen {
    Floats low, high;
};
using Ints16 = Ints[2];
constexpr int ACROSS = 1;  // panels of weights whose sums share inputs in registers

inline Sixteen load16(const float* from) { return {load(from), load(from + LANES)}; }
inline void store(float* to, Sixteen value) {
    store(to, value.low);
    store(to + LANES, value.high);
}
inline Sixteen all16(float value) { return {all(value), all(value)}; }
inline Sixteen operator*(Sixteen a, Sixteen b) { return {a.low * b.low, a.high * b.high}; }
inline Sixteen fma(Sixteen a, Sixteen b, Sixteen c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }
inline Sixteen to_floats(const Ints16& x) { return {to_floats(x[0]), to_floats(x[1])}; }
inline Sixteen load_half16(const uint8_t* from) { return {load_half(from), load_half(from + 2 * LANES)}; }

// The low or the high halves of sixteen words, each a bfloat16.
template <bool HIGH>
inline Sixteen half_words(const uint8_t* from) {
    return {half_words8<HIGH>(from), half_words8<HIGH>(from + 4 * LANES)};
}

}  // namespace legato

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

// An input that is rounded to bfloat16, in pairs.
#ifdef __AVX512BF16__
using Narrow = uint16_t;

// Each pair in the order of `bf16_place`; an odd last input has a zero beside it.
inline void put_narrow(const float* from, long count, Narrow* to) {
    for (long i = 0; i < count; i += 32) {
        const long here = std::min<long>(32, count - i);
        const __mmask32 wanted = ~0u >> (32 - here), stored = ~0u >> (32 - (here + 1) / 2 * 2);
        __m512 low = _mm512_maskz_loadu_ps(__mmask16(wanted), from + i);
        __m512 high = here > 16 ? _mm512_maskz_loadu_ps(__mmask16(wanted >> 16), from + i + 16) : _mm512_setzero_ps();
        _mm512_mask_storeu_epi16(to + i, stored, _mm512_rol_epi32((__m512i)_mm512_cvtne2ps_pbh(high, low), 16));
    }
}
#else
using Narrow = float;

inline void put_narrow(const float* from, long count, Narrow* to) {
    for (long i = 0; i < count; ++i) to[i] = bf16_to_float(float_to_bf16(from[i]));
    if (count % 2 == 1) to[count] = 0.0f;
}
#endif

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
