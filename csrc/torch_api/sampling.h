// Checks of `sample`, shared by the bindings of all devices.
#pragma once

#include <utility>

#include "sampling_rules.h"
#include "torch_api/checks.h"

namespace quire {

struct SampleSizes {
  Size rows{"rows"}, size{"size"}, max_seqs{"slots"};
};

inline SampleSizes check_sample(const at::Tensor& logits, const at::Tensor& slots, const at::Tensor& known,
                                const at::Tensor& table, const at::Tensor& tokens, const at::Tensor& outcome,
                                const Place& place) {
  SampleSizes sizes;
  Size words("words of a slot");
  expect_device("logits", logits, place);
  expect("logits", logits, {sizes.rows, sizes.size});
  expect_last_contiguous("logits", logits);
  TORCH_CHECK_VALUE(sizes.size > 0 && sizes.size < 1 << 22, "logits: rows of ", int64_t{sizes.size},
                    ", not 1 to 4194303");
  words.agree("this operator", sizeof(sampling::Settings) / 8);
  expect_plain("table", table, {sizes.max_seqs, words}, at::kLong, place);
  for (const auto& [who, t] : {std::pair{"slots", slots}, {"known", known}, {"tokens", tokens}}) {
    expect_plain(who, t, {sizes.rows}, at::kLong, place);
  }
  expect_plain("outcome", outcome, {sizes.rows}, at::kByte, place);
  return sizes;
}

inline SampleSizes check_argmax(const at::Tensor& logits, int64_t first, const at::Tensor& keys, const Place& place) {
  SampleSizes sizes;
  expect_device("logits", logits, place);
  expect("logits", logits, {sizes.rows, sizes.size});
  expect_last_contiguous("logits", logits);
  TORCH_CHECK_VALUE(first >= 0 && sizes.size > 0 && first + sizes.size < 1 << 22, "logits: tokens ", first, " to ",
                    first + sizes.size, ", not 0 to 4194303");
  expect_plain("keys", keys, {sizes.rows}, at::kLong, place);
  return sizes;
}

inline SampleSizes check_chosen(const at::Tensor& keys, const at::Tensor& slots, const at::Tensor& tokens,
                                const at::Tensor& outcome, const Place& place) {
  SampleSizes sizes;
  for (const auto& [who, t] : {std::pair{"keys", keys}, {"slots", slots}, {"tokens", tokens}}) {
    expect_plain(who, t, {sizes.rows}, at::kLong, place);
  }
  expect_plain("outcome", outcome, {sizes.rows}, at::kByte, place);
  return sizes;
}

}  // namespace quire
