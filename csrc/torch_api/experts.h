// Checks of mixtures of experts, shared by the bindings of all devices.
#pragma once

#include <cmath>
#include <optional>
#include <string_view>

#include "experts_layout.h"
#include "torch_api/checks.h"

namespace quire {

struct RouteSizes {
  Size tokens{"tokens"}, experts{"experts"}, top{"experts of a token"};
};

// logits [T, E]; chosen [T, k] i32; weights [T, k] f32.
inline RouteSizes check_route(const at::Tensor& logits, const at::Tensor& chosen, const at::Tensor& weights,
                              int64_t max_experts, const Place& place) {
  constexpr int64_t kMaxChosen = 32;
  RouteSizes sizes;
  expect_plain("logits", logits, {sizes.tokens, sizes.experts}, logits.scalar_type(), place);
  expect_plain("chosen", chosen, {sizes.tokens, sizes.top}, at::kInt, place);
  expect_plain("weights", weights, {sizes.tokens, sizes.top}, at::kFloat, place);
  TORCH_CHECK_VALUE(sizes.experts <= max_experts, "logits: ", int64_t{sizes.experts}, " experts, the maximum is ",
                    max_experts);
  TORCH_CHECK_VALUE(sizes.top <= kMaxChosen && sizes.top <= sizes.experts, "chosen: ", int64_t{sizes.top},
                    " experts of a token, the maximum is ", kMaxChosen, " and all");
  return sizes;
}

// Tensors and settings that `experts` and `experts_packed` share.
struct ExpertsInputs {
  const at::Tensor &x, &chosen, &weights;
  const std::optional<at::Tensor>&gate_up_bias, &down_bias;
  std::string_view activation;
  double alpha, limit;
  bool add;
  const at::Tensor& out;
};

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

// Checks x, out [T, hidden]; chosen [T, k] i32; weights [T, k] f32; gate_up_bias [E, 2 * inner]; down_bias [E, hidden].
// The caller has set sizes.count and sizes.inner.
inline void check_inputs(const ExpertsInputs& in, ExpertsSizes& sizes, const Place& place) {
  Size both("gate and up rows");
  both.agree("down", 2 * sizes.inner);
  const at::ScalarType dtype = in.x.scalar_type();
  expect_plain("x", in.x, {sizes.tokens, sizes.hidden}, dtype, place);
  expect_plain("chosen", in.chosen, {sizes.tokens, sizes.top}, at::kInt, place);
  expect_plain("weights", in.weights, {sizes.tokens, sizes.top}, at::kFloat, place);
  if (in.gate_up_bias) expect_plain("gate_up_bias", *in.gate_up_bias, {sizes.count, both}, dtype, place, "x");
  if (in.down_bias) expect_plain("down_bias", *in.down_bias, {sizes.count, sizes.hidden}, dtype, place, "x");
  expect_plain("out", in.out, {sizes.tokens, sizes.hidden}, dtype, place, "x");
  sizes.clamped = is_clamped(in.activation, in.alpha, in.limit);
}

// gate_up [E, 2 * inner, hidden]; down [E, hidden, inner].
inline ExpertsSizes check_experts(const ExpertsInputs& in, const at::Tensor& gate_up, const at::Tensor& down,
                                  const Place& place) {
  ExpertsSizes sizes;
  Size both("gate and up rows");
  const at::ScalarType dtype = in.x.scalar_type();
  expect_plain("x", in.x, {sizes.tokens, sizes.hidden}, dtype, place);
  expect_plain("down", down, {sizes.count, sizes.hidden, sizes.inner}, dtype, place, "x");
  both.agree("down", 2 * sizes.inner);
  expect_plain("gate_up", gate_up, {sizes.count, both, sizes.hidden}, dtype, place, "x");
  check_inputs(in, sizes, place);
  return sizes;
}

inline experts_layout::Format format_of(std::string_view format) {
  TORCH_CHECK_VALUE(format == "mxfp4" || format == "fp8", "format: ", format, " is neither mxfp4 nor fp8");
  return format == "mxfp4" ? experts_layout::Format::mxfp4 : experts_layout::Format::fp8;
}

// gate_up, down: in the layout of experts_layout.h.
inline ExpertsSizes check_packed_experts(const ExpertsInputs& in, experts_layout::Format format,
                                         const at::Tensor& gate_up, const at::Tensor& down, const Place& place) {
  using experts_layout::kColumns, experts_layout::kRows;
  ExpertsSizes sizes;
  expect_plain("x", in.x, {sizes.tokens, sizes.hidden}, in.x.scalar_type(), place);
  TORCH_CHECK_VALUE(sizes.hidden % kColumns == 0, "x: hidden size ", int64_t{sizes.hidden}, " is no multiple of ",
                    kColumns);
  Size slabs("slabs of hidden"), slabs_of_inner("slabs of inner"), tiles("row tiles of gate_up"),
      tiles_of_down("row tiles of down"), two("tiles per row tile"), bytes("bytes per tile");
  two.agree("the layout", 2), bytes.agree("the format", experts_layout::tile_bytes(format));
  slabs.agree("x", sizes.hidden / kColumns), tiles_of_down.agree("x", (sizes.hidden / 2 + kRows - 1) / kRows);
  expect_plain("down", down, {sizes.count, tiles_of_down, slabs_of_inner, two, bytes}, at::kByte, place);
  sizes.inner.agree("down", slabs_of_inner * kColumns), tiles.agree("down", slabs_of_inner);
  expect_plain("gate_up", gate_up, {sizes.count, tiles, slabs, two, bytes}, at::kByte, place);
  check_inputs(in, sizes, place);
  return sizes;
}

}  // namespace quire
