// What every door to `linear` does alike: the checks, and the product as a chain of other operators.  That chain is all
// there is on a CPU; on a GPU it serves many tokens, where the vendor's products are as fast as can be.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <optional>

#include "torch_api/checks.h"

namespace quire {

inline void expect_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          const std::optional<at::Tensor>& norm, bool silu_mul, const at::Tensor& out) {
  Size tokens("tokens"), inner("inner size"), features("features"), rows("rows of the weight");
  expect("x", x, {tokens, inner});
  expect("out", out, {tokens, features});
  rows.agree("out", features * (silu_mul ? 2 : 1));
  expect("weight", weight, {rows, inner});
  expect_last_contiguous("x", x);
  expect_last_contiguous("out", out);
  expect_contiguous("weight", weight);
  expect_dtype("weight", weight, x.scalar_type(), "x");
  expect_dtype("out", out, x.scalar_type(), "x");
  const auto expect_vector = [&](const char* who, const std::optional<at::Tensor>& t, Size& size) {
    if (!t) return;
    expect(who, *t, {size});
    expect_contiguous(who, *t);
    expect_dtype(who, *t, x.scalar_type(), "x");
  };
  expect_vector("bias", bias, rows);
  expect_vector("norm", norm, inner);
}

inline at::Tensor normed(const at::Tensor& x, const at::Tensor& norm, double eps) {
  static const auto rms_norm =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("quire::rms_norm", "")
          .typed<void(const at::Tensor&, const at::Tensor&, double, const at::Tensor&)>();
  const at::Tensor y = at::empty_like(x);
  rms_norm.call(x, norm, eps, y);
  return y;
}

inline void linear_chain(at::Tensor x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& norm, double eps, bool add, bool silu_mul, at::Tensor out) {
  static const auto silu_mul_op = c10::Dispatcher::singleton()
                                      .findSchemaOrThrow("quire::silu_mul", "")
                                      .typed<void(const at::Tensor&, const at::Tensor&)>();
  if (norm) x = normed(x, *norm, eps);
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
    silu_mul_op.call(gate_up, y);
  }
  if (add) {
    out.add_(y);
  } else if (!y.is_same(out)) {
    out.copy_(y);
  }
}

}  // namespace quire
