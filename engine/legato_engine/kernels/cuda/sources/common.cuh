// There are no system headers.
#pragma once

typedef unsigned short bf16;  // its bits
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr float LIFT = 0x1p64f;  // see row_major_gemm.cuh

#define INFINITY __int_as_float(0x7f800000)

__device__ __forceinline__ float to_float(bf16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Round to nearest even.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ bf16 to_bf16(float x) { return (bf16)pack(x, 0.f); }
__device__ __forceinline__ float rounded(float x) { return low_float(pack(x, 0.f)); }

// 16 bytes that are read once bypass L1 and leave L2 first.
__device__ __forceinline__ u64 stream_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint4 load_stream(const void* address, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address), "l"(policy));
  return v;
}

// 16 bytes that an earlier kernel wrote while this one may have been running already.
__device__ __forceinline__ uint4 load_fresh(const void* address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ i64 load_fresh_i64(const i64* address) {
  i64 v;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ bf16 load_fresh_bf16(const bf16* address) {
  bf16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ float load_fresh_f32(const float* address) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
  return v;
}

#ifdef DELAYS  // for tests: warps arrive late at waits
__device__ __forceinline__ void dawdle(u32 where) {
  u32 luck;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(luck));
  luck ^= where * 0x9e3779b9u ^ blockIdx.x * 0x85ebca6bu ^ threadIdx.x / 32 * 0xc2b2ae35u;
  luck = (luck ^ luck >> 15) * 0x2c1b3c6du;
  luck = (luck ^ luck >> 12) * 0x297a2d39u;
  luck ^= luck >> 15;
  if (luck % 4 == 0) __nanosleep(luck >> 8 & (luck / 4 % 16 == 0 ? 16383 : 2047));
}
#else
__device__ __forceinline__ void dawdle(u32) {}
#endif

__device__ __forceinline__ void launch_dependents() {
  dawdle(1);
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void wait_previous() {
  dawdle(2);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  dawdle(3);
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// An arriving block has used what it read of its peers; writes are not ordered.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ float4 load_peer(const void* shared, u32 rank) {
  u32 local = (u32)__cvta_generic_to_shared(shared), peer;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(local), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(peer) : "memory");
  return v;
}

__device__ __forceinline__ float2 load_peer2(const void* shared, u32 rank) {
  u32 local = (u32)__cvta_generic_to_shared(shared), peer;
  float2 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(local), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(peer) : "memory");
  return v;
}

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global)
               : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Counters by which running thread blocks signal writes.
constexpr u32 MOST_POLLS = 1 << 22;
__device__ __forceinline__ void signal(u32* count) {
  dawdle(4);
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
// A signal that takes seconds is a launch error.
__device__ __forceinline__ void wait_for(const u32* count, u32 target) {
  for (u32 polls = 0;; polls++) {
    u32 seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
    if (seen >= target) break;
    if (polls == MOST_POLLS) asm volatile("trap;");
  }
  dawdle(5);
}

// A barrier's phase ends when arrivals and copied bytes are complete.
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN_%=:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra AGAIN_%=;\n}" ::"r"(
          shared_address(barrier)),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, u32 bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
// To all BLOCKS of a cluster; the barrier of each counts.
template <int BLOCKS>
__device__ __forceinline__ void copy_bulk_shared(void* shared, const void* global, u32 bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4, %5;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"((unsigned short)((1 << BLOCKS) - 1)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ u64 keep_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// D[16 x 8] += A[16 x 16] B[16 x 8], bf16 in, float32 out.
__device__ __forceinline__ void mma(float4& d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes; lanes >>= 1) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// x / (1 + exp(-2u)) is x (1 + tanh(u)) / 2.
__device__ __forceinline__ float gelu_tanh(float x) {
  const float power = x * (-2.302208198144325f - 0.1029432397f * x * x);  // -2u in powers of two
  float small, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(small) : "f"(power));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + small));
  return x * inverse;
}
__device__ __forceinline__ float gelu_exact(float x) { return 0.5f * x * (1.f + erff(x * 0.7071067811865476f)); }
