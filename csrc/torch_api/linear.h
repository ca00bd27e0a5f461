// Shared parts of the bindings of `linear`: the checks, and the layer as a chain of other operators.  A CPU always
// takes the chain.  A GPU uses the chain for many tokens, because cuBLAS is then fastest.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <optional>
#include <tuple>

#include "torch_api/checks.h"

namespace quire {

struct LinearSizes {
  Size tokens{"tokens"}, inner{"inner size"}, features{"features"}, rows{"rows of the weight"};
};

// Whether out is float32 while x is not.
inline bool float32_out(const at::Tensor& x, const at::Tensor& out, bool add, bool silu_mul) {
  if (out.scalar_type() == x.scalar_type() || out.scalar_type() != at::kFloat) return false;
  TORCH_CHECK_VALUE(!add && !silu_mul, "out: float32 takes neither add nor silu_mul");
  return true;
}

// Checks x and out, and returns the sizes that they determine.  float32_out: out is float32 for any dtype of x.
inline LinearSizes check_ends(const at::Tensor& x, bool silu_mul, const at::Tensor& out, const Place& place,
                              bool float32_out) {
  LinearSizes sizes;
  for (const auto& [who, t, columns] :
       {std::tuple<const char*, const at::Tensor&, Size&>{"x", x, sizes.inner}, {"out", out, sizes.features}}) {
    expect_device(who, t, place);
    expect(who, t, {sizes.tokens, columns});
    expect_last_contiguous(who, t);
    if (!float32_out || &t == &x) expect_dtype(who, t, x.scalar_type(), "x");
  }
  sizes.rows.agree("out", sizes.features * (silu_mul ? 2 : 1));
  return sizes;
}

inline void check_around(LinearSizes& sizes, const at::Tensor& x, const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& norm, const Place& place) {
  if (bias) expect_plain("bias", *bias, {sizes.rows}, x.scalar_type(), place, "x");
  if (norm) expect_plain("norm", *norm, {sizes.inner}, x.scalar_type(), place, "x");
}

// Checks the tensors of `linear`.  stored: dtype of the weight.
inline void check_linear(const at::Tensor& x, const at::Tensor& weight, at::ScalarType stored,
                         const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& norm, bool silu_mul,
                         const at::Tensor& out, const Place& place, bool float32_out = false) {
  LinearSizes sizes = check_ends(x, silu_mul, out, place, float32_out);
  expect_plain("weight", weight, {sizes.rows, sizes.inner}, stored, place, stored == x.scalar_type() ? "x" : nullptr);
  check_around(sizes, x, bias, norm, place);
}

inline at::Tensor normed(const at::Tensor& x, const at::Tensor& norm, double eps) {
  static const auto rms_norm = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("quire::rms_norm", "")
                                   .typed<void(const at::Tensor&, const at::Tensor&, double, const at::Tensor&)>();
  const at::Tensor y = at::empty_like(x);
  rms_norm.call(x, norm, eps, y);
  return y;
}

// out = silu(gate) * up; each row of gate_up holds gate, then up.
inline void silu_product(const at::Tensor& gate_up, const at::Tensor& out) {
  static const auto silu_mul = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("quire::silu_mul", "")
                                   .typed<void(const at::Tensor&, const at::Tensor&)>();
  silu_mul.call(gate_up, out);
}

inline void linear_chain(at::Tensor x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& norm, double eps, bool add, bool silu_mul, at::Tensor out) {
  if (norm) x = normed(x, *norm, eps);
  if (out.scalar_type() != x.scalar_type()) {  // float32, on a GPU
    at::mm_out(out, x, weight.t(), at::kFloat);
    if (bias) out.add_(*bias);
    return;
  }
  if (!bias && !silu_mul) {
    if (add) {
      at::addmm_out(out, out, x, weight.t());
    } else {
      at::mm_out(out, x, weight.t());
    }
    return;
  }
  at::Tensor y = at::linear(x, weight, bias);
  if (silu_mul) {
    const at::Tensor gate_up = y;
    y = add || !out.is_contiguous() ? at::empty(out.sizes(), out.options()) : out;
    silu_product(gate_up, y);
  }
  if (add) {
    out.add_(y);
  } else if (!y.is_same(out)) {
    out.copy_(y);
  }
}

}  // namespace quire
