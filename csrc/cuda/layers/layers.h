// Elementwise kernels and norms between the GEMMs of a decoder layer.  csrc/ops.cpp has the guarantees.  Arithmetic is
// in float, with one rounding to the dtype of the model.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/cache/cache.h"
#include "cuda/common/dtype.h"

namespace quire::cuda {

// [tokens, heads, size]; a head's elements are contiguous.  Strides in elements.
struct Heads {
  void* data;
  int64_t token_stride, head_stride;
};

struct RmsNormArgs {
  Dtype dtype;  // dtype of all tensors: f32, bf16, fp16
  Heads x, out;
  const void* weight;  // [size]
  float eps;
  int64_t tokens, heads;
  int size;  // at most kMaxNorm
};
constexpr int kMaxNorm = 16384;
void rms_norm(const RmsNormArgs& args, cudaStream_t stream);

struct SiluMulArgs {
  Dtype dtype;
  const void* gate_up;  // [tokens, 2 * size]
  void* out;            // [tokens, size]
  int64_t tokens, size;
};
void silu_mul(const SiluMulArgs& args, cudaStream_t stream);

struct RopeArgs {
  Dtype dtype, stored;    // qkv, cos, sin, q_norm, k_norm: f32, bf16, fp16 · caches: the same, or e4m3
  Heads qkv;              // [tokens, heads + 2 * kv_heads, size]
  const void *cos, *sin;  // [tokens, size]
  int64_t cos_stride, sin_stride;
  const void *q_norm, *k_norm;  // [size], or both null
  float eps;
  float norm_offset;  // added to the elements of q_norm and k_norm
  KvTarget to;
  int64_t tokens;
  int heads, kv_heads, size;  // size even, at most kMaxRope
};
constexpr int kMaxRope = 256;
void rope_kv_write(const RopeArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
