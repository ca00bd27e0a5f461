// LoRA adapters of a step's rows, after each GEMM of the base model (a site).  On any GPU since Ampere in two launches:
//
//   shrink   h = A x      for the rows with an adapter; A has the rows of all linear layers (parts) of the site
//   expand   y += B h     in place, or with the activation that follows
//
// On Hopper, with up to 32 rows, `lora_add` does both in one launch and computes B A x while the preceding GEMM still
// runs. In a CUDA graph, a branch parallel to the GEMM may compute B A x (`lora_store_deltas`); `lora_add_deltas` adds
// it after the GEMM.  The launches do not depend on which rows have adapters, so a CUDA graph can capture all of these
// kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

constexpr int kLoraParts = 3;                    // maximum linear layers of a site
constexpr int kLoraFields = 2 + 4 * kLoraParts;  // fields of a site in a table
constexpr int kLoraRows = 32;                    // maximum rows per tile
constexpr int kLoraRanks = 16;                   // ranks of a part are padded to a multiple
constexpr int kLoraInputs = 32;                  // inputs per packed block of A
constexpr int kLoraFeatures = 32;                // features per packed block of B

// The adapters in device slots, and the rows of the step that have them.
//
// A is packed in blocks [16 ranks, 32 inputs], B in blocks [32 features, 16 ranks], each 32 lanes times 16 elements:
//   A  [rank blocks, input blocks]     lane 4 g + t: inputs 8 t .. 8 t + 7 of rank g, then of rank g + 8
//   B  [feature blocks, rank blocks]   lane 4 g + t, j = 0 .. 3: ranks 4 t .. 4 t + 3 of feature
//                                      8 (g / 2) + 2 j + g % 2
struct LoraRows {
  Dtype dtype;          // dtype of x, y and weights: bf16 or fp16
  const void* weights;  // [slots, slot_elements]: per slot the packed matrices of its adapter
  int64_t slot_elements;
  // [slots, sites, kLoraFields]: offset of A in the slot, sum of the parts' ranks (0: nothing is added); then per part
  // the offset of B, its ranks (0: nothing is added), and two fields that are not read.
  const int64_t* table;
  int sites, site;
  const int32_t* order;  // rows with an adapter, sorted by adapter
  const int4* tiles;     // [tiles]: slot (-1: no tile), first index into order, number of rows (up to kLoraRows), 0
  int tile_count;
  int rows;   // rows of the step
  int ranks;  // maximum ranks of an adapter at this site, all parts together
};

struct LoraShrinkArgs : LoraRows {
  int splits;     // partial sums per element of h
  void* h;        // [splits, rows, ranks] f32, by index into order; lora_shrink_in_clusters: [rows, ranks] in dtype
  const void* x;  // [rows, inner], 16-byte aligned rows; inner is a multiple of 8
  int64_t x_stride;
  int inner;
};

void lora_shrink(const LoraShrinkArgs& args, cudaStream_t stream);

// lora_shrink on Hopper: it writes complete sums to h, so that lora_expand reads each value once.
bool fits_shrink_in_clusters();
void lora_shrink_in_clusters(const LoraShrinkArgs& args, cudaStream_t stream);

// Destination of B h.
struct LoraOut : LoraRows {
  void* y;  // [rows, features of all parts], 16-byte aligned rows and parts
  int64_t y_stride;
  int parts, features[kLoraParts];
  // Null: y += B h.  Otherwise out [rows, features] = silu(gate) * up for all rows, where y + B h is gate, then up.
  void* out;
  int64_t out_stride;
  const int32_t* slot_of_row;  // [rows]: -1: no adapter.  Read only with `out`
};

struct LoraExpandArgs : LoraOut {
  int splits;     // 0: h is the output of lora_shrink_in_clusters
  const void* h;  // as in LoraShrinkArgs
  float* deltas;  // [rows, features of all parts]; only lora_store_deltas writes it
};

void lora_expand(const LoraExpandArgs& args, cudaStream_t stream);

// deltas = B h for the rows with an adapter; 0 in parts that the adapter leaves as they are.  Other rows are not
// written, and y is not read.
void lora_store_deltas(const LoraExpandArgs& args, cudaStream_t stream);

struct LoraDeltasArgs {
  Dtype dtype;                 // dtype of y and out: bf16 or fp16
  const float* deltas;         // [rows, columns], written by lora_store_deltas
  const int32_t* slot_of_row;  // [rows]: -1: no adapter
  void* y;                     // [rows, columns], 16-byte aligned rows
  int64_t y_stride;
  int rows, columns;
  // Null: y += deltas of the rows with an adapter.  Otherwise out [rows, columns / 2] = silu(gate) * up for all rows,
  // where y + deltas is gate, then up.
  void* out;
  int64_t out_stride;
};

void lora_add_deltas(const LoraDeltasArgs& args, cudaStream_t stream);

constexpr int kLoraAddRanks = 128;  // maximum `ranks` of lora_add

struct LoraAddArgs : LoraOut {
  const void* x;  // as in LoraShrinkArgs
  int64_t x_stride;
  int inner;
  bool x_is_ready;  // x was complete before the preceding kernel could let this one start
};

// Whether lora_add() supports these arguments: Hopper, up to kLoraRows rows and kLoraAddRanks ranks.
bool fits_lora_add(const LoraRows& args);

void lora_add(const LoraAddArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
