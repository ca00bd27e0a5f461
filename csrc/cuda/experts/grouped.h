// The two GEMMs of `experts` on Hopper for any number of tokens: one launch each over the tiles of a PairOrder.
#pragma once

#include "cuda/experts/experts.h"
#include "cuda/experts/sort.h"

namespace quire::cuda::grouped {

enum class Kind { silu, clamped, down };  // what is computed from the results of a low and a high row

struct Gemm {
  const void* x;       // [places, size]; a place is the index of a pair in `order`
  const void* weight;  // [experts, 2 * rows, size], with rows = inner for gate_up, hidden / 2 for down; or packed
  const void* bias;    // [experts, 2 * rows], or null
  void* out;           // gate_up: [places, rows]; down: [pairs, 2 * rows]
  PairOrder order;
  int rows, size;       // rows: low rows per expert; size: contracted dimension
  ExpertsArgs experts;  // read for the activation's constants
};

// Readers of weights (grouped.cuh, packed.cuh): bf16 or fp16, or a format of experts_layout.h with activations in bf16.
template <class T>
struct PlainRows;
template <class Format, int kParts>
struct PackedRows;
struct Mxfp4;
struct Fp8;

constexpr int kPlainTilePairs = 192, kPackedTilePairs = 96, kFewTilePairs = 32;  // maximum pairs per tile

template <class Rows, Kind kKind>
void run(const Gemm& gemm, cudaStream_t stream);

}  // namespace quire::cuda::grouped
