#pragma once

#include <cstdint>

namespace quire::cuda {

// The number type of a tensor.  Bindings translate it from torch's; launchers turn it into a template argument.
enum class Dtype { f32, bf16, fp16, e4m3 };

// Whether rows that start `stride` numbers apart from `data` on can be read in packs of 16 bytes.
inline bool in_16_bytes(const void* data, int64_t stride, int64_t number_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * number_bytes % 16 == 0;
}

}  // namespace quire::cuda
