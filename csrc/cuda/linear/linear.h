// Linear layer for a few tokens: out = x weight^T + bias, with residual addition or silu(gate) * up fused; Hopper only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

struct LinearArgs {
  Dtype dtype;         // dtype of all tensors: bf16 or fp16
  const void* x;       // [tokens, inner]
  int64_t x_stride;    // elements between rows
  const void* weight;  // [features, inner]; with silu_mul `features` gate rows, then `features` up rows
  const void* bias;    // [features, or 2 * features with silu_mul], or null
  void* out;           // [tokens, features]
  int64_t out_stride;
  int tokens, features, inner;
  bool add;          // out += the result, which is rounded to dtype first; if false, out = the result
  bool silu_mul;     // out = silu(gate) * up; gate and up are rounded to dtype first
  bool float32_out;  // out is float32; excludes add and silu_mul
  bool share_x;      // let the next kernel start only once x is complete, so that it may read x before its wait
};

// Whether linear() supports these arguments: few enough tokens to beat cuBLAS, a Hopper GPU, and tensors that TMA can
// copy.
bool fits_linear(const LinearArgs& args);

void linear(const LinearArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
