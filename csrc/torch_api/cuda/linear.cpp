// Binds matrix products on a GPU: the kernel for few tokens, torch's own products for many.

#include "cuda/linear/linear.h"

#include <torch/library.h>

#include <limits>
#include <optional>

#include "torch_api/cuda/convert.h"
#include "torch_api/linear.h"

namespace quire::cuda::torch_api {
namespace {

void linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
            const std::optional<at::Tensor>& norm, double eps, bool add, bool silu_mul, const at::Tensor& out) {
  check_linear(x, weight, bias, norm, silu_mul, out, on_gpu(x));
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

TORCH_LIBRARY_IMPL(quire, CUDA, m) { m.impl("linear", linear); }

}  // namespace
}  // namespace quire::cuda::torch_api
