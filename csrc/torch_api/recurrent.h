// Checks of the operators of layers with a state per slot.
#pragma once

#include <optional>
#include <utility>

#include "torch_api/checks.h"

namespace quire {

struct PackedSizes {
  Size tokens{"tokens"}, sequences{"sequences"}, slots{"slots"};
};

// rows [S] i32, q_start [S + 1] i32, lens [S] i32, keeps [n, 2] i32.
inline void check_packed(const at::Tensor& rows, const at::Tensor& q_start, const std::optional<at::Tensor>& lens,
                         const std::optional<at::Tensor>& keeps, PackedSizes& sizes, const Place& place) {
  Size bounds("sequences + 1");
  expect_plain("rows", rows, {sizes.sequences}, at::kInt, place);
  bounds.agree("rows", sizes.sequences + 1);
  expect_plain("q_start", q_start, {bounds}, at::kInt, place);
  if (lens) expect_plain("lens", *lens, {sizes.sequences}, at::kInt, place);
  Size count("keeps"), two("columns of keeps");
  two.agree("this operator", 2);
  if (keeps) expect_plain("keeps", *keeps, {count, two}, at::kInt, place);
}

struct ConvSizes : PackedSizes {
  Size channels{"channels"}, taps{"taps"}, past{"taps - 1"};
};

inline ConvSizes check_causal_conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                   const at::Tensor& states, const at::Tensor& rows, const at::Tensor& q_start,
                                   const std::optional<at::Tensor>& lens, const std::optional<at::Tensor>& keeps,
                                   const at::Tensor& out, const Place& place) {
  ConvSizes sizes;
  expect_device("x", x, place);
  expect("x", x, {sizes.tokens, sizes.channels});
  expect_last_contiguous("x", x);
  expect_plain("weight", weight, {sizes.taps, sizes.channels}, at::kFloat, place);
  if (bias) expect_plain("bias", *bias, {sizes.channels}, at::kFloat, place);
  sizes.past.agree("weight", sizes.taps - 1);
  expect_plain("states", states, {sizes.slots, sizes.past, sizes.channels}, x.scalar_type(), place, "x");
  expect_plain("out", out, {sizes.tokens, sizes.channels}, x.scalar_type(), place, "x");
  check_packed(rows, q_start, lens, keeps, sizes, place);
  return sizes;
}

struct RecurrenceSizes : PackedSizes {
  Size heads{"heads"}, key_heads{"key heads"}, keys{"keys"}, values{"values"};
};

inline RecurrenceSizes check_linear_recurrence(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                               const at::Tensor& decay, const std::optional<at::Tensor>& beta,
                                               const at::Tensor& states, const at::Tensor& rows,
                                               const at::Tensor& q_start, const std::optional<at::Tensor>& lens,
                                               const std::optional<at::Tensor>& keeps, const at::Tensor& out,
                                               const Place& place) {
  RecurrenceSizes sizes;
  for (const auto& [who, t] : {std::pair{"q", q}, {"k", k}}) {
    expect_device(who, t, place);
    expect(who, t, {sizes.tokens, sizes.key_heads, sizes.keys});
    expect_last_contiguous(who, t);
    expect_dtype(who, t, v.scalar_type(), "v");
  }
  expect_device("v", v, place);
  expect("v", v, {sizes.tokens, sizes.heads, sizes.values});
  expect_last_contiguous("v", v);
  TORCH_CHECK_VALUE(sizes.key_heads > 0 && sizes.heads % sizes.key_heads == 0, "v: ", int64_t{sizes.heads},
                    " heads are no multiple of the ", int64_t{sizes.key_heads}, " key heads");
  expect_plain("decay", decay, {sizes.tokens, sizes.heads}, at::kFloat, place);
  if (beta) expect_plain("beta", *beta, {sizes.tokens, sizes.heads}, at::kFloat, place);
  expect_plain("states", states, {sizes.slots, sizes.heads, sizes.keys, sizes.values}, at::kFloat, place);
  expect_plain("out", out, {sizes.tokens, sizes.heads, sizes.values}, at::kFloat, place);
  check_packed(rows, q_start, lens, keeps, sizes, place);
  return sizes;
}

struct GatedNormSizes {
  Size tokens{"tokens"}, heads{"heads"}, size{"size"};
};

inline GatedNormSizes check_gated_norm(const at::Tensor& x, const at::Tensor& weight,
                                       const std::optional<at::Tensor>& gate, const at::Tensor& out,
                                       const Place& place) {
  GatedNormSizes sizes;
  expect_device("x", x, place);
  expect("x", x, {sizes.tokens, sizes.heads, sizes.size});
  expect_last_contiguous("x", x);
  if (x.scalar_type() != at::kFloat) expect_dtype("x", x, out.scalar_type(), "out");
  if (gate) {
    expect_device("gate", *gate, place);
    expect("gate", *gate, {sizes.tokens, sizes.heads, sizes.size});
    expect_last_contiguous("gate", *gate);
    expect_dtype("gate", *gate, out.scalar_type(), "out");
  }
  expect_plain("weight", weight, {sizes.size}, at::kFloat, place);
  expect_plain("out", out, {sizes.tokens, sizes.heads, sizes.size}, out.scalar_type(), place);
  return sizes;
}

struct DeltaGatesSizes {
  Size tokens{"tokens"}, heads{"heads"};
};

inline DeltaGatesSizes check_delta_gates(const at::Tensor& a, const at::Tensor& b, const at::Tensor& rate,
                                         const at::Tensor& dt_bias, const at::Tensor& decay, const at::Tensor& beta,
                                         const Place& place) {
  DeltaGatesSizes sizes;
  for (const auto& [who, t] : {std::pair{"a", a}, {"b", b}}) {
    expect_device(who, t, place);
    expect(who, t, {sizes.tokens, sizes.heads});
    expect_last_contiguous(who, t);
    expect_dtype(who, t, a.scalar_type(), "a");
  }
  expect_plain("rate", rate, {sizes.heads}, at::kFloat, place);
  expect_plain("dt_bias", dt_bias, {sizes.heads}, at::kFloat, place);
  expect_plain("decay", decay, {sizes.tokens, sizes.heads}, at::kFloat, place);
  expect_plain("beta", beta, {sizes.tokens, sizes.heads}, at::kFloat, place);
  return sizes;
}

}  // namespace quire
