// Bindings of the operators of layers with a state per slot, on a CPU.

#include "cpu/recurrent.h"

#include <torch/library.h>

#include <optional>
#include <vector>

#include "torch_api/cpu/convert.h"
#include "torch_api/recurrent.h"

namespace quire::cpu::torch_api {
namespace {

// Raises IndexError for a state outside `states` or written twice, and for sequences that overlap or exceed the tokens.
Packed packed_of(const at::Tensor& rows, const at::Tensor& q_start, const std::optional<at::Tensor>& lens,
                 const std::optional<at::Tensor>& keeps, const PackedSizes& sizes) {
  const int32_t *slots = rows.const_data_ptr<int32_t>(), *starts = q_start.const_data_ptr<int32_t>();
  const int32_t* lengths = lens ? lens->const_data_ptr<int32_t>() : nullptr;
  const int64_t count = sizes.sequences;
  expect_below("rows", slots, count, 0, sizes.slots);
  expect_below("q_start", starts, count + 1, 0, sizes.tokens + 1);
  std::vector<bool> named(sizes.slots);
  for (int64_t s = 0; s < count; ++s) {
    TORCH_CHECK_INDEX(starts[s] <= starts[s + 1], "q_start[", s, "] is ", starts[s], ", the next is ", starts[s + 1]);
    if (lengths && lengths[s] == 0) continue;
    TORCH_CHECK_INDEX(!named[slots[s]], "rows: two sequences share the state of slot ", slots[s]);
    named[slots[s]] = true;
  }
  if (!keeps) return {slots, starts, lengths, count, nullptr, 0};
  const auto* kept = reinterpret_cast<const Keep*>(keeps->const_data_ptr<int32_t>());
  for (int64_t i = 0; i < keeps->size(0); ++i) {
    const auto [end, place] = kept[i];
    TORCH_CHECK_INDEX(end > (i ? kept[i - 1].end : 0) && end <= starts[count], "keeps[", i, "]: end is ", end);
    TORCH_CHECK_INDEX(place >= 0 && place < sizes.slots && !named[place], "keeps[", i, "]: place is ", place);
    named[place] = true;
  }
  return {slots, starts, lengths, count, kept, keeps->size(0)};
}

const float* floats_of(const std::optional<at::Tensor>& t) { return t ? t->const_data_ptr<float>() : nullptr; }

void causal_conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool silu,
                 const at::Tensor& states, const at::Tensor& rows, const at::Tensor& q_start,
                 const std::optional<at::Tensor>& lens, const std::optional<at::Tensor>& keeps, const at::Tensor& out) {
  const ConvSizes sizes = check_causal_conv(x, weight, bias, states, rows, q_start, lens, keeps, out, on_cpu());
  const Packed packed = packed_of(rows, q_start, lens, keeps, sizes);
  by_dtype("x", x, [&](auto type) {
    using T = decltype(type);
    cpu::causal_conv<T>({
        .x = static_cast<const T*>(x.const_data_ptr()),
        .x_stride = x.stride(0),
        .weight = weight.const_data_ptr<float>(),
        .bias = floats_of(bias),
        .states = static_cast<T*>(states.data_ptr()),
        .out = static_cast<T*>(out.data_ptr()),
        .channels = sizes.channels,
        .taps = sizes.taps,
        .silu = silu,
        .packed = packed,
        .threads = threads(),
    });
  });
}

void linear_recurrence(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& decay,
                       const std::optional<at::Tensor>& beta, double q_scale, double eps, const at::Tensor& states,
                       const at::Tensor& rows, const at::Tensor& q_start, const std::optional<at::Tensor>& lens,
                       const std::optional<at::Tensor>& keeps, const at::Tensor& out) {
  const RecurrenceSizes sizes =
      check_linear_recurrence(q, k, v, decay, beta, states, rows, q_start, lens, keeps, out, on_cpu());
  const Packed packed = packed_of(rows, q_start, lens, keeps, sizes);
  by_dtype("v", v, [&](auto type) {
    using T = decltype(type);
    const auto rows_of = [](const at::Tensor& t) {
      return HeadRows<T>{static_cast<const T*>(t.const_data_ptr()), t.stride(0), t.stride(1)};
    };
    cpu::linear_recurrence<T>({
        .q = rows_of(q),
        .k = rows_of(k),
        .v = rows_of(v),
        .decay = decay.const_data_ptr<float>(),
        .beta = floats_of(beta),
        .states = states.data_ptr<float>(),
        .out = out.data_ptr<float>(),
        .heads = sizes.heads,
        .key_heads = sizes.key_heads,
        .keys = sizes.keys,
        .values = sizes.values,
        .q_scale = static_cast<float>(q_scale),
        .eps = static_cast<float>(eps),
        .packed = packed,
        .threads = threads(),
    });
  });
}

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("causal_conv", causal_conv);
  m.impl("linear_recurrence", linear_recurrence);
}

}  // namespace
}  // namespace quire::cpu::torch_api
