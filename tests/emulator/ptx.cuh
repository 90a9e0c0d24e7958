// The functions of engine/legato_engine/kernels/cuda/sources/ptx.cuh on the emulated machine. Fences do nothing: its memory
// is in order.
#pragma once

typedef unsigned short bf16;  // its bits
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

namespace host {

// Numbers.

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.f, x) : x; }
inline float float_of_bf16(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 bf16_bits(float x) {
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
#if defined(__aarch64__) && !defined(__clang__) && __GNUC__ < 13
typedef __fp16 Half;  // the other is not yet in its C++
#else
typedef _Float16 Half;
#endif
inline float float_of_half_bits(u32 bits) { return (float)same_bits<Half>((unsigned short)bits); }
inline u32 half_bits(float x) { return same_bits<unsigned short>((Half)x); }
inline float float_of_e4m3(u32 bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 127) == 127) return NAN;
  const float size = exponent ? ldexpf(1.f + mantissa / 8.f, exponent - 7) : ldexpf((float)mantissa, -9);
  return bits & 128 ? -size : size;
}
inline u32 e4m3_bits(float x) {
  const u32 sign = __float_as_uint(x) >> 24 & 128;
  const float size = fabsf(x);
  if (size != size) return 127;
  if (size >= 448.f) return sign | 126;
  const int exponent = size < 0x1p-6f ? -6 : ilogbf(size);
  const int units = (int)rintf(ldexpf(size, 3 - exponent));  // of the last place; 16 are the next exponent's first
  return sign | (u32)(units < 8 ? units : (exponent + 7) * 8 + (units - 8));
}

// What a warp's lanes hold of a product, and get.
struct Operands {
  u32 a[4], b[2];
  float4 d;
};
typedef Together<Operands, float4> Multiplied;
template <float (*DECODE)(u32)>
inline void multiply(emulator::Warp& warp, unsigned lanes) {
  if (lanes != ~0u) emulator::fail("a product of a warp without lanes %08x", ~lanes);
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < 32; lane++) {
    const Operands of = Multiplied::of(warp, lane);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 2; j++) a[g + i % 2 * 8][i / 2 * 8 + t * 2 + j] = DECODE(of.a[i] >> 16 * j & 0xffffu);
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++) b[i * 8 + t * 2 + j][g] = DECODE(of.b[i] >> 16 * j & 0xffffu);
    d[g][t * 2] = of.d.x, d[g][t * 2 + 1] = of.d.y, d[g + 8][t * 2] = of.d.z, d[g + 8][t * 2 + 1] = of.d.w;
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    Multiplied::tell(warp, lane, float4{d[g][t * 2], d[g][t * 2 + 1], d[g + 8][t * 2], d[g + 8][t * 2 + 1]});
  }
}

// Lane 8i + r names row r of matrix i; lane 4g + t gets of each matrix row g's columns 2t and 2t + 1, or with TRANSPOSED
// column g's rows.
template <bool TRANSPOSED>
inline uint4 load_matrices(const void* row) {
  using Lanes = Together<const void*, uint4>;
  if ((std::uintptr_t)row % 16) emulator::fail("a matrix's row that is not aligned");
  return Lanes::with("ldmatrix", ~0u, row, [](emulator::Warp& warp, unsigned) {
    for (int lane = 0; lane < 32; lane++) {
      const int g = lane / 4, t = lane % 4;
      u32 of[4];
      for (int i = 0; i < 4; i++) {
        const auto at = [&](int r, int column) { return (u32)static_cast<const bf16*>(Lanes::of(warp, i * 8 + r))[column]; };
        of[i] = TRANSPOSED ? at(t * 2, g) | at(t * 2 + 1, g) << 16 : at(g, t * 2) | at(g, t * 2 + 1) << 16;
      }
      Lanes::tell(warp, lane, uint4{of[0], of[1], of[2], of[3]});
    }
  });
}

// Memory.

template <class T>
inline T load_now(const void* address) {
  emulator::glance_aside();
  if ((std::uintptr_t)address % alignof(T)) emulator::fail("a load of %zu bytes that is not aligned", sizeof(T));
  T v;
  std::memcpy(&v, address, sizeof v);
  return v;
}
// A word that the thread has just read is read again when it has changed, or after some time.
inline u32 load_when_changed(const u32* address) {
  emulator::Thread& thread = *emulator::running;
  const u32 v = load_now<u32>(address);
  if (thread.polled != address || thread.polled_value != v) {
    thread.polled = address, thread.polled_value = v;
    return v;
  }
  emulator::wait_change("the word", address, v, v);
  return thread.polled_value = *static_cast<const volatile u32*>(address);
}
inline std::uint64_t* word_of(const u64* barrier) { return (std::uint64_t*)barrier; }

}  // namespace host

// Numbers.

inline u32 pack(float low, float high) { return host::bf16_bits(low) | host::bf16_bits(high) << 16; }
inline u32 pack_half(float low, float high) { return host::half_bits(low) | host::half_bits(high) << 16; }
inline unsigned short pack_e4m3_pair(float low, float high) {
  return (unsigned short)(host::e4m3_bits(low) | host::e4m3_bits(high) << 8);
}
inline u32 pack_e4m3(float a, float b, float c, float d) { return pack_e4m3_pair(a, b) | (u32)pack_e4m3_pair(c, d) << 16; }
inline u32 half_of_e4m3(unsigned short two) {
  return pack_half(host::float_of_e4m3(two & 255), host::float_of_e4m3(two >> 8));
}
inline float float_of_half(unsigned short half) { return host::float_of_half_bits(half); }
inline float power_of_two(float x) { return host::flushed(exp2f(host::flushed(x))); }
inline float logarithm_of_two(float x) { return log2f(host::flushed(x)); }
inline float reciprocal(float x) { return host::flushed(1.f / host::flushed(x)); }

inline u32 multiply_add(u32 a, u32 b, u32 c) {
  const auto of = [&](int shift) {
    const auto value = [&](u32 pair) { return (double)host::float_of_bf16(pair >> shift & 0xffffu); };
    return (float)(value(a) * value(b) + value(c));
  };
  return pack(of(0), of(16));
}

inline u32 transposed(u32 pair) {
  using Lanes = host::Together<u32, u32>;
  return Lanes::with("movmatrix", ~0u, pair, [](emulator::Warp& warp, unsigned) {
    const auto at = [&](int row, int column) { return Lanes::of(warp, row * 4 + column / 2) >> column % 2 * 16 & 0xffffu; };
    for (int lane = 0; lane < 32; lane++) {
      const int g = lane / 4, t = lane % 4;
      Lanes::tell(warp, lane, at(t * 2, g) | at(t * 2 + 1, g) << 16);
    }
  });
}
inline void mma(float4& d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  d = host::Multiplied::with("mma", ~0u, {{a0, a1, a2, a3}, {b0, b1}, d}, host::multiply<host::float_of_bf16>);
}
inline void mma_half(float4& d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  d = host::Multiplied::with("mma", ~0u, {{a0, a1, a2, a3}, {b0, b1}, d}, host::multiply<host::float_of_half_bits>);
}

// Global memory.

inline u64 stream_policy() { return 0; }
inline u64 keep_policy() { return 0; }
inline uint4 load_stream(const void* address, u64) { return host::load_now<uint4>(address); }
inline uint4 load_fresh(const void* address) { return host::load_now<uint4>(address); }
inline i64 load_fresh_i64(const i64* address) { return host::load_now<i64>(address); }
inline bf16 load_fresh_bf16(const bf16* address) { return host::load_now<bf16>(address); }
inline float load_fresh_f32(const float* address) { return host::load_now<float>(address); }
inline float2 load_fresh_float2(const float2* address) { return host::load_now<float2>(address); }
inline float4 load_fresh_float4(const float4* address) { return host::load_now<float4>(address); }
inline u32 load_fresh_u32(const void* address) { return host::load_now<u32>(address); }
inline u32 load_relaxed(const u32* address) { return host::load_now<u32>(address); }
inline u32 load_acquire(const u32* address) { return host::load_when_changed(address); }
inline void increase_release(u32* count) { atomicAdd(count, 1u); }
inline u32 increase_acquire_release(u32* count) { return atomicAdd(count, 1u); }
inline void prefetch_bulk(const void*, u32) {}

// Shared memory.

inline uint4 load_matrices(const void* row) { return host::load_matrices<false>(row); }
inline uint4 load_transposed(const void* row) { return host::load_matrices<true>(row); }
inline u32 load_acquire_shared(const u32* address) { return host::load_when_changed(address); }
inline void store_release_shared(u32* address, u32 v) { atomicExch(address, v); }

inline void barrier_init(u64* barrier, int arrivals) { emulator::barrier_begin(host::word_of(barrier), arrivals); }
inline void barriers_ready() {}
inline void barrier_arrive(u64* barrier, int arrivals = 1) {
  while (arrivals--) emulator::barrier_count(host::word_of(barrier), 0);
}
inline void barrier_expect(u64* barrier, u32 bytes) { emulator::barrier_count(host::word_of(barrier), bytes); }
inline bool barrier_done(const u64* barrier, u32 phase) { return emulator::barrier_over(host::word_of(barrier), phase); }
inline void barrier_wait(u64* barrier, u32 phase) {
  while (!barrier_done(barrier, phase)) {}
}

// Copies.

// Any lane may be the one, as long as it always is.
inline u32 kept_lane() { return threadIdx.x % 32; }
inline bool elected() {
  emulator::meet("elected", ~0u, nullptr);
  return emulator::running->lane == 19;
}
inline void copy_async(void* shared, const void* global) { emulator::copy_run_later(shared, global, 16); }
inline void copy_run(void* shared, const void* global, int bytes, u64) { emulator::copy_run_later(shared, global, bytes); }
inline void barrier_arrive_copied(u64* barrier) { emulator::arrive_after_runs(host::word_of(barrier)); }
inline void copies_done() { emulator::wait_for_runs(); }
inline void copy_bulk(void* shared, const void* global, u32 bytes, u64* barrier, u64) {
  emulator::copy_later(shared, global, bytes, host::word_of(barrier));
}
template <int BLOCKS>
inline void copy_bulk_shared(void* shared, const void* global, u32 bytes, u64* barrier, u64) {
  emulator::copy_to_cluster_later(shared, global, bytes, host::word_of(barrier), BLOCKS);
}
inline void order_copies() {}
inline void order_shared_copies() {}

// Threads, thread blocks, clusters, grids.

template <int BARRIER, int THREADS>
inline void threads_sync() { emulator::join(BARRIER, THREADS, true); }
template <int REGISTERS>
inline void take_registers() {}
template <int REGISTERS>
inline void give_registers() {}
inline u32 clock_word() { return (u32)emulator::draw(); }
inline u64 nanoseconds() { return emulator::now(); }
inline void trap() { emulator::fail("a trap"); }
inline void grid_launch_dependents() {}
inline void grid_wait() {}

inline void cluster_arrive() { emulator::arrive_in_cluster(); }
inline void cluster_wait() { emulator::wait_for_cluster(); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
inline u32 cluster_rank() { return blockIdx.x % emulator::cluster_size; }
inline void barrier_arrive_at(u64* barrier, u32 rank) {
  barrier_arrive(static_cast<u64*>(const_cast<void*>(emulator::peer_memory(barrier, rank))));
}
inline void store_peer(float2* shared, float2 v, u64* barrier, u32 rank) {
  emulator::store_to_peer_later(shared, &v, sizeof(v), host::word_of(barrier), rank);
}
inline float4 load_peer(const void* shared, u32 rank) {
  return *static_cast<const float4*>(emulator::peer_memory(shared, rank));
}
inline float2 load_peer2(const void* shared, u32 rank) {
  return *static_cast<const float2*>(emulator::peer_memory(shared, rank));
}
