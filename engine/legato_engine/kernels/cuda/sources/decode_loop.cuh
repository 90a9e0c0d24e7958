// The end of a step that the host does not launch, as specified by kernels/decode_loop.py.
#pragma once
#include "common.cuh"

constexpr i64 ANY = -2;

// After token `successors[c][0]`, or any, constraint c becomes `successors[c][1]`.
__device__ __forceinline__ i64 successor(const i64 (*successors)[2], i64 constraint, i64 token) {
  const i64* of = successors[constraint];
  return of[0] == ANY || of[0] == token ? of[1] : constraint;
}

// `ring` [steps, stride] and `words` (steps done; whether to stop) are page-locked memory of the host, which reads a
// step's tokens once `words[0]` counts it: between the two each writer needs a fence of the system.
__device__ __forceinline__ void publish_token(volatile i64* ring, int stride, i64 step, int b, i64 token) {
  ring[step * stride + b] = token;
}
__device__ __forceinline__ void publish_count(volatile i64* words, i64 done) { words[0] = done; }
__device__ __forceinline__ bool stop_requested(const volatile i64* words) { return words[1] != 0; }

// Whether a row's drafting step is the last that the host has planned for: after the row's last token, or where it could
// not write as many draft tokens as it may have.
__device__ __forceinline__ bool row_ends(i64 newest, i64 last, i64 room, i64 reach, i64 token) {
  const i64 left = last - newest;
  return token < 0 || left < 0 || newest + 1 + min(max(room, (i64)0), left) > reach;
}

// Whether a step follows the first `done`.
__device__ __forceinline__ bool follows(bool broken, i64 done, i64 limit, bool stop) {
  return !broken && done < limit && !stop;
}
