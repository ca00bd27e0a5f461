// Bindings of the operators on the block tables, on a CPU.

#include "cpu/batch.h"

#include <torch/library.h>

#include "torch_api/batch.h"
#include "torch_api/cpu/convert.h"

namespace quire::cpu::torch_api {
namespace {

Tables tables_of(const at::Tensor& tables) { return {tables.data_ptr<int32_t>(), tables.stride(0), tables.size(1)}; }

// Checks that each slot is -1 or a row of the tables.
const int32_t* slots_of(const at::Tensor& slots, const BatchSizes& sizes) {
  const int32_t* slot = slots.const_data_ptr<int32_t>();
  expect_below("slots", slot, sizes.count, -1, sizes.max_rows);
  return slot;
}

void apply_edits(const at::Tensor& edits, const at::Tensor& tables) {
  const BatchSizes sizes = check_apply_edits(edits, tables, on_cpu());
  const auto& [count, max_rows, max_blocks] = sizes;
  const int32_t* edit = edits.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    const int32_t row = edit[3 * i], column = edit[3 * i + 1];
    TORCH_CHECK_INDEX(row >= -1 && row < max_rows, "edits[", i, "]: row is ", row, ", tables have ", int64_t{max_rows});
    TORCH_CHECK_INDEX(row < 0 || (column >= 0 && column < max_blocks), "edits[", i, "]: column is ", column,
                      ", tables have ", int64_t{max_blocks});
  }
  cpu::apply_edits(edit, count, tables_of(tables));
}

void decode_inputs(const at::Tensor& slots, const at::Tensor& token, const at::Tensor& position,
                   const at::Tensor& tables, int64_t block_size, const at::Tensor& ids, const at::Tensor& positions,
                   const at::Tensor& kv_indices, const at::Tensor& rows, const at::Tensor& lens) {
  const BatchSizes sizes =
      check_decode_inputs(slots, token, position, tables, block_size, ids, positions, kv_indices, rows, lens, on_cpu());
  cpu::decode_inputs(slots_of(slots, sizes), sizes.count, token.const_data_ptr<int64_t>(),
                     position.const_data_ptr<int64_t>(), tables_of(tables), block_size,
                     {ids.data_ptr<int64_t>(), positions.data_ptr<int64_t>(), kv_indices.data_ptr<int64_t>(),
                      rows.data_ptr<int32_t>(), lens.data_ptr<int32_t>()});
}

void decode_outputs(const at::Tensor& slots, const at::Tensor& tokens, const at::Tensor& token,
                    const at::Tensor& position) {
  const BatchSizes sizes = check_decode_outputs(slots, tokens, token, position, on_cpu());
  cpu::decode_outputs(slots_of(slots, sizes), sizes.count, tokens.const_data_ptr<int64_t>(), token.data_ptr<int64_t>(),
                      position.data_ptr<int64_t>());
}

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("apply_edits", apply_edits);
  m.impl("decode_inputs", decode_inputs);
  m.impl("decode_outputs", decode_outputs);
}

}  // namespace
}  // namespace quire::cpu::torch_api
