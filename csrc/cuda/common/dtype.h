#pragma once

#include <cstdint>

namespace quire::cuda {

// Element type of a tensor.  Bindings translate torch's dtype to it; launchers turn it into a template argument.
enum class Dtype { f32, bf16, fp16, e4m3 };

// Whether rows that start at `data`, `stride` elements apart, allow loads of 16 bytes.
inline bool in_16_bytes(const void* data, int64_t stride, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * element_bytes % 16 == 0;
}

}  // namespace quire::cuda
