#pragma once

namespace quire::cuda {

// The number type of a tensor.  Bindings translate it from torch's; launchers turn it into a template argument.
enum class Dtype { f32, bf16, fp16, e4m3 };

}  // namespace quire::cuda
