// Sixteen floats or integers in a register of AVX-512.
#pragma once

namespace legato {

using Sixteen = __m512;
using Ints16 = __m512i;
constexpr int ACROSS = 2;  // panels of weights whose sums share inputs in registers

inline Sixteen load16(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Sixteen value) { _mm512_storeu_ps(to, value); }
inline Sixteen all16(float value) { return _mm512_set1_ps(value); }
inline Sixteen fma(Sixteen a, Sixteen b, Sixteen c) { return _mm512_fmadd_ps(a, b, c); }
inline Sixteen to_floats(Ints16 x) { return _mm512_cvtepi32_ps(x); }
inline Sixteen load_half16(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// The low or the high halves of sixteen words, each a bfloat16.
template <bool HIGH>
inline Sixteen half_words(const uint8_t* from) {
    __m512i both = _mm512_loadu_si512(from);
    if constexpr (HIGH) return _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
    else return _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
}

}  // namespace legato
