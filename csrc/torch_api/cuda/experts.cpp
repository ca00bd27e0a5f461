// Binds a mixture of experts on a GPU.

#include "cuda/experts/experts.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <string_view>

#include "torch_api/checks.h"
#include "torch_api/cuda/convert.h"

namespace quire::cuda::torch_api {
namespace {

Dtype half_dtype_of(const char* who, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf, who, ": dtype is ",
                    t.scalar_type(), ", this operator wants BFloat16 or Half");
  return model_dtype_of(who, t);
}

void route(const at::Tensor& logits, bool normalise, bool rounded, const at::Tensor& chosen,
           const at::Tensor& weights) {
  Size tokens("tokens"), experts("experts"), top("experts of a token");
  const Dtype dtype = half_dtype_of("logits", logits);
  expect_plain("logits", logits, {tokens, experts}, logits.scalar_type(), on_gpu(logits));
  expect_plain("chosen", chosen, {tokens, top}, at::kInt, on_gpu(logits));
  expect_plain("weights", weights, {tokens, top}, at::kFloat, on_gpu(logits));
  TORCH_CHECK_VALUE(experts <= kMostExperts, "logits: ", int64_t{experts}, " experts, the most are ", kMostExperts);
  TORCH_CHECK_VALUE(top <= 32 && top <= experts, "chosen: ", int64_t{top}, " experts of a token, the most are 32 and all");
  const c10::cuda::CUDAGuard guard(logits.device());
  cuda::route({.dtype = dtype,
               .logits = logits.const_data_ptr(),
               .chosen = chosen.data_ptr<int>(),
               .weights = weights.data_ptr<float>(),
               .tokens = static_cast<int>(tokens),
               .experts = static_cast<int>(experts),
               .top = static_cast<int>(top),
               .normalise = normalise,
               .rounded = rounded},
              stream_of(logits));
}

Activation activation_of(std::string_view name, double alpha, double limit) {
  if (name == "silu") return Activation::silu;
  TORCH_CHECK_VALUE(name == "clamped", "activation: ", name, " is neither silu nor clamped");
  TORCH_CHECK_VALUE(std::isfinite(alpha), "alpha: ", alpha, " is not finite");
  TORCH_CHECK_VALUE(limit > 0, "limit: ", limit, " is not over 0");
  return Activation::clamped;
}

void experts(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, const at::Tensor& gate_up,
             const std::optional<at::Tensor>& gate_up_bias, const at::Tensor& down,
             const std::optional<at::Tensor>& down_bias, std::string_view activation, double alpha, double limit,
             const at::Tensor& out) {
  Size tokens("tokens"), top("experts of a token"), count("experts"), hidden("hidden size"), inner("inner size");
  Size both("gate and up rows");
  const Dtype dtype = half_dtype_of("x", x);
  const Place place = on_gpu(x);
  expect_plain("x", x, {tokens, hidden}, x.scalar_type(), place);
  expect_plain("chosen", chosen, {tokens, top}, at::kInt, place);
  expect_plain("weights", weights, {tokens, top}, at::kFloat, place);
  expect_plain("down", down, {count, hidden, inner}, x.scalar_type(), place, "x");
  both.agree("down", 2 * inner);
  expect_plain("gate_up", gate_up, {count, both, hidden}, x.scalar_type(), place, "x");
  if (gate_up_bias) expect_plain("gate_up_bias", *gate_up_bias, {count, both}, x.scalar_type(), place, "x");
  if (down_bias) expect_plain("down_bias", *down_bias, {count, hidden}, x.scalar_type(), place, "x");
  expect_plain("out", out, {tokens, hidden}, x.scalar_type(), place, "x");
  const Activation kind = activation_of(activation, alpha, limit);
  TORCH_CHECK_VALUE(count <= kMostExperts, "down: ", int64_t{count}, " experts, the most are ", kMostExperts);
  TORCH_CHECK_VALUE(hidden % 8 == 0 && inner % 8 == 0, "down: hidden size ", int64_t{hidden}, " and inner size ",
                    int64_t{inner}, " are not multiples of 8");
  const c10::cuda::CUDAGuard guard(x.device());
  ExpertsArgs args{.dtype = dtype,
                   .x = x.const_data_ptr(),
                   .chosen = chosen.const_data_ptr<int>(),
                   .weights = weights.const_data_ptr<float>(),
                   .gate_up = gate_up.const_data_ptr(),
                   .gate_up_bias = gate_up_bias ? gate_up_bias->const_data_ptr() : nullptr,
                   .down = down.const_data_ptr(),
                   .down_bias = down_bias ? down_bias->const_data_ptr() : nullptr,
                   .out = out.data_ptr(),
                   .tokens = static_cast<int>(tokens),
                   .top = static_cast<int>(top),
                   .experts = static_cast<int>(count),
                   .hidden = static_cast<int>(hidden),
                   .inner = static_cast<int>(inner),
                   .activation = kind,
                   .alpha = static_cast<float>(alpha),
                   .limit = static_cast<float>(limit)};
  const ExpertsWay way = way_of(args);
  const bool few = way != ExpertsWay::grouped;
  TORCH_CHECK_VALUE(!few || tokens * top <= kMostPairs, "chosen: ", tokens * top,
                    " experts of all tokens, the most are ", kMostPairs,
                    " unless the GPU is a Hopper and hidden and inner size are multiples of 64");
  TORCH_CHECK_VALUE(tokens <= kMostTokens, "x: ", int64_t{tokens}, " tokens, the most are ", kMostTokens);
  const ExpertsMemory memory = memory_of(args, way);
  const auto scratch = [&](int64_t bytes) { return at::empty({bytes}, x.options().dtype(at::kByte)); };
  const at::Tensor between = scratch(memory.between), sums = scratch(memory.sums), order = scratch(memory.order);
  const at::Tensor gathered = scratch(memory.gathered);
  args.between = between.data_ptr();
  args.sums = sums.data_ptr();
  args.order = order.data_ptr();
  args.gathered = gathered.data_ptr();
  cuda::experts(args, way, stream_of(x));
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("route", route);
  m.impl("experts", experts);
}

}  // namespace
}  // namespace quire::cuda::torch_api
