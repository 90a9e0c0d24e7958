// Eight floats at a time. Products and sums are fused only where the code says so (the compiler is
// told not to), so that every kernel rounds alike.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace legato {

using Floats = __m256;
constexpr int LANES = 8;

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
inline Floats all(float value) { return _mm256_set1_ps(value); }
inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

inline float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

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

inline Floats load_bf16(const uint16_t* from) {
    __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

inline float sum(Floats v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline float largest(Floats v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline int32_t sum(__m256i v) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    half = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 1)));
}

// e^x to two units in the last place; the range is that of normal floats, and NaN stays.
inline Floats exp(Floats x) {
    x = _mm256_min_ps(all(88.0f), _mm256_max_ps(all(-87.0f), x));
    Floats n = _mm256_round_ps(_mm256_mul_ps(x, all(1.44269504f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Floats r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Floats p = all(1.98756915e-4f);
    p = fma(p, r, all(1.39819995e-3f));
    p = fma(p, r, all(8.33345205e-3f));
    p = fma(p, r, all(4.16657962e-2f));
    p = fma(p, r, all(1.66666655e-1f));
    p = fma(p, r, all(0.5f));
    p = fma(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, all(1.0f)));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

inline Floats silu(Floats x) {
    return _mm256_div_ps(x, _mm256_add_ps(all(1.0f), exp(_mm256_sub_ps(zero(), x))));
}

// x * sigmoid(2u), which is the tanh form.
inline Floats gelu(Floats x) {
    Floats cubic = fma(_mm256_mul_ps(all(0.044715f), _mm256_mul_ps(x, x)), x, x);
    Floats twice = _mm256_mul_ps(all(-2.0f * 0.79788456f), cubic);
    return _mm256_div_ps(x, _mm256_add_ps(all(1.0f), exp(twice)));
}

}  // namespace legato
