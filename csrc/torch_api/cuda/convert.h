// What the doors of csrc/cuda share: from torch's words to the kernels'.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "torch_api/checks.h"
#include "cuda/common/dtype.h"

namespace quire::cuda::door {

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

// For numbers that are computed with: no e4m3.
inline Dtype model_dtype_of(const char* who, const at::Tensor& t) {
  const Dtype dtype = dtype_of(who, t);
  TORCH_CHECK_VALUE(dtype != Dtype::e4m3, who, ": dtype is ", t.scalar_type(), ", not float32, bfloat16 or float16");
  return dtype;
}

// The stream that torch would launch on now, on the tensor's device.  The caller holds a c10::cuda::CUDAGuard for it.
inline cudaStream_t stream_of(const at::Tensor& t) { return c10::cuda::getCurrentCUDAStream(t.device().index()); }

// A contiguous vector.
inline void expect_vector(const char* who, const at::Tensor& t, Size& size, at::ScalarType dtype,
                          const at::Tensor& like) {
  expect_cuda(who, t, like);
  expect(who, t, {size});
  expect_contiguous(who, t);
  expect_dtype(who, t, dtype);
}

// [blocks, Hkv, block_size, D]; inside a block contiguous, the stride between blocks is free.
inline void expect_cache(const char* who, const at::Tensor& cache, Size& blocks, Size& kv_heads, Size& block_size,
                         Size& dim, const at::Tensor& like) {
  expect_cuda(who, cache, like);
  expect(who, cache, {blocks, kv_heads, block_size, dim});
  TORCH_CHECK_VALUE(cache.numel() == 0 || (cache.stride(3) == 1 && cache.stride(2) == dim &&
                                           cache.stride(1) == block_size * dim),
                    who, ": blocks are not contiguous");
}

}  // namespace quire::cuda::door
