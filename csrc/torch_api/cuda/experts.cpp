// Bindings of a mixture of experts on a GPU.

#include "cuda/experts/experts.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string_view>

#include "torch_api/cuda/convert.h"
#include "torch_api/experts.h"

namespace quire::cuda::torch_api {
namespace {

Dtype half_dtype_of(const char* who, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf, who, ": dtype is ",
                    t.scalar_type(), ", this operator needs BFloat16 or Half");
  return model_dtype_of(who, t);
}

void route(const at::Tensor& logits, bool normalise, bool rounded, const at::Tensor& chosen,
           const at::Tensor& weights) {
  const Dtype dtype = half_dtype_of("logits", logits);
  const RouteSizes sizes = check_route(logits, chosen, weights, kMaxExperts, on_gpu(logits));
  const c10::cuda::CUDAGuard guard(logits.device());
  cuda::route({.dtype = dtype,
               .logits = logits.const_data_ptr(),
               .chosen = chosen.data_ptr<int>(),
               .weights = weights.data_ptr<float>(),
               .tokens = static_cast<int>(sizes.tokens),
               .experts = static_cast<int>(sizes.experts),
               .top = static_cast<int>(sizes.top),
               .normalise = normalise,
               .rounded = rounded},
              stream_of(logits));
}

// Runs the operator on checked tensors.
void compute(const ExpertsInputs& in, const ExpertsSizes& sizes, std::optional<experts_layout::Format> packed,
             const at::Tensor& gate_up, const at::Tensor& down) {
  TORCH_CHECK_VALUE(sizes.count <= kMaxExperts, "down: ", int64_t{sizes.count}, " experts, the maximum is ",
                    kMaxExperts);
  TORCH_CHECK_VALUE(sizes.hidden % 8 == 0 && sizes.inner % 8 == 0, "down: hidden size ", int64_t{sizes.hidden},
                    " and inner size ", int64_t{sizes.inner}, " are not multiples of 8");
  TORCH_CHECK_VALUE(sizes.tokens <= kMaxTokens, "x: ", int64_t{sizes.tokens}, " tokens, the maximum is ", kMaxTokens);
  const c10::cuda::CUDAGuard guard(in.x.device());
  const auto data_of = [](const std::optional<at::Tensor>& t) { return t ? t->const_data_ptr() : nullptr; };
  ExpertsArgs args{.dtype = half_dtype_of("x", in.x),
                   .x = in.x.const_data_ptr(),
                   .chosen = in.chosen.const_data_ptr<int>(),
                   .weights = in.weights.const_data_ptr<float>(),
                   .packed = packed,
                   .gate_up = gate_up.const_data_ptr(),
                   .gate_up_bias = data_of(in.gate_up_bias),
                   .down = down.const_data_ptr(),
                   .down_bias = data_of(in.down_bias),
                   .out = in.out.data_ptr(),
                   .add = in.add,
                   .tokens = static_cast<int>(sizes.tokens),
                   .top = static_cast<int>(sizes.top),
                   .experts = static_cast<int>(sizes.count),
                   .hidden = static_cast<int>(sizes.hidden),
                   .inner = static_cast<int>(sizes.inner),
                   .activation = sizes.clamped ? Activation::clamped : Activation::silu,
                   .alpha = static_cast<float>(in.alpha),
                   .limit = static_cast<float>(in.limit)};
  TORCH_CHECK_VALUE(!packed || takes_packed(args), "gate_up: packed weights need a Hopper GPU and x in BFloat16; ",
                    "mxfp4 needs the activation clamped, fp8 silu");
  const ExpertsWay way = way_of(args);
  const bool few = way != ExpertsWay::grouped;
  const int64_t pairs = sizes.tokens * sizes.top;
  TORCH_CHECK_VALUE(!few || pairs <= kMaxPairs, "chosen: ", pairs, " experts of all tokens, the maximum is ", kMaxPairs,
                    " unless the GPU is a Hopper and hidden and inner size are multiples of 64");
  const ExpertsMemory memory = memory_of(args, way);
  const auto scratch = [&](int64_t bytes) { return at::empty({bytes}, in.x.options().dtype(at::kByte)); };
  const at::Tensor between = scratch(memory.between), sums = scratch(memory.sums), order = scratch(memory.order);
  const at::Tensor gathered = scratch(memory.gathered);
  args.between = between.data_ptr();
  args.sums = sums.data_ptr();
  args.order = order.data_ptr();
  args.gathered = gathered.data_ptr();
  cuda::experts(args, way, stream_of(in.x));
}

void experts(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, const at::Tensor& gate_up,
             const std::optional<at::Tensor>& gate_up_bias, const at::Tensor& down,
             const std::optional<at::Tensor>& down_bias, std::string_view activation, double alpha, double limit,
             bool add, const at::Tensor& out) {
  const ExpertsInputs in{x, chosen, weights, gate_up_bias, down_bias, activation, alpha, limit, add, out};
  half_dtype_of("x", x);
  compute(in, check_experts(in, gate_up, down, on_gpu(x)), std::nullopt, gate_up, down);
}

void experts_packed(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, std::string_view format,
                    const at::Tensor& gate_up, const std::optional<at::Tensor>& gate_up_bias, const at::Tensor& down,
                    const std::optional<at::Tensor>& down_bias, std::string_view activation, double alpha, double limit,
                    bool add, const at::Tensor& out) {
  const ExpertsInputs in{x, chosen, weights, gate_up_bias, down_bias, activation, alpha, limit, add, out};
  half_dtype_of("x", x);
  const experts_layout::Format packed = format_of(format);
  compute(in, check_packed_experts(in, packed, gate_up, down, on_gpu(x)), packed, gate_up, down);
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("route", route);
  m.impl("experts", experts);
  m.impl("experts_packed", experts_packed);
}

}  // namespace
}  // namespace quire::cuda::torch_api
