// Products with a weight of 4 bits on a GPU: of a few tokens at the speed at which the weight can be read, on Hopper; for more
// tokens the weight becomes bf16 again.
//
//   weight[row, input] = (number - zero) * scale[of its row and group] * row_scale[row]
//
// number and zero are 0 to 15; groups have 32, 64 or 128 inputs.  The packed weight is [rows / 16, inner / 128] records, each
// of 16 rows and 128 inputs.  A record holds, without gaps:
//
//   numbers  [2 halves of the inputs, 8 g, 4 t, 4 w] words: what lane 4 g + t of a warp multiplies by mma.m16n8k32.  Byte b
//            has in its lower half (h = 0) and in its upper half (h = 1) the number of row g + 8 (w % 2) and of input
//            64 half + 32 h + 8 t + 4 (w / 2) + b
//   scales   [halves, 8 g, groups of a half, 2 r] fp16; groups of 128 have one half here
//   zeros    the same, u8
//
// engine/executor/int4_layout.py packs it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

constexpr int kInt4Rows = 16, kInt4Inputs = 128;  // of a record
constexpr int int4_record_bytes(int groups) { return kInt4Rows * kInt4Inputs / 2 + groups * kInt4Rows * 3; }

struct Int4Args {
  const void* x;           // [tokens, inner] bf16
  int64_t x_stride;        // numbers between rows
  const uint8_t* weight;   // records; with silu_mul of features gate rows, then of as many up rows
  const float* row_scale;  // [rows]
  int groups;              // of a record: 1, 2 or 4
  const void* bias;        // [rows] bf16, or null
  void* converted;         // of int4_converted_bytes(), in 16 bytes, for the call's own use
  void* out;               // [tokens, features] bf16, or float32
  int64_t out_stride;
  int tokens, features, inner;
  bool add, silu_mul, float32_out;  // as in linear.h
};

constexpr int kInt4MostTokens = 32;

// Whether linear_int4() can take this product, whatever the number of tokens: a Hopper GPU, and x and out in 16 bytes.
bool fits_int4(const Int4Args& args);

int64_t int4_converted_bytes(int tokens, int inner, int groups);

// For at most kInt4MostTokens.
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
