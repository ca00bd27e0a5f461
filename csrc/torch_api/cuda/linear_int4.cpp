// Bindings of int4 linear layers on a GPU: the kernel for few tokens; for many tokens a GEMM on a temporary copy of the
// weights, dequantised to bfloat16.

#include "cuda/linear/int4.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "torch_api/cuda/convert.h"
#include "torch_api/linear.h"

namespace quire::cuda::torch_api {
namespace {

// Maximum tokens for which calling the kernel several times moves fewer bytes than dequantising the weight.
constexpr int64_t kMaxInCalls = 64;

// Groups per packed block, from its size in bytes.
int groups_of(const at::Tensor& weight) {
  for (const int groups : {1, 2, 4}) {
    if (weight.size(2) == int4_block_bytes(groups)) return groups;
  }
  TORCH_CHECK_VALUE(false, "weight: packed blocks have ", weight.size(2), " bytes, not ", int4_block_bytes(1), ", ",
                    int4_block_bytes(2), " or ", int4_block_bytes(4));
}

Int4Args checked(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                 const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& norm, bool add, bool silu_mul,
                 const at::Tensor& out) {
  const Place place = on_gpu(x);
  expect_dtype("x", x, at::kBFloat16);
  const bool wide = float32_out(x, out, add, silu_mul);
  LinearSizes sizes = check_ends(x, silu_mul, out, place, wide);
  expect_device("weight", weight, place);
  TORCH_CHECK_VALUE(weight.dim() == 3, "weight: has ", weight.dim(), " dimensions, not 3");
  expect_contiguous("weight", weight);
  expect_dtype("weight", weight, at::kByte);
  sizes.rows.agree("weight", weight.size(0) * kInt4Rows);
  sizes.inner.agree("weight", weight.size(1) * kInt4Inputs);
  expect_plain("scale", scale, {sizes.rows}, at::kFloat, place);
  check_around(sizes, x, bias, norm, place);
  TORCH_CHECK_VALUE(sizes.features % kInt4Rows == 0, "out: features is ", int64_t{sizes.features},
                    ", not a multiple of ", kInt4Rows);
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  TORCH_CHECK_VALUE(sizes.inner <= kMax && sizes.rows <= kMax, "weight: over 2^31 rows or columns");
  return {
      .x = x.const_data_ptr(),
      .x_stride = x.stride(0),
      .weight = weight.const_data_ptr<uint8_t>(),
      .row_scale = scale.const_data_ptr<float>(),
      .groups = groups_of(weight),
      .bias = bias ? bias->const_data_ptr() : nullptr,
      .out = out.data_ptr(),
      .out_stride = out.stride(0),
      .tokens = static_cast<int>(std::min(x.size(0), kMax)),
      .features = static_cast<int>(out.size(1)),
      .inner = static_cast<int>(x.size(1)),
      .add = add,
      .silu_mul = silu_mul,
      .float32_out = wide,
  };
}

void in_calls(Int4Args args, const at::TensorOptions& options, cudaStream_t stream) {
  constexpr int64_t kElementBytes = 2;  // bytes per element
  const int64_t converted = int4_converted_bytes(std::min(args.tokens, kInt4MaxTokens), args.inner, args.groups);
  const at::Tensor scratch = at::empty({converted}, options.dtype(at::kByte));
  args.converted = scratch.data_ptr();
  for (int left = args.tokens; left > 0; left -= kInt4MaxTokens) {
    args.tokens = std::min(left, kInt4MaxTokens);
    cuda::linear_int4(args, stream);
    args.x = static_cast<const char*>(args.x) + kInt4MaxTokens * args.x_stride * kElementBytes;
    args.out = static_cast<char*>(args.out) + kInt4MaxTokens * args.out_stride * (args.float32_out ? 4 : kElementBytes);
  }
}

void linear_int4(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                 const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& norm, double eps, bool add,
                 bool silu_mul, const at::Tensor& out) {
  Int4Args args = checked(x, weight, scale, bias, norm, add, silu_mul, out);
  const c10::cuda::CUDAGuard guard(x.device());
  if (out.numel() == 0) return;
  at::Tensor y = norm ? normed(x, *norm, eps) : x;
  if (x.size(0) <= kMaxInCalls && !in_16_bytes(y.const_data_ptr(), y.stride(0), 2)) y = y.contiguous();
  args.x = y.const_data_ptr();
  args.x_stride = y.stride(0);
  if (x.size(0) <= kMaxInCalls && fits_int4(args)) return in_calls(args, x.options(), stream_of(x));
  const at::Tensor plain = at::empty({weight.size(0) * kInt4Rows, x.size(1)}, x.options());
  dequantise_int4({.weight = args.weight,
                   .row_scale = args.row_scale,
                   .groups = args.groups,
                   .rows = plain.size(0),
                   .inner = plain.size(1),
                   .out = plain.data_ptr()},
                  stream_of(x));
  linear_chain(y, plain, bias, std::nullopt, eps, add, silu_mul, out);
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) { m.impl("linear_int4", linear_int4); }

}  // namespace
}  // namespace quire::cuda::torch_api
