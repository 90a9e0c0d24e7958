// What nvcc and NVRTC know without headers, for a C++ compiler: vectors, the words of a kernel, and built-in functions.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "machine.h"

#undef INFINITY  // the sources have their own

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ARCH__ 900
#define __shared__ static  // blocks run one after the other, but for those of a kernel without such variables

#define threadIdx (emulator::running->index)
#define blockIdx (emulator::running->block_index)
#define blockDim (emulator::block_dim)
#define gridDim (emulator::grid_dim)

struct __align__(8) int2 { int x, y; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace host {
template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "other bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace host
inline unsigned __float_as_uint(float x) { return host::same_bits<unsigned>(x); }
inline int __float_as_int(float x) { return host::same_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return host::same_bits<float>(x); }
inline float __int_as_float(int x) { return host::same_bits<float>(x); }

// As nvcc has them for every pair of integers.
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using Both = std::common_type_t<A, B>;
  return (Both)b < (Both)a ? (Both)b : (Both)a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using Both = std::common_type_t<A, B>;
  return (Both)a < (Both)b ? (Both)b : (Both)a;
}

// Compiled without contraction: each operator rounds once.
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline unsigned long long __float2ull_rn(float x) {
  return !(x > 0.f) ? 0ull : x >= 0x1p64f ? ~0ull : (unsigned long long)rintf(x);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = (std::uint64_t)y << 32 | x;
  unsigned to = 0;
  for (int i = 0; i < 4; i++) to |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return to;
}

namespace host {
// What lanes of a warp do together: each gives a value and gets one.
template <class Given, class Got>
struct Together {
  static_assert(sizeof(Given) <= sizeof(emulator::Warp::given[0]) && sizeof(Got) <= sizeof(emulator::Warp::got[0]), "room");
  static Got with(const char* what, unsigned mask, const Given& given, emulator::Finish finish) {
    emulator::Warp& warp = *emulator::running->warp;
    const unsigned lane = emulator::running->lane;
    std::memcpy(warp.given[lane], &given, sizeof given);
    emulator::meet(what, mask, finish);
    Got got;
    std::memcpy(&got, warp.got[lane], sizeof got);
    return got;
  }
  static Given of(const emulator::Warp& warp, unsigned lane) {
    Given given;
    std::memcpy(&given, warp.given[lane], sizeof given);
    return given;
  }
  static void tell(emulator::Warp& warp, unsigned lane, const Got& got) { std::memcpy(warp.got[lane], &got, sizeof got); }
};

template <class T>
struct FromLane {
  T value;
  unsigned from;
};
template <class T>
inline T from_lane_of(const char* what, unsigned mask, T value, unsigned from) {
  static_assert(std::is_arithmetic_v<T>, "numbers only");
  using Lanes = Together<FromLane<T>, T>;
  return Lanes::with(what, mask, {value, from & 31}, [](emulator::Warp& warp, unsigned lanes) {
    for (unsigned left = lanes; left; left &= left - 1) {
      const unsigned lane = __builtin_ctz(left), source = Lanes::of(warp, lane).from;
      if (!(lanes >> source & 1)) emulator::fail("a shuffle from lane %u, which takes no part", source);
      Lanes::tell(warp, lane, Lanes::of(warp, source).value);
    }
  });
}
template <class T, class Combine>
inline T reduced(const char* what, unsigned mask, T value, Combine) {
  using Lanes = Together<T, T>;
  return Lanes::with(what, mask, value, [](emulator::Warp& warp, unsigned lanes) {
    T all = Lanes::of(warp, __builtin_ctz(lanes));
    for (unsigned left = lanes & (lanes - 1); left; left &= left - 1)
      all = Combine()(all, Lanes::of(warp, __builtin_ctz(left)));
    for (unsigned left = lanes; left; left &= left - 1) Lanes::tell(warp, __builtin_ctz(left), all);
  });
}
struct Sum {
  template <class T>
  T operator()(T a, T b) const { return a + b; }
};
struct Lowest {
  template <class T>
  T operator()(T a, T b) const { return b < a ? b : a; }
};
struct Highest {
  template <class T>
  T operator()(T a, T b) const { return a < b ? b : a; }
};
struct Bits {
  unsigned operator()(unsigned a, unsigned b) const { return a | b; }
};
inline unsigned own_lane() { return emulator::running->lane; }
}  // namespace host

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane) { return host::from_lane_of("__shfl_sync", mask, value, lane); }
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return host::from_lane_of("__shfl_xor_sync", mask, value, host::own_lane() ^ lanes);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned lanes) {
  return host::from_lane_of("__shfl_up_sync", mask, value, host::own_lane() < lanes ? host::own_lane() : host::own_lane() - lanes);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes) {
  return host::from_lane_of("__shfl_down_sync", mask, value, host::own_lane() + lanes > 31 ? host::own_lane() : host::own_lane() + lanes);
}

template <class T>
inline T __reduce_add_sync(unsigned mask, T value) { return host::reduced("__reduce_add_sync", mask, value, host::Sum()); }
template <class T>
inline T __reduce_min_sync(unsigned mask, T value) { return host::reduced("__reduce_min_sync", mask, value, host::Lowest()); }
template <class T>
inline T __reduce_max_sync(unsigned mask, T value) { return host::reduced("__reduce_max_sync", mask, value, host::Highest()); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return host::reduced("__ballot_sync", mask, predicate ? 1u << host::own_lane() : 0u, host::Bits());
}
inline int __any_sync(unsigned mask, int predicate) {
  return host::reduced("__any_sync", mask, predicate ? 1u : 0u, host::Bits());
}
inline int __all_sync(unsigned mask, int predicate) {
  return !host::reduced("__all_sync", mask, predicate ? 0u : 1u, host::Bits());
}
inline void __syncwarp(unsigned mask = ~0u) { emulator::meet("__syncwarp", mask, nullptr); }
inline void __syncthreads() { emulator::join(0, emulator::block_dim.x, true); }
inline int __syncthreads_or(int predicate) { return emulator::join(0, emulator::block_dim.x, true, predicate != 0); }

// Memory is in order here.
inline void __threadfence_block() {}
inline void __threadfence() { emulator::glance_aside(); }
inline void __threadfence_system() { emulator::glance_aside(); }
inline void __nanosleep(unsigned nanoseconds) { emulator::sleep(nanoseconds); }
inline long long clock64() { return (long long)emulator::now(); }

namespace host {
template <class T, class Change>
inline T atomically(T* address, Change change) {
  emulator::step_aside();
  const T before = *address;
  *address = change(before);
  emulator::changed(address);
  emulator::step_aside();
  return before;
}
}  // namespace host
template <class T>
inline T atomicAdd(T* address, T value) { return host::atomically(address, [=](T old) { return (T)(old + value); }); }
template <class T>
inline T atomicMax(T* address, T value) { return host::atomically(address, [=](T old) { return max(old, value); }); }
template <class T>
inline T atomicMin(T* address, T value) { return host::atomically(address, [=](T old) { return min(old, value); }); }
template <class T>
inline T atomicOr(T* address, T value) { return host::atomically(address, [=](T old) { return old | value; }); }
template <class T>
inline T atomicExch(T* address, T value) { return host::atomically(address, [=](T) { return value; }); }
template <class T>
inline T atomicCAS(T* address, T expected, T value) {
  return host::atomically(address, [=](T old) { return old == expected ? value : old; });
}

namespace host {
// A kernel called with the addresses of its arguments.
template <class... Arguments, std::size_t... I>
inline void call_kernel(void (*kernel)(Arguments...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<Arguments*>(arguments[I])...);
}
template <class... Arguments>
inline void call_kernel(void (*kernel)(Arguments...), void** arguments) {
  call_kernel(kernel, arguments, std::index_sequence_for<Arguments...>());
}
}  // namespace host
#define EMULATED_KERNEL(name)                                                                                    \
  extern "C" __attribute__((visibility("default"))) int emulate_##name(emulator::Launch* launch, void** given) { \
    return emulator::run(launch, [](void** arguments) { host::call_kernel(name, arguments); }, given);                \
  }
