// The pairs of a token and one of its experts, sorted by expert on the device, and cut into tiles for a grouped GEMM.
//
//   chosen [pairs] ── count ──> pairs per expert ── prefix sums ──> first place of each expert ── scatter ──> order [pairs]
//
// The host knows the number of pairs only, so a CUDA graph may hold these launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

constexpr int kTilePairs = 192;  // maximum pairs of a tile

struct PairTile {
  int expert, first, count;  // its pairs are order[first], ..., order[first + count - 1]
  int alone;                 // 1: no other tile has this expert, so its weights are read once
};

struct PairOrder {
  int* tile_count;  // [1], then two tickets, 0 at first: for the GEMMs that follow
  PairTile* tiles;  // [most_tiles]: experts rising, and of each expert the places rising
  int* order;       // [pairs]: pairs by expert.  Those of an expert stand in any order
  int* counts;      // [chunks, experts], used where one CTA does not sort all pairs
  int pairs, experts;

  int* ticket(int gemm) const { return tile_count + 1 + gemm; }
};

// Bytes that a PairOrder needs, and one that lies there.
int64_t pair_order_bytes(int pairs, int experts);
PairOrder pair_order_at(void* memory, int pairs, int experts);

// chosen [pairs]: below `experts`, which is at most 512.
void sort_pairs(const int* chosen, const PairOrder& to, cudaStream_t stream);

// sorted [pairs, row_bytes]: row p is row order[p] / top of x.  row_bytes is a multiple of 16.
void gather_rows(const void* x, int row_bytes, int top, const PairOrder& by, void* sorted, cudaStream_t stream);

}  // namespace quire::cuda
