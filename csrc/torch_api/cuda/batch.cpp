// The GPU's door to the mirror of the seats: tensors come in, are checked, and leave as pointers.  Seats and edits lie on
// the device, so the caller answers for their range.

#include "cuda/cache/batch.h"

#include <torch/library.h>

#include <utility>

#include "torch_api/cuda/convert.h"

namespace quire::cuda::door {

// [max_rows, max_blocks], rows contiguous.
Tables tables_of(const at::Tensor& tables, Size& max_rows) {
  Size max_blocks("table columns");
  expect_cuda("tables", tables, tables);
  expect("tables", tables, {max_rows, max_blocks});
  expect_last_contiguous("tables", tables);
  expect_dtype("tables", tables, at::kInt);
  return {tables.data_ptr<int32_t>(), tables.stride(0), max_blocks};
}

void apply_edits(const at::Tensor& edits, const at::Tensor& tables) {
  Size count("edits"), three("columns"), max_rows("table rows");
  three.agree("an edit", 3);
  const Tables mirror = tables_of(tables, max_rows);
  expect_cuda("edits", edits, tables);
  expect("edits", edits, {count, three});
  expect_contiguous("edits", edits);
  expect_dtype("edits", edits, at::kInt);
  const c10::cuda::CUDAGuard guard(tables.device());
  cuda::apply_edits(edits.const_data_ptr<int32_t>(), count, mirror, stream_of(tables));
}

void decode_inputs(const at::Tensor& seats, const at::Tensor& token, const at::Tensor& position,
                   const at::Tensor& tables, int64_t block_size, const at::Tensor& ids, const at::Tensor& positions,
                   const at::Tensor& slots, const at::Tensor& rows, const at::Tensor& lens) {
  Size count("seats"), max_rows("table rows");
  TORCH_CHECK_VALUE(block_size > 0, "block_size: ", block_size, " is not positive");
  const Tables mirror = tables_of(tables, max_rows);
  expect_vector("token", token, max_rows, at::kLong, tables);
  expect_vector("position", position, max_rows, at::kLong, tables);
  expect_vector("seats", seats, count, at::kInt, tables);
  for (const auto& [who, t] : {std::pair{"ids", ids}, {"positions", positions}, {"slots", slots}}) {
    expect_vector(who, t, count, at::kLong, tables);
  }
  for (const auto& [who, t] : {std::pair{"rows", rows}, {"lens", lens}}) {
    expect_vector(who, t, count, at::kInt, tables);
  }
  const DecodeInputs args{
      .seats = seats.const_data_ptr<int32_t>(),
      .count = count,
      .token = token.const_data_ptr<int64_t>(),
      .position = position.const_data_ptr<int64_t>(),
      .tables = mirror,
      .block_size = static_cast<int>(block_size),
      .ids = ids.data_ptr<int64_t>(),
      .positions = positions.data_ptr<int64_t>(),
      .slots = slots.data_ptr<int64_t>(),
      .rows = rows.data_ptr<int32_t>(),
      .lens = lens.data_ptr<int32_t>(),
  };
  const c10::cuda::CUDAGuard guard(tables.device());
  cuda::decode_inputs(args, stream_of(tables));
}

void decode_outputs(const at::Tensor& seats, const at::Tensor& tokens, const at::Tensor& token,
                    const at::Tensor& position) {
  Size count("seats"), max_rows("table rows");
  expect_vector("token", token, max_rows, at::kLong, token);
  expect_vector("position", position, max_rows, at::kLong, token);
  expect_vector("seats", seats, count, at::kInt, token);
  expect_vector("tokens", tokens, count, at::kLong, token);
  const c10::cuda::CUDAGuard guard(token.device());
  cuda::decode_outputs(seats.const_data_ptr<int32_t>(), count, tokens.const_data_ptr<int64_t>(),
                       token.data_ptr<int64_t>(), position.data_ptr<int64_t>(), stream_of(token));
}

}  // namespace quire::cuda::door

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("apply_edits", quire::cuda::door::apply_edits);
  m.impl("decode_inputs", quire::cuda::door::decode_inputs);
  m.impl("decode_outputs", quire::cuda::door::decode_outputs);
}
