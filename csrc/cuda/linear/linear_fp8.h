// As linear.h, of bf16 with a weight in e4m3: half of the bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

struct LinearFp8Args {
  const void* x;     // [tokens, inner] bf16
  int64_t x_stride;  // numbers between rows
  const void* norm;  // [inner] bf16: each row of x becomes rms_norm(row, norm, eps) first; or null
  float eps;
  const void* weight;  // [rows, inner] e4m3: features; with silu_mul gate rows, then as many up rows
  const float* scale;  // [rows], or with `blocks` [rows / 128, inner / 128]
  bool blocks;
  const void* bias;  // [rows] bf16, or null
  void* out;         // [tokens, features] bf16, or float32
  int64_t out_stride;
  int tokens, features, inner;
  bool add, silu_mul, float32_out;  // as in linear.h
};

// Whether linear_fp8() can take this product: a Hopper GPU, rows that it can copy, and so few tokens that a CTA can hold all of
// x: one of up to 16,384 numbers, two of 8,192, four of 4,096.
bool fits_linear_fp8(const LinearFp8Args& args);

void linear_fp8(const LinearFp8Args& args, cudaStream_t stream);

}  // namespace quire::cuda
