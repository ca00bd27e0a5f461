// Checks of mixtures of experts, shared by the bindings of all devices.
#pragma once

#include <cmath>
#include <optional>
#include <string_view>

#include "torch_api/checks.h"

namespace quire {

struct RouteSizes {
  Size tokens{"tokens"}, experts{"experts"}, top{"experts of a token"};
};

// logits [T, E]; chosen [T, k] i32; weights [T, k] f32.
inline RouteSizes check_route(const at::Tensor& logits, const at::Tensor& chosen, const at::Tensor& weights,
                              int64_t most_experts, const Place& place) {
  constexpr int64_t kMostChosen = 32;
  RouteSizes sizes;
  expect_plain("logits", logits, {sizes.tokens, sizes.experts}, logits.scalar_type(), place);
  expect_plain("chosen", chosen, {sizes.tokens, sizes.top}, at::kInt, place);
  expect_plain("weights", weights, {sizes.tokens, sizes.top}, at::kFloat, place);
  TORCH_CHECK_VALUE(sizes.experts <= most_experts, "logits: ", int64_t{sizes.experts}, " experts, the most are ",
                    most_experts);
  TORCH_CHECK_VALUE(sizes.top <= kMostChosen && sizes.top <= sizes.experts, "chosen: ", int64_t{sizes.top},
                    " experts of a token, the most are ", kMostChosen, " and all");
  return sizes;
}

struct ExpertsSizes {
  Size tokens{"tokens"}, top{"experts of a token"}, count{"experts"}, hidden{"hidden size"}, inner{"inner size"};
  bool clamped = false;
};

// Whether the activation is `clamped`; otherwise it is `silu`.
inline bool is_clamped(std::string_view activation, double alpha, double limit) {
  if (activation == "silu") return false;
  TORCH_CHECK_VALUE(activation == "clamped", "activation: ", activation, " is neither silu nor clamped");
  TORCH_CHECK_VALUE(std::isfinite(alpha), "alpha: ", alpha, " is not finite");
  TORCH_CHECK_VALUE(limit > 0, "limit: ", limit, " is not over 0");
  return true;
}

// x, out [T, hidden]; chosen [T, k] i32; weights [T, k] f32; gate_up [E, 2 * inner, hidden]; down [E, hidden, inner];
// gate_up_bias [E, 2 * inner]; down_bias [E, hidden].
inline ExpertsSizes check_experts(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights,
                                  const at::Tensor& gate_up, const std::optional<at::Tensor>& gate_up_bias,
                                  const at::Tensor& down, const std::optional<at::Tensor>& down_bias,
                                  std::string_view activation, double alpha, double limit, const at::Tensor& out,
                                  const Place& place) {
  ExpertsSizes sizes;
  Size both("gate and up rows");
  const at::ScalarType dtype = x.scalar_type();
  expect_plain("x", x, {sizes.tokens, sizes.hidden}, dtype, place);
  expect_plain("chosen", chosen, {sizes.tokens, sizes.top}, at::kInt, place);
  expect_plain("weights", weights, {sizes.tokens, sizes.top}, at::kFloat, place);
  expect_plain("down", down, {sizes.count, sizes.hidden, sizes.inner}, dtype, place, "x");
  both.agree("down", 2 * sizes.inner);
  expect_plain("gate_up", gate_up, {sizes.count, both, sizes.hidden}, dtype, place, "x");
  if (gate_up_bias) expect_plain("gate_up_bias", *gate_up_bias, {sizes.count, both}, dtype, place, "x");
  if (down_bias) expect_plain("down_bias", *down_bias, {sizes.count, sizes.hidden}, dtype, place, "x");
  expect_plain("out", out, {sizes.tokens, sizes.hidden}, dtype, place, "x");
  sizes.clamped = is_clamped(activation, alpha, limit);
  return sizes;
}

}  // namespace quire
