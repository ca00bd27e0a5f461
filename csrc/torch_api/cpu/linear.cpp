// Binds matrix products on a CPU.

#include "torch_api/linear.h"

#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "cpu/product.h"
#include "torch_api/cpu/convert.h"

namespace quire::cpu::torch_api {
namespace {

void linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
            const std::optional<at::Tensor>& norm, double eps, bool add, bool silu_mul, const at::Tensor& out) {
  check_linear(x, weight, bias, norm, silu_mul, out, on_cpu());
  linear_chain(x, weight, bias, norm, eps, add, silu_mul, out);
}

std::tuple<int64_t, int64_t> product_layout(const at::Tensor& like) {
  std::tuple<int64_t, int64_t> layout;
  by_dtype("like", like, [&](auto type) { layout = {kColumns, kTogether<decltype(type)>}; });
  return layout;
}

void product(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
             const std::optional<at::Tensor>& plus, const at::Tensor& out) {
  Size rows("rows"), inner("inner size"), features("features"), strips("strips"), steps("steps"), columns("columns"),
      together("numbers together");
  expect("x", x, {rows, inner});
  expect("out", out, {rows, features});
  if (plus) expect("plus", *plus, {rows, features});
  if (bias) expect_plain("bias", *bias, {features}, x.scalar_type(), on_cpu());
  const auto [wide, deep] = product_layout(x);
  columns.agree("this build", wide);
  together.agree("this build", deep);
  strips.agree("out", (features + wide - 1) / wide);
  steps.agree("x", (inner + deep - 1) / deep);
  expect("packed", packed, {strips, steps, columns, together});
  expect_contiguous("packed", packed);
  for (const auto& [who, t] : {std::pair{"x", &x}, {"out", &out}, {"packed", &packed}, {"plus", plus ? &*plus : &out}}) {
    expect_device(who, *t, on_cpu());
    expect_last_contiguous(who, *t);
  }
  expect_dtype("packed", packed, x.scalar_type(), "x");
  if (out.scalar_type() != at::kFloat) expect_dtype("out", out, x.scalar_type(), "x");
  if (plus) expect_dtype("plus", *plus, out.scalar_type(), "out");
  const auto compute = [&](auto type, auto out_type) {
    using T = decltype(type);
    using Out = decltype(out_type);
    const auto numbers = [](const at::Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
    cpu::product(cpu::ProductArgs<T, Out>{
        .x = numbers(x),
        .x_stride = x.stride(0),
        .weight = numbers(packed),
        .bias = bias ? numbers(*bias) : nullptr,
        .plus = plus ? static_cast<const Out*>(plus->const_data_ptr()) : nullptr,
        .plus_stride = plus ? plus->stride(0) : 0,
        .out = static_cast<Out*>(out.data_ptr()),
        .out_stride = out.stride(0),
        .rows = rows,
        .inner = inner,
        .features = features,
        .threads = threads(),
    });
  };
  by_dtype("x", x, [&](auto type) {
    out.scalar_type() == at::kFloat ? compute(type, float{}) : compute(type, type);
  });
}

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("linear", linear);
  m.impl("product", product);
  m.impl("product_layout", product_layout);
}

}  // namespace
}  // namespace quire::cpu::torch_api
