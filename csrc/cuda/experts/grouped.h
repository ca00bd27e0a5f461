// The two GEMMs of `experts` on Hopper for any number of tokens: one launch each over the tiles of a PairOrder.
#pragma once

#include "cuda/experts/experts.h"
#include "cuda/experts/sort.h"

namespace quire::cuda::grouped {

enum class Kind { silu, clamped, down };  // what is computed from the results of a low and a high row

struct Gemm {
  const void* x;       // [places, size]; a place is the index of a pair in `order`
  const void* weight;  // gate_up: [experts, 2 * rows, size], down: likewise, with rows = hidden / 2
  const void* bias;    // [experts, 2 * rows], or null
  void* out;           // gate_up: [places, rows]; down: [pairs, 2 * rows]
  PairOrder order;
  int rows, size;       // rows: low rows per expert; size: contracted dimension
  ExpertsArgs experts;  // read for the activation's constants
};

template <class T, Kind kKind>
void run(const Gemm& gemm, cudaStream_t stream);

}  // namespace quire::cuda::grouped
