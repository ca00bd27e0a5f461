// The linear layer of linear.h for bf16 activations and e4m3 weights, which halves the bytes read.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

struct LinearFp8Args {
  const void* x;     // [tokens, inner] bf16
  int64_t x_stride;  // elements between rows
  const void* norm;  // [inner] bf16: each row of x becomes rms_norm(row, norm, eps) first; or null
  float eps;
  const void* weight;  // [rows, inner] e4m3: `features` rows; with silu_mul `features` gate rows, then as many up rows
  const float* scale;  // [rows]; if `blocks`, [rows / 128, inner / 128]
  bool blocks;
  const void* bias;  // [rows] bf16, or null
  void* out;         // [tokens, features] bf16, or float32
  int64_t out_stride;
  int tokens, features, inner;
  bool add, silu_mul, float32_out;  // as in linear.h
};

// Whether linear_fp8() supports these arguments: a Hopper GPU, tensors that TMA can copy, and few enough tokens that a
// CTA converts all of x: one token of up to 16,384 elements, two of 8,192 or four of 4,096.
bool fits_linear_fp8(const LinearFp8Args& args);

void linear_fp8(const LinearFp8Args& args, cudaStream_t stream);

}  // namespace quire::cuda
