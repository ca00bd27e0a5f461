// out = x weight^T + bias for a few tokens, with what a decoder layer does right after it; Hopper only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

struct LinearArgs {
  Dtype dtype;         // of all numbers: bf16 or fp16
  const void* x;       // [tokens, inner]
  int64_t x_stride;    // numbers between rows
  const void* weight;  // [features, inner]; with silu_mul features gate rows, then as many up rows
  const void* bias;    // [features, or 2 * features with silu_mul], or null
  void* out;           // [tokens, features]
  int64_t out_stride;
  int tokens, features, inner;
  bool add;          // out += the product, which is rounded first; else out = the product
  bool silu_mul;     // out = silu(gate) * up, of the rounded products
  bool float32_out;  // out is float32, and neither of both
};

// Whether linear() can take this product.  It needs few enough tokens to beat the vendor's product, a GPU with bulk
// copies, and rows that these can copy.
bool fits_linear(const LinearArgs& args);

void linear(const LinearArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
