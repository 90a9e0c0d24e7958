// B tokens, R rows of the state, C positions, V vectors of 16 bytes, BLOCK draft tokens of a row. A row's tokens are
// adjacent, by draft index (`lanes`); index 0 is the newest token.
#include "common.cuh"

// Inputs of each token [B], from drafts [R, BLOCK], newest and last [R]; `sampled` and `samples` are the row and
// position of the token sampled from it. A token after an unknown draft token, or after its row's last position,
// becomes padding.
extern "C" __global__ void __launch_bounds__(128) place(const i64* drafts, const i64* newest, const i64* last, i64* rows,
                                                        const i64* lanes, i64* sources, i64* tokens, i64* positions,
                                                        i64* firsts, i64* sampled, i64* samples, int batch, int scratch) {
  const int b = blockIdx.x * 128 + threadIdx.x;
  if (b >= batch) return;
  const i64 row = rows[b], lane = lanes[b], first = newest[row], position = first + lane;
  bool idle = position > last[row];
  i64 draft = 0;
  for (int i = 0; i < lane && !idle; i++) {
    draft = drafts[row * BLOCK + i];
    idle = draft < 0 || draft >= VOCAB;
  }
  sources[b] = idle || lane ? -1 : row;
  tokens[b] = idle || !lane ? 0 : draft;
  positions[b] = idle ? 0 : position;
  firsts[b] = idle ? 1 : first;
  sampled[b] = idle ? scratch : row;
  samples[b] = idle ? 0 : position + 1;
  if (idle) rows[b] = scratch;
}

// Accepts a row's sampled tokens up to and including the first that was not drafted, to history [R, C]; the last
// one's position, token and residual stream go to the row. counts and proposed [B] are valid at draft index 0. A
// block is a row, or idle.
extern "C" __global__ void __launch_bounds__(128) settle(const i64* drafts, const i64* rows, const i64* lanes,
                                                         const i64* samples, const i64* sampled, const uint4* hidden,
                                                         i64* history, i64* newest, i64* row_token, uint4* row_hidden,
                                                         i64* counts, i64* proposed, int batch, int context, int vectors,
                                                         int scratch) {
  const int b = blockIdx.x, thread = threadIdx.x;
  if (lanes[b]) return;
  const i64 row = rows[b];
  if (row == scratch) {
    if (thread == 0) counts[b] = proposed[b] = 0;
    return;
  }
  int fed = 1, accepted = 0;
  while (fed <= BLOCK && b + fed < batch && lanes[b + fed] == fed && rows[b + fed] == row) fed++;
  while (accepted < fed - 1 && sampled[b + accepted] == drafts[row * BLOCK + accepted]) accepted++;
  if (thread <= accepted) history[row * context + samples[b + thread]] = sampled[b + thread];
  if (thread == 0) {
    const i64 token = sampled[b + accepted];
    newest[row] = samples[b + accepted];
    row_token[row] = token < 0 ? 0 : token;
    counts[b] = accepted + 1;
    proposed[b] = fed - 1;
  }
  for (int i = thread; i < vectors; i += 128)
    row_hidden[row * vectors + i] = hidden[(i64)(b + accepted) * vectors + i];
}
