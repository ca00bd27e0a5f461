// What surrounds a product of two operands in e4m3, which the vendor's library computes: the rows of x are rounded to e4m3
// with a scale each, and the product is multiplied by the scales of x and of the weight.  Where the weight has a scale for
// each 128 x 128 numbers, x has one for each 128 of a row, and the library multiplies by both.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

struct QuantiseArgs {
  const void* x;     // [tokens, size] bf16, rows in 16 bytes
  int64_t x_stride;  // numbers between rows
  const void* norm;  // [size] bf16: each row becomes rms_norm(row, norm, eps) first; or null
  float eps;
  void* numbers;         // [tokens, size] e4m3, out; x = numbers * scale
  float* one;            // [1], out: 1; with groups it is not written
  float* scale;          // [tokens], out: a row's largest magnitude over the largest number of e4m3
  int64_t group_stride;  // 0; else scale is [size / 128, group_stride], of each 128 numbers of a row
  int64_t tokens;
  int size;  // a multiple of 16, with groups of 128, at most kMaxQuantised
};
constexpr int kMaxQuantised = 65536;
void quantise_rows(const QuantiseArgs& args, cudaStream_t stream);

struct ScaleArgs {
  const void* product;        // [tokens, features, or 2 * features with silu_mul], of out's dtype: gate, then up
  const float* x_scale;       // [tokens]; or null: the product is scaled
  const float* weight_scale;  // of each column of the product; or null
  const void* bias;           // likewise, bf16; or null
  void* out;                  // [tokens, features] bf16, or float32
  int64_t out_stride, tokens, features;
  bool add, silu_mul, float32_out;  // as in linear.h
};
void scale_product(const ScaleArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
