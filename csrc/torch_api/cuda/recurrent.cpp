// Bindings of the operators of layers with a state per slot, on a GPU.

#include "cuda/recurrent/recurrent.h"

#include <torch/library.h>

#include <optional>

#include "torch_api/cuda/convert.h"
#include "torch_api/recurrent.h"

namespace quire::cuda::torch_api {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

Packed packed_of(const at::Tensor& rows, const at::Tensor& q_start, const MaybeTensor& lens, const MaybeTensor& keeps,
                 const PackedSizes& sizes) {
  return {
      .slots = rows.const_data_ptr<int32_t>(),
      .starts = q_start.const_data_ptr<int32_t>(),
      .lens = lens ? lens->const_data_ptr<int32_t>() : nullptr,
      .sequences = static_cast<int>(sizes.sequences),
      .keeps = keeps ? reinterpret_cast<const Keep*>(keeps->const_data_ptr<int32_t>()) : nullptr,
      .keep_count = keeps ? static_cast<int>(keeps->size(0)) : 0,
  };
}

const float* floats_of(const MaybeTensor& t) { return t ? t->const_data_ptr<float>() : nullptr; }

HeadRows head_rows_of(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1)}; }

void causal_conv(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias, bool silu,
                 const at::Tensor& states, const at::Tensor& rows, const at::Tensor& q_start, const MaybeTensor& lens,
                 const MaybeTensor& keeps, const at::Tensor& out) {
  const ConvSizes sizes = check_causal_conv(x, weight, bias, states, rows, q_start, lens, keeps, out, on_gpu(x));
  TORCH_CHECK_VALUE(sizes.taps >= kMinTaps && sizes.taps <= kMaxTaps, "weight: taps is ", int64_t{sizes.taps}, ", not ",
                    kMinTaps, " to ", kMaxTaps);
  const ConvArgs args{
      .dtype = model_dtype_of("x", x),
      .x = x.const_data_ptr(),
      .x_stride = x.stride(0),
      .weight = weight.const_data_ptr<float>(),
      .bias = floats_of(bias),
      .states = states.data_ptr(),
      .out = out.data_ptr(),
      .tokens = sizes.tokens,
      .channels = sizes.channels,
      .taps = static_cast<int>(sizes.taps),
      .silu = silu,
      .packed = packed_of(rows, q_start, lens, keeps, sizes),
  };
  const c10::cuda::CUDAGuard guard(x.device());
  cuda::causal_conv(args, stream_of(x));
}

void linear_recurrence(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& decay,
                       const MaybeTensor& beta, double q_scale, double eps, const at::Tensor& states,
                       const at::Tensor& rows, const at::Tensor& q_start, const MaybeTensor& lens,
                       const MaybeTensor& keeps, const at::Tensor& out) {
  const RecurrenceSizes sizes =
      check_linear_recurrence(q, k, v, decay, beta, states, rows, q_start, lens, keeps, out, on_gpu(v));
  TORCH_CHECK_VALUE(sizes.keys <= kMaxKeys, "k: keys is ", int64_t{sizes.keys}, ", at most ", kMaxKeys);
  const RecurrenceArgs args{
      .dtype = model_dtype_of("v", v),
      .q = head_rows_of(q),
      .k = head_rows_of(k),
      .v = head_rows_of(v),
      .decay = decay.const_data_ptr<float>(),
      .beta = floats_of(beta),
      .states = states.data_ptr<float>(),
      .out = out.data_ptr<float>(),
      .tokens = sizes.tokens,
      .heads = static_cast<int>(sizes.heads),
      .key_heads = static_cast<int>(sizes.key_heads),
      .keys = static_cast<int>(sizes.keys),
      .values = static_cast<int>(sizes.values),
      .q_scale = static_cast<float>(q_scale),
      .eps = static_cast<float>(eps),
      .packed = packed_of(rows, q_start, lens, keeps, sizes),
  };
  const c10::cuda::CUDAGuard guard(v.device());
  cuda::linear_recurrence(args, stream_of(v));
}

void gated_norm(const at::Tensor& x, const at::Tensor& weight, double eps, const MaybeTensor& gate,
                const at::Tensor& out) {
  const GatedNormSizes sizes = check_gated_norm(x, weight, gate, out, on_gpu(x));
  const GatedNormArgs args{
      .dtype = model_dtype_of("out", out),
      .wide_x = x.scalar_type() == at::kFloat,
      .x = head_rows_of(x),
      .gate = gate ? head_rows_of(*gate) : HeadRows{},
      .weight = weight.const_data_ptr<float>(),
      .out = out.data_ptr(),
      .eps = static_cast<float>(eps),
      .tokens = sizes.tokens,
      .heads = static_cast<int>(sizes.heads),
      .size = static_cast<int>(sizes.size),
  };
  const c10::cuda::CUDAGuard guard(x.device());
  cuda::gated_norm(args, stream_of(x));
}

void delta_gates(const at::Tensor& a, const at::Tensor& b, const at::Tensor& rate, const at::Tensor& dt_bias,
                 double beta_scale, const at::Tensor& decay, const at::Tensor& beta) {
  const DeltaGatesSizes sizes = check_delta_gates(a, b, rate, dt_bias, decay, beta, on_gpu(a));
  const DeltaGatesArgs args{
      .dtype = model_dtype_of("a", a),
      .a = a.const_data_ptr(),
      .b = b.const_data_ptr(),
      .a_stride = a.stride(0),
      .b_stride = b.stride(0),
      .rate = rate.const_data_ptr<float>(),
      .dt_bias = dt_bias.const_data_ptr<float>(),
      .beta_scale = static_cast<float>(beta_scale),
      .decay = decay.data_ptr<float>(),
      .beta = beta.data_ptr<float>(),
      .tokens = sizes.tokens,
      .heads = static_cast<int>(sizes.heads),
  };
  const c10::cuda::CUDAGuard guard(a.device());
  cuda::delta_gates(args, stream_of(a));
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("gated_norm", gated_norm);
  m.impl("delta_gates", delta_gates);
  m.impl("causal_conv", causal_conv);
  m.impl("linear_recurrence", linear_recurrence);
}

}  // namespace
}  // namespace quire::cuda::torch_api
