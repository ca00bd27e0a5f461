// Binds matrix products on a CPU.

#include "torch_api/linear.h"

#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "cpu/pool.h"
#include "cpu/product.h"
#include "cpu/product_int4.h"
#include "cpu/product_int8.h"
#include "torch_api/cpu/bindings.h"
#include "torch_api/cpu/convert.h"

namespace quire::cpu::torch_api {
namespace {

void linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
            const std::optional<at::Tensor>& norm, double eps, bool add, bool silu_mul, const at::Tensor& out) {
  check_linear(x, weight, x.scalar_type(), bias, norm, silu_mul, out, on_cpu());
  linear_chain(x, weight, bias, norm, eps, add, silu_mul, out);
}

std::tuple<int64_t, int64_t> product_layout(const at::Tensor& like) {
  if (like.scalar_type() == at::kByte) return {kColumns, kInt8Together};
  std::tuple<int64_t, int64_t> layout;
  by_dtype("like", like, [&](auto type) { layout = {kColumns, kTogether<decltype(type)>}; });
  return layout;
}

// The sizes of a product, after the checks that do not depend on the weight's dtype.
struct ProductSizes {
  Size rows{"rows"}, inner{"inner size"}, features{"features"}, strips{"strips"}, steps{"steps"}, columns{"columns"},
      together{"numbers together"};
};

// layout: of `packed`, its columns and its numbers together.
void check_product(ProductSizes& s, const at::Tensor& x, const at::Tensor& packed, std::tuple<int64_t, int64_t> layout,
                   const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& plus, const at::Tensor& out) {
  expect("x", x, {s.rows, s.inner});
  expect("out", out, {s.rows, s.features});
  if (plus) expect("plus", *plus, {s.rows, s.features});
  if (bias) expect_plain("bias", *bias, {s.features}, x.scalar_type(), on_cpu());
  const auto [wide, deep] = layout;
  s.columns.agree("this build", wide);
  s.together.agree("this build", deep);
  s.strips.agree("out", (s.features + kColumns - 1) / kColumns);
  s.steps.agree("x", (s.inner + deep - 1) / deep);
  expect("packed", packed, {s.strips, s.steps, s.columns, s.together});
  expect_contiguous("packed", packed);
  for (const auto& [who, t] : {std::pair{"x", &x}, {"out", &out}, {"packed", &packed}, {"plus", plus ? &*plus : &out}}) {
    expect_device(who, *t, on_cpu());
    expect_last_contiguous(who, *t);
  }
  if (out.scalar_type() != at::kFloat) expect_dtype("out", out, x.scalar_type(), "x");
  if (plus) expect_dtype("plus", *plus, out.scalar_type(), "out");
}

// run(T{}, Out{}) with the types of x and out.
template <class Run>
void by_dtypes(const at::Tensor& x, const at::Tensor& out, const Run& run) {
  by_dtype("x", x, [&](auto type) { out.scalar_type() == at::kFloat ? run(type, float{}) : run(type, type); });
}

template <class T>
const T* numbers(const std::optional<at::Tensor>& t) {
  return t ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}

void product(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
             const std::optional<at::Tensor>& plus, const at::Tensor& out) {
  ProductSizes sizes;
  expect_dtype("packed", packed, x.scalar_type(), "x");
  check_product(sizes, x, packed, product_layout(packed), bias, plus, out);
  by_dtypes(x, out, [&](auto type, auto out_type) {
    using T = decltype(type);
    using Out = decltype(out_type);
    cpu::product(cpu::ProductArgs<T, Out>{
        .x = numbers<T>(x),
        .x_stride = x.stride(0),
        .weight = numbers<T>(packed),
        .bias = numbers<T>(bias),
        .plus = numbers<Out>(plus),
        .plus_stride = plus ? plus->stride(0) : 0,
        .out = static_cast<Out*>(out.data_ptr()),
        .out_stride = out.stride(0),
        .rows = sizes.rows,
        .inner = sizes.inner,
        .features = sizes.features,
        .threads = threads(),
    });
  });
}

void product_int8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& plus, const at::Tensor& out) {
  ProductSizes sizes;
  Size padded("padded features");
  expect_dtype("packed", packed, at::kByte);
  check_product(sizes, x, packed, product_layout(packed), bias, plus, out);
  padded.agree("packed", sizes.strips * kColumns);
  expect_plain("scale", scale, {padded}, at::kFloat, on_cpu());
  const at::Tensor workspace = at::empty({sizes.rows, int8_row_bytes(sizes.inner)}, packed.options());
  by_dtypes(x, out, [&](auto type, auto out_type) {
    using T = decltype(type);
    using Out = decltype(out_type);
    cpu::product_int8(cpu::Int8ProductArgs<T, Out>{
        .x = numbers<T>(x),
        .x_stride = x.stride(0),
        .weight = numbers<uint8_t>(packed),
        .scale = numbers<float>(scale),
        .bias = numbers<T>(bias),
        .plus = numbers<Out>(plus),
        .plus_stride = plus ? plus->stride(0) : 0,
        .out = static_cast<Out*>(out.data_ptr()),
        .out_stride = out.stride(0),
        .workspace = workspace.data_ptr<uint8_t>(),
        .rows = sizes.rows,
        .inner = sizes.inner,
        .features = sizes.features,
        .threads = threads(),
    });
  });
}

void product_int4(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                  const std::optional<at::Tensor>& zero, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& plus, const at::Tensor& out) {
  ProductSizes sizes;
  Size groups("groups"), wide("features of a strip");
  expect_dtype("packed", packed, at::kByte);
  check_product(sizes, x, packed, {kLanes, kInt4Together}, bias, plus, out);
  wide.agree("this build", kColumns);
  const bool narrow = scale.scalar_type() == at::kHalf;
  expect_plain("scale", scale, {sizes.strips, groups, wide}, narrow ? at::kHalf : at::kFloat, on_cpu());
  if (zero) expect_plain("zero", *zero, {sizes.strips, groups, wide}, at::kByte, on_cpu());
  const int64_t group = groups > 0 ? sizes.inner / groups : 0;
  TORCH_CHECK_VALUE(group % kInt4Block == 0 && group > 0 && group <= kInt4LargestGroup && group * groups == sizes.inner,
                    "scale: groups is ", int64_t{groups}, ", x has an inner size of ", int64_t{sizes.inner},
                    ", and a group has 32, 64, .. 4096 inputs");
  const at::Tensor workspace = at::empty({sizes.rows, int4_row_bytes(sizes.inner, group)}, packed.options());
  by_dtypes(x, out, [&](auto type, auto out_type) {
    using T = decltype(type);
    using Out = decltype(out_type);
    cpu::product_int4(cpu::Int4ProductArgs<T, Out>{
        .x = numbers<T>(x),
        .x_stride = x.stride(0),
        .weight = numbers<uint8_t>(packed),
        .scale = narrow ? numbers<fp16>(scale) : nullptr,
        .wide_scale = narrow ? nullptr : numbers<float>(scale),
        .zero = numbers<uint8_t>(zero),
        .bias = numbers<T>(bias),
        .plus = numbers<Out>(plus),
        .plus_stride = plus ? plus->stride(0) : 0,
        .out = static_cast<Out*>(out.data_ptr()),
        .out_stride = out.stride(0),
        .workspace = workspace.data_ptr<uint8_t>(),
        .rows = sizes.rows,
        .inner = sizes.inner,
        .features = sizes.features,
        .group = group,
        .threads = threads(),
    });
  });
}

}  // namespace

// One call for what a layer's product takes, since each call from Python costs as long as a small product.
void packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& scale,
                   const std::optional<at::Tensor>& zero, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& norm, double eps, bool silu_mul,
                   const std::optional<at::Tensor>& plus, const at::Tensor& out) {
  TORCH_CHECK_VALUE(!silu_mul || !plus, "plus: there is none with silu_mul");
  TORCH_CHECK_VALUE(out.dim() == 2, "out: ", out.dim(), " dimensions instead of 2");
  const at::Tensor from = norm ? normed(x, *norm, eps) : x;
  const at::Tensor y = silu_mul ? at::empty({out.size(0), 2 * out.size(1)}, out.options()) : out;
  if (!scale) {
    product(from, packed, bias, plus, y);
  } else if (scale->dim() == 1) {
    product_int8(from, packed, *scale, bias, plus, y);
  } else {
    product_int4(from, packed, *scale, zero, bias, plus, y);
  }
  if (silu_mul) silu_product(y, out);
}

namespace {

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
  m.impl("product_int8", product_int8);
  m.impl("product_int4", product_int4);
  m.impl("packed_linear", packed_linear);
  m.impl("product_layout", product_layout);
}

}  // namespace
}  // namespace quire::cpu::torch_api
