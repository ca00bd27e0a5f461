// The pairs of a token and one of its experts, sorted by expert on the device, and cut into tiles for a grouped GEMM.
//
//   chosen [pairs] ── count ──> pairs per expert ── prefix sums ──> first place of each expert ── scatter ──> order [pairs]
//
// The host needs only the number of pairs, so a CUDA graph can capture these launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

struct PairTile {
  int expert, first, count;  // its pairs are order[first], ..., order[first + count - 1]
  int alone;                 // 1: no other tile has this expert, so its weights are read once
};

struct PairOrder {
  int* tile_count;  // [1] number of tiles; two tickets follow, initially 0, for the two GEMMs
  PairTile* tiles;  // [max_tiles], sorted by expert, then by place
  int* order;       // [pairs]: pairs sorted by expert, in any order within an expert
  int* counts;      // [chunks, experts], used if several CTAs sort
  int pairs, experts;
  int tile_pairs;  // maximum pairs per tile

  int* ticket(int gemm) const { return tile_count + 1 + gemm; }
};

// Return the bytes of a PairOrder's arrays, and a PairOrder with its arrays in `memory`.
int64_t pair_order_bytes(int pairs, int experts, int tile_pairs);
PairOrder pair_order_at(void* memory, int pairs, int experts, int tile_pairs);

// chosen [pairs]: below `experts`, which is at most 512.
void sort_pairs(const int* chosen, const PairOrder& to, cudaStream_t stream);

// sorted [pairs, row_bytes]: row p is row order[p] / top of x.  row_bytes is a multiple of 16.
void gather_rows(const void* x, int row_bytes, int top, const PairOrder& by, void* sorted, cudaStream_t stream);

}  // namespace quire::cuda
