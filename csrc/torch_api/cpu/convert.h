// Conversion from tensors to the CPU kernels' arguments.  The kernels check nothing, so every index is checked here.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "cpu/cache.h"
#include "cpu/layers.h"
#include "cpu/simd.h"

namespace quire::cpu::torch_api {

// Number of threads for this call's kernel.
int threads();

inline Cache bytes_of(const at::Tensor& cache) {
  return {static_cast<char*>(cache.data_ptr()), cache.stride(0) * cache.element_size()};
}

template <class Id>
void expect_below(const char* who, const Id* ids, int64_t count, int64_t first, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(ids[i] >= first && ids[i] < limit, who, "[", i, "] is ", ids[i], ", not in [", first, ", ", limit,
                      ")");
  }
}

// Calls run(T{}) with the kernels' own type for the dtype of t.
template <class Run>
void by_dtype(const char* who, const at::Tensor& t, const Run& run) {
  switch (t.scalar_type()) {
    case at::kFloat: return run(float{});
    case at::kBFloat16: return run(bf16{});
    case at::kHalf: return run(fp16{});
    default: TORCH_CHECK_VALUE(false, who, ": dtype is ", t.scalar_type(), ", not float32, bfloat16 or float16");
  }
}

// A tensor [tokens, size] counts as one head per token.
template <class T>
Heads<T> heads_of(const at::Tensor& t) {
  auto* data = static_cast<T*>(const_cast<void*>(t.const_data_ptr()));
  return {data, t.stride(0), t.dim() == 3 ? t.stride(1) : 0};
}

}  // namespace quire::cpu::torch_api
