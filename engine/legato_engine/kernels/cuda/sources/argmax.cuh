#pragma once

#include "common.cuh"

// In the order of the floats.
__device__ __forceinline__ u32 to_key(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_key(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

struct Best {  // greatest `first`, then `second`, then lowest `id`
  u32 first, second, id;
};

__device__ __forceinline__ bool beats(const Best& a, const Best& b) {
  if (a.first != b.first) return a.first > b.first;
  return a.second != b.second ? a.second > b.second : a.id < b.id;
}

__device__ __forceinline__ Best warp_best(Best mine) {
  const u32 first = __reduce_max_sync(~0u, mine.first);
  const u32 second = __reduce_max_sync(~0u, mine.first == first ? mine.second : 0u);
  const bool equal = mine.first == first && mine.second == second;
  return {first, second, __reduce_min_sync(~0u, equal ? mine.id : ~0u)};
}
