// Checks of the operators on the block tables (apply_edits, decode_inputs, decode_outputs), shared by the bindings of
// all devices.
#pragma once

#include <utility>

#include "torch_api/checks.h"

namespace quire {

struct BatchSizes {
  Size count, max_rows{"table rows"}, max_blocks{"table columns"};
  explicit BatchSizes(const char* counted) : count(counted) {}
};

// tables [max_rows, max_blocks] i32, rows contiguous.
inline void expect_tables(const at::Tensor& tables, BatchSizes& sizes, const Place& place) {
  expect_device("tables", tables, place);
  expect("tables", tables, {sizes.max_rows, sizes.max_blocks});
  expect_last_contiguous("tables", tables);
  expect_dtype("tables", tables, at::kInt);
}

inline BatchSizes check_apply_edits(const at::Tensor& edits, const at::Tensor& tables, const Place& place) {
  BatchSizes sizes("edits");
  Size three("columns");
  three.agree("an edit", 3);
  expect_plain("edits", edits, {sizes.count, three}, at::kInt, place);
  expect_tables(tables, sizes, place);
  return sizes;
}

inline BatchSizes check_decode_inputs(const at::Tensor& slots, const at::Tensor& token, const at::Tensor& position,
                                      const at::Tensor& tables, int64_t block_size, const at::Tensor& ids,
                                      const at::Tensor& positions, const at::Tensor& kv_indices, const at::Tensor& rows,
                                      const at::Tensor& lens, const Place& place) {
  BatchSizes sizes("slots");
  TORCH_CHECK_VALUE(block_size > 0, "block_size: ", block_size, " is not positive");
  expect_tables(tables, sizes, place);
  expect_plain("token", token, {sizes.max_rows}, at::kLong, place);
  expect_plain("position", position, {sizes.max_rows}, at::kLong, place);
  expect_plain("slots", slots, {sizes.count}, at::kInt, place);
  for (const auto& [who, t] : {std::pair{"ids", ids}, {"positions", positions}, {"kv_indices", kv_indices}}) {
    expect_plain(who, t, {sizes.count}, at::kLong, place);
  }
  for (const auto& [who, t] : {std::pair{"rows", rows}, {"lens", lens}}) {
    expect_plain(who, t, {sizes.count}, at::kInt, place);
  }
  return sizes;
}

inline BatchSizes check_decode_outputs(const at::Tensor& slots, const at::Tensor& tokens, const at::Tensor& token,
                                       const at::Tensor& position, const Place& place) {
  BatchSizes sizes("slots");
  expect_plain("token", token, {sizes.max_rows}, at::kLong, place);
  expect_plain("position", position, {sizes.max_rows}, at::kLong, place);
  expect_plain("slots", slots, {sizes.count}, at::kInt, place);
  expect_plain("tokens", tokens, {sizes.count}, at::kLong, place);
  return sizes;
}

}  // namespace quire
