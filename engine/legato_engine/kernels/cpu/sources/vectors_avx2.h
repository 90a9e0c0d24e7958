// Vectors of AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

namespace legato {

using Floats = __m256;  // whose operators compilers know
using Ints = __m256i;   // eight of 32 bits

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
inline Floats all(float value) { return _mm256_set1_ps(value); }
inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
// A `b` that is not a number is the result.
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats absolute(Floats x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Ints no_ints() { return _mm256_setzero_si256(); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints to_ints(Floats x) { return _mm256_cvtps_epi32(x); }  // the nearest
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }

// For exponents of normal floats.
inline Floats power_of_two(Ints exponents) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(add(exponents, _mm256_set1_epi32(127)), 23));
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

inline int32_t sum(Ints v) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    half = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 1)));
}

inline float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

inline Floats load_half(const uint8_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline Floats load_bf16(const uint16_t* from) {
    __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

// The low or the high halves of eight words, each a bfloat16.
template <bool HIGH>
inline Floats half_words8(const uint8_t* from) {
    Ints both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if constexpr (HIGH) return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))));
    else return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
}

inline void transpose(Floats v[LANES]) {
    Floats a[LANES], b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < LANES / 2; ++i) {
        v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

inline void relax() { _mm_pause(); }

}  // namespace legato
