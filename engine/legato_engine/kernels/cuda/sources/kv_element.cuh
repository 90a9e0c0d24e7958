// An element of keys or values as stored: bf16, or e4m3 in units of a layer's scale.
#pragma once
#include "common.cuh"

#if KV_BYTES == 1
typedef unsigned char Element;

// Rounded to bf16 first, like torch's; beyond 448 the largest, and NaN stays.
__device__ __forceinline__ Element to_element(float x, float scale) {
  return (Element)pack_e4m3_pair(__fdiv_rn(rounded(x), scale), 0.f);
}
__device__ __forceinline__ float from_element(Element x, float scale) {
  return __fmul_rn(float_of_half((unsigned short)half_of_e4m3(x)), scale);
}
#else
typedef bf16 Element;
__device__ __forceinline__ Element to_element(float x, float) { return to_bf16(x); }
#endif
