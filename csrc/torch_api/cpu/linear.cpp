// Bindings of linear layers on a CPU.

#include "torch_api/linear.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "cpu/product.h"
#include "cpu/product_int4.h"
#include "cpu/product_int8.h"
#include "torch_api/cpu/bindings.h"
#include "torch_api/cpu/convert.h"
#include "torch_api/cpu/tiles.h"

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

// Sizes of a linear layer, after the checks that do not depend on the weight's dtype.
struct ProductSizes {
  Size rows{"rows"}, inner{"inner size"}, features{"features"}, strips{"strips"}, steps{"steps"}, columns{"columns"},
      together{"elements together"};
};

// layout: (columns, together) of `packed`, as product_layout returns them (ops.cpp).
void check_product(ProductSizes& s, const at::Tensor& x, const at::Tensor& packed, std::tuple<int64_t, int64_t> layout,
                   const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& plus,
                   const at::Tensor& out) {
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
  for (const auto& [who, t] :
       {std::pair{"x", &x}, {"out", &out}, {"packed", &packed}, {"plus", plus ? &*plus : &out}}) {
    expect_device(who, *t, on_cpu());
    expect_last_contiguous(who, *t);
  }
  if (out.scalar_type() != at::kFloat) expect_dtype("out", out, x.scalar_type(), "x");
  if (plus) expect_dtype("plus", *plus, out.scalar_type(), "out");
}

// Calls run(T{}, Out{}) with the types of x and out.
template <class Run>
void by_dtypes(const at::Tensor& x, const at::Tensor& out, const Run& run) {
  by_dtype("x", x, [&](auto type) { out.scalar_type() == at::kFloat ? run(type, float{}) : run(type, type); });
}

template <class T>
const T* data_of(const std::optional<at::Tensor>& t) {
  return t ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}

template <class T, class Out, class Weight = T>
cpu::ProductArgs<T, Out, Weight> product_args(const ProductSizes& sizes, const at::Tensor& x, const at::Tensor& packed,
                                              const std::optional<at::Tensor>& bias,
                                              const std::optional<at::Tensor>& plus, const at::Tensor& out) {
  return {
      .x = data_of<T>(x),
      .x_stride = x.stride(0),
      .weight = data_of<Weight>(packed),
      .bias = data_of<T>(bias),
      .plus = data_of<Out>(plus),
      .plus_stride = plus ? plus->stride(0) : 0,
      .out = static_cast<Out*>(out.data_ptr()),
      .out_stride = out.stride(0),
      .rows = sizes.rows,
      .inner = sizes.inner,
      .features = sizes.features,
      .threads = threads(),
  };
}

// Minimum rows at which `widen` dequantises int8 and int4 weights to bfloat16.  With fewer rows the integer kernels are
// faster.  Measured on one core of a Zen 4 with weights from memory, at 4 to 512 rows, with builds for AVX-512 and for
// AVX2: docs/notes/kernels/product_int8.md, "Many rows".
constexpr int64_t kInt8WidenedRows = kLanes == 16 ? 48 : 12, kInt4WidenedRows = 20;

std::tuple<int64_t, int64_t> widened_rows() { return {kInt8WidenedRows, kInt4WidenedRows}; }

// widen: bfloat16 weights are multiplied on matrix tiles, if the inner size is even.
void plain_product(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& plus, const at::Tensor& out, bool widen) {
  ProductSizes sizes;
  expect_dtype("packed", packed, x.scalar_type(), "x");
  check_product(sizes, x, packed, product_layout(packed), bias, plus, out);
  by_dtypes(x, out, [&](auto type, auto out_type) {
    using T = decltype(type);
    using Out = decltype(out_type);
    const auto args = product_args<T, Out>(sizes, x, packed, bias, plus, out);
    if constexpr (std::is_same_v<T, bf16> && kTogether<bf16> == 2) {
      if (widen && sizes.inner > 0 && sizes.inner % 2 == 0) {
        return on_tiles(args, nullptr, [&](int64_t strip, int64_t first, int64_t, bf16*) {
          return args.weight + (strip * args.inner + first) * kColumns;
        });
      }
    }
    cpu::product(args);
  });
}

// widen: if bfloat16 x has many rows, the weights are dequantised to bfloat16.
void int8_product(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& plus, const at::Tensor& out,
                  bool widen) {
  ProductSizes sizes;
  Size padded("padded features");
  expect_dtype("packed", packed, at::kByte);
  check_product(sizes, x, packed, product_layout(packed), bias, plus, out);
  padded.agree("packed", sizes.strips * kColumns);
  expect_plain("scale", scale, {padded}, at::kFloat, on_cpu());
  by_dtypes(x, out, [&](auto type, auto out_type) {
    using T = decltype(type);
    using Out = decltype(out_type);
    cpu::Int8ProductArgs<T, Out> args{product_args<T, Out, uint8_t>(sizes, x, packed, bias, plus, out),
                                      data_of<float>(scale), nullptr};
    if constexpr (std::is_same_v<T, bf16>) {
      const bool pairs = sizes.inner > 0 && sizes.inner % 2 == 0;
      if (widen && pairs && sizes.rows >= kInt8WidenedRows) {
        return on_tiles(args, args.scale, [&](int64_t strip, int64_t first, int64_t count, bf16* buffer) {
          widen_int8(args.weight, args.inner, strip, first, count, buffer);
          return buffer;
        });
      }
    }
    const at::Tensor workspace = at::empty({sizes.rows, int8_row_bytes(sizes.inner)}, packed.options());
    args.workspace = workspace.data_ptr<uint8_t>();
    cpu::product_int8(args);
  });
}

// widen: as in int8_product.
void int4_product(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                  const std::optional<at::Tensor>& zero, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& plus, const at::Tensor& out, bool widen) {
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
  by_dtypes(x, out, [&](auto type, auto out_type) {
    using T = decltype(type);
    using Out = decltype(out_type);
    cpu::Int4ProductArgs<T, Out> args{product_args<T, Out, uint8_t>(sizes, x, packed, bias, plus, out)};
    args.scale = narrow ? data_of<fp16>(scale) : nullptr;
    args.wide_scale = narrow ? nullptr : data_of<float>(scale);
    args.zero = data_of<uint8_t>(zero);
    args.group = group;
    if constexpr (std::is_same_v<T, bf16>) {
      if (widen && sizes.rows >= kInt4WidenedRows) {
        return on_tiles(args, nullptr, [&](int64_t strip, int64_t first, int64_t count, bf16* buffer) {
          widen_int4(args, strip, first, count, buffer);
          return buffer;
        });
      }
    }
    const at::Tensor workspace = at::empty({sizes.rows, int4_row_bytes(sizes.inner, group)}, packed.options());
    args.workspace = workspace.data_ptr<uint8_t>();
    cpu::product_int4(args);
  });
}

}  // namespace

// One call for all operators around a linear layer, because a call from Python takes as long as a small GEMM.
void packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& scale,
                   const std::optional<at::Tensor>& zero, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& norm, double eps, bool silu_mul, bool widen,
                   const std::optional<at::Tensor>& plus, const at::Tensor& out) {
  TORCH_CHECK_VALUE(!silu_mul || !plus, "plus: must be None with silu_mul");
  TORCH_CHECK_VALUE(out.dim() == 2, "out: ", out.dim(), " dimensions instead of 2");
  const at::Tensor from = norm ? normed(x, *norm, eps) : x;
  const at::Tensor y = silu_mul ? at::empty({out.size(0), 2 * out.size(1)}, out.options()) : out;
  if (!scale) {
    plain_product(from, packed, bias, plus, y, widen);
  } else if (scale->dim() == 1) {
    int8_product(from, packed, *scale, bias, plus, y, widen);
  } else {
    int4_product(from, packed, *scale, zero, bias, plus, y, widen);
  }
  if (silu_mul) silu_product(y, out);
}

namespace {

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("linear", linear);
  m.impl("packed_linear", packed_linear);
  m.impl("product_layout", product_layout);
}

TORCH_LIBRARY_IMPL(quire, CompositeExplicitAutograd, m) { m.impl("widened_rows", widened_rows); }

}  // namespace
}  // namespace quire::cpu::torch_api
