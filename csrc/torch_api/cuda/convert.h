// Conversion from tensors to the CUDA kernels' arguments.  The host cannot read lengths, tables and kv_indices on the
// device without waiting, so the bindings do not check them: the caller must guarantee their range.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/cache/cache.h"
#include "cuda/common/dtype.h"
#include "cuda/layers/layers.h"
#include "torch_api/checks.h"

namespace quire::cuda::torch_api {

inline Dtype dtype_of(const char* who, const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return Dtype::f32;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::fp16;
    case at::kFloat8_e4m3fn: return Dtype::e4m3;
    default:
      TORCH_CHECK_VALUE(false, who, ": dtype is ", t.scalar_type(),
                        ", not float32, bfloat16, float16 or (caches) float8_e4m3fn");
  }
}

// Dtype of a tensor used in arithmetic: no e4m3.
inline Dtype model_dtype_of(const char* who, const at::Tensor& t) {
  const Dtype dtype = dtype_of(who, t);
  TORCH_CHECK_VALUE(dtype != Dtype::e4m3, who, ": dtype is ", t.scalar_type(), ", not float32, bfloat16 or float16");
  return dtype;
}

// Torch's current stream on the tensor's device.  The caller holds a c10::cuda::CUDAGuard for it.
inline cudaStream_t stream_of(const at::Tensor& t) { return c10::cuda::getCurrentCUDAStream(t.device().index()); }

// A tensor [tokens, size] counts as one head per token.
inline Heads heads_of(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.dim() == 3 ? t.stride(1) : 0};
}

// Destination of a step's keys and values.
inline KvTarget kv_target_of(const at::Tensor& k_cache, const at::Tensor& v_cache, int64_t block_size,
                             const at::Tensor& kv_indices, const float* scales) {
  return {
      .k_cache = k_cache.data_ptr(),
      .v_cache = v_cache.data_ptr(),
      .k_block_stride = k_cache.stride(0),
      .v_block_stride = v_cache.stride(0),
      .block_size = static_cast<int>(block_size),
      .kv_indices = kv_indices.const_data_ptr<int64_t>(),
      .scales = scales,
  };
}

}  // namespace quire::cuda::torch_api
