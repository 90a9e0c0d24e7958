// Products of a warpgroup (4 warps): D[64 x N] += A[64 x 16] B[16 x N], bf16 in, float32 out.
//
// From `products_commit` until `products_wait` a product's registers must not be touched, nor its shared memory
// written.
//
// Of D a thread holds rows r and r + 8, r = warp * 16 + lane / 4: d[4 i + j], j in 0..3, is in row r + j / 2 * 8 and
// column 8 i + lane % 4 * 2 + j % 2. A in registers is alike: a[i] = (d[2 i], d[2 i + 1]).
#pragma once
#include "common.cuh"

// An operand in shared memory: rows of 128 or 32 bytes with the copy engine's swizzle, eight of which repeat it; it
// begins where the swizzle does.
//
// K-major, a row is one of M or N, its bytes along K: the next eight rows are `stride` bytes away, `apart` is unused,
// and a step of K is 32 bytes. N-major, a row is one of K, its bytes along N: the next eight rows are `stride` bytes
// away, the next 64 columns `apart`, and a step of K two strides.
enum Swizzle { BYTES_128 = 1, BYTES_32 = 3 };
__device__ __forceinline__ u64 operand(const void* at, Swizzle swizzle, u32 stride, u32 apart = 16) {
  return (u64)(shared_address(at) >> 4) | (u64)(apart >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)swizzle << 62;
}
__device__ __forceinline__ u64 moved(u64 operand, u32 bytes) { return operand + (bytes >> 4); }

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// A product's reads and writes do not move across this line.
template <int COUNT>
__device__ __forceinline__ void settle(float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}

#define WGMMA_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_NAMES_36 WGMMA_NAMES_32 ",%32,%33,%34,%35"
#define WGMMA_NAMES_40 WGMMA_NAMES_36 ",%36,%37,%38,%39"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_OUT_8(d) WGMMA_8(d, 0)
#define WGMMA_OUT_16(d) WGMMA_OUT_8(d), WGMMA_8(d, 8)
#define WGMMA_OUT_24(d) WGMMA_OUT_16(d), WGMMA_8(d, 16)
#define WGMMA_OUT_32(d) WGMMA_OUT_24(d), WGMMA_8(d, 24)
#define WGMMA_OUT_36(d) WGMMA_OUT_32(d), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_OUT_40(d) WGMMA_OUT_32(d), WGMMA_8(d, 32)
#define WGMMA_OUT_48(d) WGMMA_OUT_40(d), WGMMA_8(d, 40)

// N columns are COUNT = N / 2 registers; later operands follow.
#define WGMMA_SHARED(N, COUNT, A, B, ADD)                                                             \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                 \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WGMMA_NAMES_##COUNT "}, %" #A ", %" #B \
               ", add, 1, 1, 0, 0;\n}"                                                                \
               : WGMMA_OUT_##COUNT(d)                                                                 \
               : "l"(a), "l"(b), "n"(add))
#define WGMMA_REGISTERS(N, COUNT, A, A1, A2, A3, B)                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WGMMA_NAMES_##COUNT "}, {%" #A ",%" #A1 \
               ",%" #A2 ",%" #A3 "}, %" #B ", 1, 1, 1, 1;\n"                                          \
               : WGMMA_OUT_##COUNT(d)                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// D = A B, or += it; both K-major in shared memory.
template <int N, bool add>
__device__ __forceinline__ void multiply(float (&d)[N / 2], u64 a, u64 b) {
  if constexpr (N == 16) WGMMA_SHARED(16, 8, 8, 9, 10);
  if constexpr (N == 32) WGMMA_SHARED(32, 16, 16, 17, 18);
  if constexpr (N == 48) WGMMA_SHARED(48, 24, 24, 25, 26);
  if constexpr (N == 64) WGMMA_SHARED(64, 32, 32, 33, 34);
  if constexpr (N == 80) WGMMA_SHARED(80, 40, 40, 41, 42);
  if constexpr (N == 96) WGMMA_SHARED(96, 48, 48, 49, 50);
}

// A in registers, B N-major in shared memory.
template <int N>
__device__ __forceinline__ void multiply(float* d, const u32* a, u64 b) {
  if constexpr (N == 64) WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36);
  if constexpr (N == 72) WGMMA_REGISTERS(72, 36, 36, 37, 38, 39, 40);
}
