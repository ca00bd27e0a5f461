// The GPU's door to matrix products: tensors come in, are checked, and leave as pointers, or as tensors to torch.

#include "cuda/linear/linear.h"

#include <torch/library.h>

#include <limits>
#include <optional>

#include "torch_api/linear_chain.h"
#include "torch_api/cuda/convert.h"

namespace quire::cuda::door {

void linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
            const std::optional<at::Tensor>& norm, double eps, bool add, bool silu_mul, const at::Tensor& out) {
  expect_linear(x, weight, bias, norm, silu_mul, out);
  expect_cuda("x", x, x);
  expect_cuda("weight", weight, x);
  expect_cuda("out", out, x);
  if (bias) expect_cuda("bias", *bias, x);
  if (norm) expect_cuda("norm", *norm, x);
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  TORCH_CHECK_VALUE(x.size(0) <= kMost && x.size(1) <= kMost && weight.size(0) <= kMost,
                    "x, weight: over 2^31 rows or columns");
  const c10::cuda::CUDAGuard guard(x.device());
  LinearArgs args{
      .dtype = model_dtype_of("x", x),
      .x = x.const_data_ptr(),
      .x_stride = x.stride(0),
      .weight = weight.const_data_ptr(),
      .bias = bias ? bias->const_data_ptr() : nullptr,
      .out = out.data_ptr(),
      .out_stride = out.stride(0),
      .tokens = static_cast<int>(x.size(0)),
      .features = static_cast<int>(out.size(1)),
      .inner = static_cast<int>(x.size(1)),
      .add = add,
      .silu_mul = silu_mul,
  };
  if (!fits_linear(args)) return linear_chain(x, weight, bias, norm, eps, add, silu_mul, out);
  at::Tensor y;  // lives until the launch
  if (norm) {
    y = normed(x, *norm, eps);
    args.x = y.const_data_ptr();
    args.x_stride = y.stride(0);
  }
  cuda::linear(args, stream_of(x));
}

}  // namespace quire::cuda::door

TORCH_LIBRARY_IMPL(quire, CUDA, m) { m.impl("linear", quire::cuda::door::linear); }
