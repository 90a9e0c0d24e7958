// An element of keys or values as stored: bf16, or e4m3 in units of a layer's scale.
#pragma once
#include "common.cuh"

#if KV_BYTES == 1
typedef unsigned char Element;

// Rounded to bf16 first, like torch's; beyond 448 the largest, and NaN stays.
__device__ __forceinline__ Element to_element(float x, float scale) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(__fdiv_rn(rounded(x), scale)));
  return (Element)pair;
}
__device__ __forceinline__ float from_element(Element x, float scale) {
  u32 pair;
  float value;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)x));
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)pair));
  return __fmul_rn(value, scale);
}
#else
typedef bf16 Element;
__device__ __forceinline__ Element to_element(float x, float) { return to_bf16(x); }
#endif
