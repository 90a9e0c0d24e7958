// What the emulated machine is asked to do in test_machine.py.
#include "common.cuh"

extern "C" __global__ void multiply(const uint4* a, const uint2* b, float4* d, int of_half) {
  const uint4 x = a[threadIdx.x];
  const uint2 y = b[threadIdx.x];
  float4 sum = d[threadIdx.x];
  if (of_half)
    mma_half(sum, x.x, x.y, x.z, x.w, y.x, y.y);
  else
    mma(sum, x.x, x.y, x.z, x.w, y.x, y.y);
  d[threadIdx.x] = sum;
}

// Rows of 16 bytes to four matrices and back: loaded transposed, and transposed again.
extern "C" __global__ void turn(const uint4* rows, u32* loaded, u32* turned) {
  extern __shared__ __align__(128) unsigned char memory[];
  uint4* mine = reinterpret_cast<uint4*>(memory) + threadIdx.x;
  *mine = rows[threadIdx.x];
  __syncwarp();
  const uint4 v = load_transposed(mine);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    loaded[i * 32 + threadIdx.x] = (&v.x)[i];
    turned[i * 32 + threadIdx.x] = transposed((&v.x)[i]);
  }
}

extern "C" __global__ void warp_words(const int* values, int* out) {
  const int v = values[threadIdx.x], lane = threadIdx.x % 32;
  int* to = out + threadIdx.x * 8;
  to[0] = __shfl_sync(~0u, v, 5), to[1] = __shfl_xor_sync(~0u, v, 3), to[2] = __shfl_up_sync(~0u, v, 4);
  to[3] = __reduce_add_sync(~0u, v), to[4] = __reduce_max_sync(~0u, v), to[5] = (int)__ballot_sync(~0u, v & 1);
  to[6] = __any_sync(~0u, v == values[7]), to[7] = lane < 8 ? __shfl_sync(0xffu, v, lane ^ 1) : -1;
}

// What a copy brings is there when its barrier's phase ends, and not before. `early`: it is read at once.
extern "C" __global__ void copied(const uint4* from, u32* out, int early) {
  extern __shared__ __align__(128) unsigned char memory[];
  u64* barrier = reinterpret_cast<u64*>(memory + 512);
  if (threadIdx.x == 0) barrier_init(barrier, 1), barriers_ready();
  __syncthreads();
  if (threadIdx.x == 0) {
    barrier_expect(barrier, 512);
    copy_bulk(memory, from, 512, barrier, stream_policy());
  }
  __syncwarp();
  if (!early) barrier_wait(barrier, 0);
  out[threadIdx.x] = reinterpret_cast<u32*>(memory)[threadIdx.x * 4];
  if (early) barrier_wait(barrier, 0);
}

enum {
  NOT_ALIGNED, BEYOND, ABSENT_LANE, OTHER_COLLECTIVE, OTHER_COUNT, MANY_ARRIVALS, UNFINISHED_COPY, STUCK, ENDLESS, TRAP,
  INDEX, BEYOND_TENSOR, BEYOND_VARIABLE, CAST
};

__device__ __noinline__ u32 word_at(const u32* words, int index) { return words[index]; }

struct Sums {
  float of[4];
  int beside;
};

extern "C" __global__ void faulty(const uint4* from, u32* word, int fault, int index) {
  extern __shared__ __align__(128) unsigned char memory[];
  u64* barrier = reinterpret_cast<u64*>(memory + 512);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) barrier_init(barrier, 1);
  __syncthreads();
  switch (fault) {
    case NOT_ALIGNED: word[0] = load_fresh(reinterpret_cast<const unsigned char*>(from) + index).x; break;
    case BEYOND: memory[index] = 1; break;
    case ABSENT_LANE:
      if (lane < 8) __shfl_sync(0xffu, lane, index);
      break;
    case OTHER_COLLECTIVE:
      if (lane == 3)
        __syncwarp();
      else
        __any_sync(~0u, lane);
      break;
    case OTHER_COUNT:
      if (warp)
        threads_sync<3, 64>();
      else
        threads_sync<3, 96>();
      break;
    case MANY_ARRIVALS:
      barrier_expect(barrier, 16);
      break;
    case UNFINISHED_COPY:
      if (threadIdx.x == 0) {
        barrier_expect(barrier, 512);
        copy_bulk(memory, from, 512, barrier, stream_policy());
      }
      break;
    case STUCK:
      if (warp)
        threads_sync<5, 64>();
      else
        while (load_acquire(word) != 7u) {}
      break;
    case ENDLESS:
      for (u32 polls = 0;; polls++) __nanosleep(20);
    case TRAP: trap(); break;
    case INDEX: reinterpret_cast<Sums*>(memory)->of[index] = 1.f; break;
    case BEYOND_TENSOR: word[0] = from[index].x; break;
    case BEYOND_VARIABLE: {
      const u32 mine[4] = {};
      word[0] = word_at(mine, index);
      break;
    }
    case CAST: word[0] = (u32)(int)((float)index * 0x1p31f); break;
  }
}
