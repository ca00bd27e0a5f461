// Bindings of linear layers on a GPU: the memory-bound kernel for few tokens, cuBLAS through torch for many.

#include "cuda/linear/linear.h"

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <optional>

#include "cuda/linear/fp8.h"
#include "cuda/linear/linear_fp8.h"
#include "torch_api/cuda/convert.h"
#include "torch_api/linear.h"

namespace quire::cuda::torch_api {
namespace {

constexpr int64_t kBlock = 128;  // rows and columns that share a scale
constexpr int64_t kRows = 4;     // row multiple required by cuBLAS's block-scaled GEMMs
constexpr int64_t kScales = 4;   // scales per row of blocks must be a multiple, for some cuBLAS releases

int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

void check_sizes(const at::Tensor& x, const at::Tensor& weight) {
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  TORCH_CHECK_VALUE(x.size(0) <= kMax && x.size(1) <= kMax && weight.size(0) <= kMax,
                    "x, weight: over 2^31 rows or columns");
}

LinearArgs args_of(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool add,
                   bool silu_mul, const at::Tensor& out) {
  check_sizes(x, weight);
  return {
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
      .float32_out = out.scalar_type() != x.scalar_type(),
  };
}

void linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
            const std::optional<at::Tensor>& norm, double eps, bool add, bool silu_mul, const at::Tensor& out) {
  const bool wide = float32_out(x, out, add, silu_mul);
  check_linear(x, weight, x.scalar_type(), bias, norm, silu_mul, out, on_gpu(x), wide);
  const c10::cuda::CUDAGuard guard(x.device());
  LinearArgs args = args_of(x, weight, bias, add, silu_mul, out);
  if (!fits_linear(args)) return linear_chain(x, weight, bias, norm, eps, add, silu_mul, out);
  at::Tensor y;  // normed x, which must stay allocated until the launch
  if (norm) {
    y = normed(x, *norm, eps);
    args.x = y.const_data_ptr();
    args.x_stride = y.stride(0);
  }
  cuda::linear(args, stream_of(x));
}

bool linear_sharing_x(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool add,
                      const at::Tensor& out) {
  check_linear(x, weight, x.scalar_type(), bias, std::nullopt, /*silu_mul=*/false, out, on_gpu(x));
  const c10::cuda::CUDAGuard guard(x.device());
  LinearArgs args = args_of(x, weight, bias, add, /*silu_mul=*/false, out);
  args.share_x = fits_linear(args);
  if (args.share_x) {
    cuda::linear(args, stream_of(x));
  } else {
    linear_chain(x, weight, bias, std::nullopt, 0.0, add, /*silu_mul=*/false, out);
  }
  return args.share_x;
}

struct Quantised {
  at::Tensor values;  // [tokens, inner] e4m3; with groups padded to a multiple of kRows
  at::Tensor one;     // [] f32: 1
  at::Tensor scale;   // [tokens] f32; with groups [rows of values, inner / 128], column-major
};

Quantised quantised(const at::Tensor& x, const std::optional<at::Tensor>& norm, double eps, bool groups) {
  const int64_t inner = x.size(1);
  TORCH_CHECK_VALUE(inner % 16 == 0 && inner <= kMaxQuantised, "x: inner size ", inner,
                    " is not a multiple of 16 up to ", kMaxQuantised);
  const at::Tensor rows = in_16_bytes(x.const_data_ptr(), x.stride(0), 2) ? x : x.contiguous();
  const int64_t count = groups ? rounded_up(x.size(0), kRows) : x.size(0);
  const at::Tensor values = at::empty({count, inner}, x.options().dtype(at::kFloat8_e4m3fn));
  constexpr int64_t kApart = 4;  // elements before the scales, so that `one` and `scale` are 16-byte aligned
  const at::Tensor scales = at::empty({kApart + count * (groups ? inner / kBlock : 1)}, x.options().dtype(at::kFloat));
  const at::Tensor all = scales.slice(0, kApart);
  const Quantised result{values, scales.select(0, 0), groups ? all.view({inner / kBlock, count}).t() : all};
  quantise_rows({.x = rows.const_data_ptr(),
                 .x_stride = rows.stride(0),
                 .norm = norm ? norm->const_data_ptr() : nullptr,
                 .eps = static_cast<float>(eps),
                 .values = values.data_ptr(),
                 .one = result.one.data_ptr<float>(),
                 .scale = result.scale.data_ptr<float>(),
                 .group_stride = groups ? count : 0,
                 .tokens = x.size(0),
                 .size = static_cast<int>(inner)},
                stream_of(x));
  return result;
}

void check_blocks(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale) {
  expect_device("scale", scale, on_gpu(x));
  expect_dtype("scale", scale, at::kFloat);
  const int64_t rows = weight.size(0), inner = weight.size(1);
  TORCH_CHECK_VALUE(rows % kBlock == 0 && inner % (kScales * kBlock) == 0, "weight: its shape [", rows, ", ", inner,
                    "] is not of multiples of ", kBlock, " and ", kScales * kBlock);
  TORCH_CHECK_VALUE(scale.size(0) == rows / kBlock && scale.size(1) == inner / kBlock, "scale: its shape [",
                    scale.size(0), ", ", scale.size(1), "] should be [", rows / kBlock, ", ", inner / kBlock, "]");
  TORCH_CHECK_VALUE(scale.is_contiguous(), "scale: not contiguous");
}

void linear_fp8(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& norm, double eps, bool add,
                bool silu_mul, const at::Tensor& out) {
  expect_dtype("x", x, at::kBFloat16);
  const bool wide = float32_out(x, out, add, silu_mul);
  check_linear(x, weight, at::kFloat8_e4m3fn, bias, norm, silu_mul, out, on_gpu(x), wide);
  const bool blocks = scale.dim() == 2;
  if (blocks) {
    check_blocks(x, weight, scale);
  } else {
    Size rows("rows of the weight");
    rows.agree("weight", weight.size(0));
    expect_plain("scale", scale, {rows}, at::kFloat, on_gpu(x));
  }
  const c10::cuda::CUDAGuard guard(x.device());
  check_sizes(x, weight);
  const LinearFp8Args args{
      .x = x.const_data_ptr(),
      .x_stride = x.stride(0),
      .norm = norm ? norm->const_data_ptr() : nullptr,
      .eps = static_cast<float>(eps),
      .weight = weight.const_data_ptr(),
      .scale = scale.const_data_ptr<float>(),
      .blocks = blocks,
      .bias = bias ? bias->const_data_ptr() : nullptr,
      .out = out.data_ptr(),
      .out_stride = out.stride(0),
      .tokens = static_cast<int>(x.size(0)),
      .features = static_cast<int>(out.size(1)),
      .inner = static_cast<int>(x.size(1)),
      .add = add,
      .silu_mul = silu_mul,
      .float32_out = wide,
  };
  if (x.size(0) == 0) return;
  if (fits_linear_fp8(args)) return cuda::linear_fp8(args, stream_of(x));
  // cuBLAS's GEMM with a scale per row and column is slower than its GEMM with one scale, so scale_gemm applies the
  // scales of rows and columns afterwards.
  if (wide && blocks) {  // some cuBLAS releases return bf16 from block-scaled GEMMs
    const at::Tensor narrow = at::empty(out.sizes(), x.options());
    linear_fp8(x, weight, scale, bias, norm, eps, add, silu_mul, narrow);
    out.copy_(narrow);
    return;
  }
  const auto [values, one, x_scale] = quantised(x, norm, eps, blocks);
  const at::Tensor y =
      at::_scaled_mm(values, weight.t(), blocks ? x_scale : one, blocks ? scale.t() : one, std::nullopt, std::nullopt,
                     wide ? at::kFloat : at::kBFloat16, /*use_fast_accum=*/!blocks);
  scale_gemm({.gemm = y.const_data_ptr(),
              .x_scale = blocks ? nullptr : x_scale.const_data_ptr<float>(),
              .weight_scale = blocks ? nullptr : args.scale,
              .bias = args.bias,
              .out = args.out,
              .out_stride = args.out_stride,
              .tokens = x.size(0),
              .features = out.size(1),
              .add = add,
              .silu_mul = silu_mul,
              .float32_out = wide},
             stream_of(x));
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("linear", linear);
  m.impl("linear_sharing_x", linear_sharing_x);
  m.impl("linear_fp8", linear_fp8);
}

}  // namespace
}  // namespace quire::cuda::torch_api
