// Instructions that C++ has no words for, each as a function: other sources of decode steps have no assembly. Where
// there is no GPU, tests/emulator/ptx.cuh takes this file's place.
//
// HAS_BULK_COPIES, HAS_E4M3 and HAS_OVERLAP say what the architecture has (capability.py); the functions that need none of these are for
// every GPU from compute capability 8.0 on.
//
// There are no system headers.
#pragma once

typedef unsigned short bf16;  // its bits
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Numbers.

// Two bf16, rounded to nearest even; `low` is in the lower half.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float logarithm_of_two(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two fp16, likewise.
__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Two e4m3, likewise; beyond 448 the largest, and NaN stays.
#if HAS_E4M3
__device__ __forceinline__ unsigned short pack_e4m3_pair(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
// Four, the first in the lowest byte.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
  u32 quad;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(quad)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return quad;
}
// Two e4m3 as fp16, and the lower of two fp16: all are numbers of the wider kind, and NaN stays.
__device__ __forceinline__ u32 half_of_e4m3(unsigned short two) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
  return pair;
}
#else
__device__ __forceinline__ u32 e4m3_of(float x) {
  const u32 bits = __float_as_uint(x), sign = bits >> 24 & 128u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 127u;
  // Below the least normal number, 2^-6, a sum of 2^14 has units of 2^-9 in its last place.
  if (size < 0x3c800000u) return sign | (__float_as_uint(__fadd_rn(__uint_as_float(size), 16384.f)) - 0x46800000u);
  const u32 rounded = (size + 0x7ffffu + (size >> 20 & 1u)) - 0x3c000000u >> 20;
  return sign | min(rounded, 126u);
}
__device__ __forceinline__ unsigned short pack_e4m3_pair(float low, float high) {
  return (unsigned short)(e4m3_of(low) | e4m3_of(high) << 8);
}
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
  return pack_e4m3_pair(a, b) | (u32)pack_e4m3_pair(c, d) << 16;
}
__device__ __forceinline__ u32 half_of_e4m3(unsigned short two) {
  const u32 wide = __byte_perm(two, 0, 0x1404);  // each in the upper byte of a half
  const u32 size = wide >> 1 & 0x3f803f80u;      // as fp16, 2^8 too small
  u32 pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(size), "r"(0x5c005c00u));
  const u32 nan = size + 0x00800080u >> 1;  // bit 13, which makes NaN of what would be 480
  return (wide & 0x80008000u | pair) | nan & 0x20002000u;
}
#endif
__device__ __forceinline__ float float_of_half(unsigned short half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

// a * b + c of both bf16, rounded once.
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
  u32 pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// Instructions of whole warps, which the compiler must not move into a branch of some lanes.
#if HAS_BULK_COPIES
#define WHOLE_WARP asm
#else
#define WHOLE_WARP asm volatile
#endif

// An 8 x 8 matrix of 16-bit values, of which lane 4g + t has row g's 2t and 2t + 1, transposed.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 v;
  WHOLE_WARP("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
  return v;
}

// D[16 x 8] += A[16 x 16] B[16 x 8], bf16 in, float32 out.
__device__ __forceinline__ void mma(float4& d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  WHOLE_WARP("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same with fp16 in.
__device__ __forceinline__ void mma_half(float4& d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  WHOLE_WARP("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Global memory.

// 16 bytes that are read once bypass L1 and leave L2 first.
__device__ __forceinline__ u64 stream_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 keep_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint4 load_stream(const void* address, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address), "l"(policy));
  return v;
}

// What an earlier kernel wrote while this one may have been running already, or what other thread blocks write meanwhile.
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
__device__ __forceinline__ float2 load_fresh_float2(const float2* address) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_fresh_float4(const float4* address) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_fresh_u32(const void* address) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_relaxed(const u32* address) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_acquire(const u32* address) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ void increase_release(u32* count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
// What it was.
__device__ __forceinline__ u32 increase_acquire_release(u32* count) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}
__device__ __forceinline__ void prefetch_bulk(const void* global, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Shared memory.

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 load_acquire_shared(const u32* address) {
  u32 v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(address)) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_shared(u32* address, u32 v) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(address)), "r"(v) : "memory");
}

// Four 8 x 8 matrices of 16-bit values; a lane names 16 bytes of one row.
__device__ __forceinline__ uint4 load_matrices(const void* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(row)) : "memory");
  return v;
}
// The same, transposed.
__device__ __forceinline__ uint4 load_transposed(const void* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(row)) : "memory");
  return v;
}

// A barrier's phase ends when arrivals and copied bytes are complete.
__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
#if HAS_BULK_COPIES
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(u64* barrier, int arrivals = 1) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Whether the phase of this parity is over.
__device__ __forceinline__ bool barrier_done(const u64* barrier, u32 phase) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  return done;
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN_%=:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra AGAIN_%=;\n}" ::"r"(
          shared_address(barrier)),
      "r"(phase)
      : "memory");
}
#else
__device__ __forceinline__ void barriers_ready() {}  // a barrier of the thread block orders it
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier)) : "memory");
}
// Only an arrival: there are no copies that a barrier counts in bytes.
__device__ __forceinline__ void barrier_expect(u64* barrier, u32) { barrier_arrive(barrier); }
__device__ __forceinline__ bool barrier_done(const u64* barrier, u32 phase) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
  return done;
}
// By whole warps, which go on together.
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 phase) {
  while (!barrier_done(barrier, phase)) {}
  __syncwarp();
}
#endif

// Copies.

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global)
               : "memory");
}
// `bytes` of 16, and zeros; `barrier_arrive_copied` arrives after them. Where the driver compiles PTX there is no policy: with one and a
// uniform address it makes an instruction that no GPU has.
__device__ __forceinline__ void copy_run(void* shared, const void* global, int bytes, u64 policy) {
#if HAS_BULK_COPIES
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "l"(policy)
               : "memory");
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive_copied(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// The thread's lane, kept in a register: `threadIdx` is read anew wherever registers are scarce, which takes as long as a read of
// shared memory.
__device__ __forceinline__ u32 kept_lane() {
  u32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// Whether the calling thread is the one that the warp elects, always the same. The compiler knows that what depends on it is for one
// thread: a bulk copy there is one instruction, elsewhere a loop over the threads.
__device__ __forceinline__ bool elected() {
  u32 is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
  return is;
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
// Bulk copies from here on come after this thread's ordinary reads and writes: of all memory, or of shared memory.
__device__ __forceinline__ void order_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void order_shared_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Threads, thread blocks, clusters, grids.

template <int BARRIER, int THREADS>
__device__ __forceinline__ void threads_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
__device__ __forceinline__ u32 clock_word() {
  u32 clock;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
  return clock;
}
__device__ __forceinline__ u64 nanoseconds() {
  u64 time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

#if HAS_OVERLAP
__device__ __forceinline__ void grid_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
__device__ __forceinline__ void grid_launch_dependents() {}
__device__ __forceinline__ void grid_wait() {}
#endif

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
// At the barrier of a thread block of the cluster. With the scope `.cluster` it would wait for the thread's writes to all memory.
__device__ __forceinline__ void barrier_arrive_at(u64* barrier, u32 rank) {
  u32 peer;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer) : "memory");
}
// To the same place of a thread block of the cluster, later; its barrier counts the bytes.
__device__ __forceinline__ void store_peer(float2* shared, float2 v, u64* barrier, u32 rank) {
  u32 peer, counts;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(shared_address(shared)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counts) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(peer), "f"(v.x),
               "f"(v.y), "r"(counts)
               : "memory");
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
