// GEMMs with int4 weights on a GPU: a memory-bound kernel for a few tokens (Hopper), and dequantisation to bf16 for
// more.
//
//   weight[row, input] = (q - zero) * scale[of its row and group] * row_scale[row]
//
// q and zero are 0 to 15; a group is 32, 64 or 128 consecutive elements of inner, the contracted dimension.  The packed
// weight is an array [rows / 16, inner / 128] of packed blocks of 16 rows x 128 elements of inner.  A packed block
// holds, without gaps:
//
//   q        [2 halves of the inputs, 8 g, 4 t, 4 w] words of 32 bits: the A fragment of lane 4 g + t for mma.m16n8k32.
//            The low nibble (h = 0) and the high nibble (h = 1) of byte b hold the value of row g + 8 (w % 2) and input
//            64 half + 32 h + 8 t + 4 (w / 2) + b
//   scales   [halves, 8 g, groups per half, 2 r] fp16, for row g + 8 r; with groups of 128 there is one half
//   zeros    u8, in the layout of the scales
//
// engine/executor/int4_layout.py packs it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

constexpr int kInt4Rows = 16, kInt4Inputs = 128;  // rows and inputs per packed block
constexpr int int4_block_bytes(int groups) { return kInt4Rows * kInt4Inputs / 2 + groups * kInt4Rows * 3; }

struct Int4Args {
  const void* x;           // [tokens, inner] bf16
  int64_t x_stride;        // elements between rows
  const uint8_t* weight;   // packed blocks of `features` rows; silu_mul: `features` gate rows, then as many up rows
  const float* row_scale;  // [rows]
  int groups;              // groups per packed block: 1, 2 or 4
  const void* bias;        // [rows] bf16, or null
  void* converted;         // scratch for quantised x: int4_converted_bytes() bytes, 16-byte aligned
  void* out;               // [tokens, features] bf16, or float32
  int64_t out_stride;
  int tokens, features, inner;
  bool add, silu_mul, float32_out;  // as in linear.h
};

constexpr int kInt4MaxTokens = 32;

// Whether linear_int4() supports these tensors, for any number of tokens: a Hopper GPU, x and out aligned to 16 bytes.
bool fits_int4(const Int4Args& args);

int64_t int4_converted_bytes(int tokens, int inner, int groups);

// Requires tokens <= kInt4MaxTokens.
void linear_int4(const Int4Args& args, cudaStream_t stream);

struct DequantiseArgs {
  const uint8_t* weight;
  const float* row_scale;
  int groups;
  int64_t rows, inner;
  void* out;  // [rows, inner] bf16
};
void dequantise_int4(const DequantiseArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
