// Kernels around cuBLAS's e4m3 GEMM: quantise each row of x to e4m3 with one scale per row, and multiply the GEMM's
// result by the scales of x and of the weight.  If the weight has one scale per 128 x 128 block, x gets one scale per
// 128 elements of a row, and cuBLAS applies the scales of both.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

struct QuantiseArgs {
  const void* x;     // [tokens, size] bf16, rows aligned to 16 bytes
  int64_t x_stride;  // elements between rows
  const void* norm;  // [size] bf16: each row becomes rms_norm(row, norm, eps) first; or null
  float eps;
  void* values;  // [tokens, size] e4m3, out; x = values * scale
  float* one;    // [1], out: the value 1, cuBLAS's scale argument for both operands; not written if group_stride > 0
  float* scale;  // [tokens], out: the row's maximum magnitude / the maximum of e4m3
  int64_t group_stride;  // 0: one scale per row; else one per 128 elements, scale is [size / 128, group_stride]
  int64_t tokens;
  int size;  // a multiple of 16 (128 if group_stride > 0), at most kMaxQuantised
};
constexpr int kMaxQuantised = 65536;
void quantise_rows(const QuantiseArgs& args, cudaStream_t stream);

struct ScaleArgs {
  const void* gemm;      // result of the GEMM, in out's dtype: [tokens, features]; silu_mul: [tokens, 2 * features]
  const float* x_scale;  // [tokens]; null if the GEMM has applied the scales
  const float* weight_scale;  // [columns of GEMM]; or null
  const void* bias;           // [columns of GEMM] bf16; or null
  void* out;                  // [tokens, features] bf16, or float32
  int64_t out_stride, tokens, features;
  bool add, silu_mul, float32_out;  // as in linear.h
};
void scale_gemm(const ScaleArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
