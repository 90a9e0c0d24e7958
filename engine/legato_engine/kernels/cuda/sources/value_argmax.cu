// The likeliest bin of a token's decoder, and how sure the model is of it. `reference_certainty.py` specifies the
// certainty.
#include "value_math.cuh"

// row_payload [R, 2] and payload [B, 2]: (value, 0) for SCALAR, both for PAIR, else zeros. certainty [B, 2]: the token's
// probability against that of END under the constraint, and that of nearby values, else ones. `constraint` is by token,
// or by entry[token] with an `entry`. A block is a row, its warps the values.
extern "C" __global__ void __launch_bounds__(64) value_argmax(
    const float* scalar_bins, const float* pair_bins, const i64* rows, const i64* row_token, const float* logits,
    const float* constraints, const i64* constraint, const i64* entry, float* row_payload, float* payload,
    float* certainty, int scalar_stride, int pair_stride) {
  __shared__ float nearby[2];
  const int batch = blockIdx.x, axis = threadIdx.x / 32;
  launch_dependents();
  wait_previous();
  const i64 row = load_fresh_i64(rows + batch), token = load_fresh_i64(row_token + row);
  const Value read = read_value(
      token, axis, scalar_bins + (i64)batch * scalar_stride, pair_bins + (i64)batch * pair_stride);
  if (threadIdx.x % 32 == 0) {
    row_payload[row * 2 + axis] = payload[batch * 2 + axis] = read.value;
    nearby[axis] = read.near;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float exists = 1.f;
  if (token == SCALAR || token == PAIR) {
    const i64 index = load_fresh_i64(constraint + (entry ? load_fresh_i64(entry + batch) : batch));
    const float *own = logits + (i64)batch * VOCAB, *change = constraints + index * VOCAB;
    exists = existence(
        __fadd_rn(load_fresh_f32(own + END), load_fresh_f32(change + END)),
        __fadd_rn(load_fresh_f32(own + token), load_fresh_f32(change + token)));
  }
  certainty[batch * 2] = exists;
  certainty[batch * 2 + 1] = nearby[0] * nearby[1];
}
