// Units of tokens that share attention's reads, and their pages.
#pragma once
#include "worker.cuh"

__device__ __forceinline__ Unit unit_of(const Shared& shared, int index) {
  const int all = shared.unit[index];
  return Unit{all & 31, (all >> 5 & 7) + 1, DRAFTS ? 0 : all >> 8};
}
// Owners of the pages that are not in common: with DRAFTS units, else rows.
__device__ __forceinline__ int num_owners(const Arguments& a, const Shared& shared) { return DRAFTS ? shared.num_units : a.rows; }
__device__ __forceinline__ Unit owner_of(const Shared& shared, int index) {
  return DRAFTS ? unit_of(shared, index) : Unit{index, 1, shared.common[index]};
}
// Whether any rows have pages in common.
__device__ __forceinline__ bool shares_pages(const Arguments& a, const Shared& shared) { return !DRAFTS && shared.num_units < a.rows; }

// Pages of a quarter that hold positions up to `last`.
__device__ __forceinline__ int own_pages(int last, int quarter) { return (last / PAGE - quarter + SPLITS) / SPLITS; }
__device__ __forceinline__ int last_position(const Shared& shared, const Unit& unit, int step) {
  return position_of(shared, unit.token + unit.count - 1, step);
}
// Pages of the worker's quarter that the unit's tokens attend to.
__device__ __forceinline__ int pages_of(const Shared& shared, const Unit& unit, int step) {
  return own_pages(last_position(shared, unit, step), blockIdx.x % SPLITS);
}

#if !DRAFTS
// Find the units of the launch's rows by their full pages; by one warp. A row joins the unit before it if they share at least
// half of that unit's common pages.
__device__ __forceinline__ void find_units(Shared& shared, int rows) {
  const int lane = threadIdx.x % 32, quarter = blockIdx.x % SPLITS;
  const int filled = lane < rows ? (shared.position[lane] / PAGE + SPLITS - 1 - quarter) / SPLITS : 0;
  const int limit = min(filled, __shfl_up_sync(~0u, filled, 1));
  int same = 0;
  if (lane && lane < rows)
    while (same < limit && shared.pages[lane][same] == shared.pages[lane - 1][same]) same++;
  int units = 0;
  Unit unit = {0, 0, 0};
  for (int row = 0; row < rows; row++) {
    const int with_last = __shfl_sync(~0u, same, row);
    const bool joins = row && unit.count < UNIT_TOKENS && with_last && with_last * 2 >= unit.common;
    if (joins) unit = {unit.token, unit.count + 1, unit.common ? min(unit.common, with_last) : with_last};
    else unit = {row, 1, 0}, units++;
    if (lane == 0) shared.unit[units - 1] = packed(unit);
  }
  if (lane == 0) shared.num_units = units;
  __syncwarp();
  for (int index = 0; index < units; index++) {
    const Unit own = unit_of(shared, index);
    if (lane >= own.token && lane < own.token + own.count) shared.common[lane] = own.common;
  }
}
#endif
