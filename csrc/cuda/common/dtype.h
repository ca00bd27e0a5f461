#pragma once

namespace quire::cuda {

// What a tensor's numbers are.  Doors translate from torch's; launchers turn it into a template argument.
enum class Dtype { f32, bf16, fp16, e4m3 };

}  // namespace quire::cuda
