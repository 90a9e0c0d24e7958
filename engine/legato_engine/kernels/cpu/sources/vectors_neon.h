// Vectors of arm64: two registers of four.
#pragma once

#include <arm_neon.h>

namespace legato {

struct Floats {
    float32x4_t low, high;
};

struct Ints {
    int32x4_t low, high;
};

inline Floats operator+(Floats a, Floats b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }

inline Floats load(const float* from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
inline void store(float* to, Floats value) {
    vst1q_f32(to, value.low);
    vst1q_f32(to + 4, value.high);
}
inline Floats all(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
inline Floats zero() { return all(0.0f); }
inline Floats fma(Floats a, Floats b, Floats c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
// What is not a number is the result.
inline Floats larger(Floats a, Floats b) { return {vmaxq_f32(a.low, b.low), vmaxq_f32(a.high, b.high)}; }
inline Floats smaller(Floats a, Floats b) { return {vminq_f32(a.low, b.low), vminq_f32(a.high, b.high)}; }
inline Floats absolute(Floats x) { return {vabsq_f32(x.low), vabsq_f32(x.high)}; }
inline Floats nearest(Floats x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }

inline Ints no_ints() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline Ints add(Ints a, Ints b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
inline Ints to_ints(Floats x) { return {vcvtnq_s32_f32(x.low), vcvtnq_s32_f32(x.high)}; }  // the nearest
inline Floats to_floats(Ints x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }

// For exponents of normal floats.
inline Floats power_of_two(Ints exponents) {
    Ints bits = add(exponents, {vdupq_n_s32(127), vdupq_n_s32(127)});
    return {vreinterpretq_f32_s32(vshlq_n_s32(bits.low, 23)), vreinterpretq_f32_s32(vshlq_n_s32(bits.high, 23))};
}

// The order of x86, which vaddvq has not.
inline float sum(Floats v) {
    float32x4_t half = vaddq_f32(v.low, v.high);
    float32x2_t pair = vadd_f32(vget_low_f32(half), vget_high_f32(half));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}

inline float largest(Floats v) { return vmaxvq_f32(vmaxq_f32(v.low, v.high)); }
inline int32_t sum(Ints v) { return vaddvq_s32(vaddq_s32(v.low, v.high)); }

inline float half_to_float(uint16_t bits) {
    __fp16 value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint16_t float_to_half(float value) {
    __fp16 narrow = __fp16(value);
    uint16_t bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    return bits;
}

inline Floats load_half(const uint8_t* from) {
    float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8(from));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}

inline Floats load_bf16(const uint16_t* from) {
    uint16x8_t narrow = vld1q_u16(from);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(narrow), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(narrow, 16))};
}

// The low or the high halves of eight words, each a bfloat16.
template <bool HIGH>
inline Floats half_words8(const uint8_t* from) {
    const uint32x4_t upper = vdupq_n_u32(0xffff0000);
    uint32x4_t first = vreinterpretq_u32_u8(vld1q_u8(from)), second = vreinterpretq_u32_u8(vld1q_u8(from + 16));
    if constexpr (HIGH)
        return {vreinterpretq_f32_u32(vandq_u32(first, upper)), vreinterpretq_f32_u32(vandq_u32(second, upper))};
    else
        return {vreinterpretq_f32_u32(vshlq_n_u32(first, 16)), vreinterpretq_f32_u32(vshlq_n_u32(second, 16))};
}

inline void transpose(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
    float64x2_t ab = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), odd_ab = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    float64x2_t cd = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), odd_cd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    a = vreinterpretq_f32_f64(vtrn1q_f64(ab, cd));
    b = vreinterpretq_f32_f64(vtrn1q_f64(odd_ab, odd_cd));
    c = vreinterpretq_f32_f64(vtrn2q_f64(ab, cd));
    d = vreinterpretq_f32_f64(vtrn2q_f64(odd_ab, odd_cd));
}

inline void transpose(Floats v[LANES]) {
    transpose(v[0].low, v[1].low, v[2].low, v[3].low);
    transpose(v[4].high, v[5].high, v[6].high, v[7].high);
    transpose(v[0].high, v[1].high, v[2].high, v[3].high);
    transpose(v[4].low, v[5].low, v[6].low, v[7].low);
    for (int i = 0; i < 4; ++i) {
        float32x4_t high = v[i].high;
        v[i].high = v[i + 4].low;
        v[i + 4].low = high;
    }
}

// `yield` does nothing on most processors.
inline void relax() { asm volatile("isb" ::: "memory"); }

}  // namespace legato
