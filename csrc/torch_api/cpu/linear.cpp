// Binds matrix products on a CPU.

#include "torch_api/linear.h"

#include <ATen/native/CPUBlas.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "cpu/pool.h"
#include "cpu/product.h"
#include "torch_api/cpu/convert.h"

namespace quire::cpu::torch_api {
namespace {

void linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
            const std::optional<at::Tensor>& norm, double eps, bool add, bool silu_mul, const at::Tensor& out) {
  check_linear(x, weight, x.scalar_type(), bias, norm, silu_mul, out, on_cpu());
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

// Every strip is one call of torch's small matrix product, whose weight lies as ours do.
void product_on_tiles(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& out) {
  Size rows("rows"), inner("inner size"), features("features"), strips("strips"), steps("steps"), columns("columns"),
      together("numbers together");
  expect("x", x, {rows, inner});
  expect_plain("out", out, {rows, features}, at::kFloat, on_cpu());
  together.agree("matrix tiles", 2);
  columns.agree("this build", kColumns);
  strips.agree("out", (features + kColumns - 1) / kColumns);
  steps.agree("x", inner / 2);
  TORCH_CHECK_VALUE(inner % 2 == 0, "x: inner size ", int64_t{inner}, " is odd");
  expect_plain("packed", packed, {strips, steps, columns, together}, at::kBFloat16, on_cpu());
  expect_device("x", x, on_cpu());
  expect_last_contiguous("x", x);
  expect_dtype("x", x, at::kBFloat16);
  const auto* numbers = x.const_data_ptr<at::BFloat16>();
  const auto* weight = packed.const_data_ptr<at::BFloat16>();
  float* sums = out.data_ptr<float>();
  constexpr int64_t kMostRows = 64;
  const int64_t chunks = (rows + kMostRows - 1) / kMostRows;  // of rows; all meet a strip while it is in the cache
  share(strips * chunks, threads(), [&](Tickets& tickets) {
    float rest[kMostRows * kColumns];
    for (int64_t item; tickets.take(item);) {
      const int64_t strip = item / chunks, row = item % chunks * kMostRows;
      const int64_t count = std::min<int64_t>(kMostRows, rows - row), column = strip * kColumns;
      const int64_t wide = std::min<int64_t>(kColumns, features - column);
      float* to = wide == kColumns ? sums + row * features + column : rest;
      at::native::cpublas::brgemm(count, kColumns, inner, x.stride(0), kColumns, wide == kColumns ? features : kColumns,
                                  false, numbers + row * x.stride(0), weight + strip * inner * kColumns, to);
      for (int64_t i = 0; to == rest && i < count; ++i) {
        std::copy_n(rest + i * kColumns, wide, sums + (row + i) * features + column);
      }
    }
    at::native::cpublas::brgemm_release();
  });
}

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("linear", linear);
  m.impl("product_on_tiles", product_on_tiles);
  m.impl("product", product);
  m.impl("product_layout", product_layout);
}

}  // namespace
}  // namespace quire::cpu::torch_api
