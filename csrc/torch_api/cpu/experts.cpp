// Binds a mixture of experts on a CPU.

#include "cpu/experts.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <string_view>

#include "torch_api/cpu/convert.h"
#include "torch_api/experts.h"

namespace quire::cpu::torch_api {
namespace {

void route(const at::Tensor& logits, bool normalise, bool rounded, const at::Tensor& chosen,
           const at::Tensor& weights) {
  const RouteSizes sizes = check_route(logits, chosen, weights, std::numeric_limits<int32_t>::max(), on_cpu());
  by_dtype("logits", logits, [&](auto type) {
    using T = decltype(type);
    cpu::route<T>({.logits = static_cast<const T*>(logits.const_data_ptr()),
                   .chosen = chosen.data_ptr<int32_t>(),
                   .weights = weights.data_ptr<float>(),
                   .tokens = sizes.tokens,
                   .experts = sizes.experts,
                   .top = sizes.top,
                   .normalise = normalise,
                   .rounded = rounded,
                   .threads = threads()});
  });
}

// Runs the operator on checked tensors.
void compute(const ExpertsInputs& in, const ExpertsSizes& sizes, std::optional<experts_layout::Format> packed,
             const at::Tensor& gate_up, const at::Tensor& down) {
  expect_below("chosen", in.chosen.const_data_ptr<int32_t>(), sizes.tokens * sizes.top, 0, sizes.count);
  const at::Tensor between = at::empty({sizes.tokens, sizes.inner}, in.x.options());
  const at::Tensor totals = at::empty({sizes.tokens, sizes.hidden}, in.x.options().dtype(at::kFloat));
  by_dtype("x", in.x, [&](auto type) {
    using T = decltype(type);
    const auto values = [](const at::Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
    cpu::experts<T>({.x = values(in.x),
                     .chosen = in.chosen.const_data_ptr<int32_t>(),
                     .weights = in.weights.const_data_ptr<float>(),
                     .packed = packed,
                     .gate_up = gate_up.const_data_ptr(),
                     .gate_up_bias = in.gate_up_bias ? values(*in.gate_up_bias) : nullptr,
                     .down = down.const_data_ptr(),
                     .down_bias = in.down_bias ? values(*in.down_bias) : nullptr,
                     .between = static_cast<T*>(between.data_ptr()),
                     .totals = totals.data_ptr<float>(),
                     .out = static_cast<T*>(in.out.data_ptr()),
                     .add = in.add,
                     .tokens = sizes.tokens,
                     .top = sizes.top,
                     .hidden = sizes.hidden,
                     .inner = sizes.inner,
                     .clamped = sizes.clamped,
                     .alpha = static_cast<float>(in.alpha),
                     .limit = static_cast<float>(in.limit),
                     .threads = threads()});
  });
}

void experts(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, const at::Tensor& gate_up,
             const std::optional<at::Tensor>& gate_up_bias, const at::Tensor& down,
             const std::optional<at::Tensor>& down_bias, std::string_view activation, double alpha, double limit,
             bool add, const at::Tensor& out) {
  const ExpertsInputs in{x, chosen, weights, gate_up_bias, down_bias, activation, alpha, limit, add, out};
  compute(in, check_experts(in, gate_up, down, on_cpu()), std::nullopt, gate_up, down);
}

void experts_packed(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, std::string_view format,
                    const at::Tensor& gate_up, const std::optional<at::Tensor>& gate_up_bias, const at::Tensor& down,
                    const std::optional<at::Tensor>& down_bias, std::string_view activation, double alpha, double limit,
                    bool add, const at::Tensor& out) {
  const ExpertsInputs in{x, chosen, weights, gate_up_bias, down_bias, activation, alpha, limit, add, out};
  const experts_layout::Format packed = format_of(format);
  compute(in, check_packed_experts(in, packed, gate_up, down, on_cpu()), packed, gate_up, down);
}

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("route", route);
  m.impl("experts", experts);
  m.impl("experts_packed", experts_packed);
}

}  // namespace
}  // namespace quire::cpu::torch_api
