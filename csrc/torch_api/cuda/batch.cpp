// Bindings of the operators on the block tables, on a GPU.

#include "cuda/cache/batch.h"

#include <torch/library.h>

#include "torch_api/batch.h"
#include "torch_api/cuda/convert.h"

namespace quire::cuda::torch_api {
namespace {

Tables tables_of(const at::Tensor& tables) { return {tables.data_ptr<int32_t>(), tables.stride(0), tables.size(1)}; }

void apply_edits(const at::Tensor& edits, const at::Tensor& tables) {
  const BatchSizes sizes = check_apply_edits(edits, tables, on_gpu(tables));
  const c10::cuda::CUDAGuard guard(tables.device());
  cuda::apply_edits(edits.const_data_ptr<int32_t>(), sizes.count, tables_of(tables), stream_of(tables));
}

void decode_inputs(const at::Tensor& slots, const at::Tensor& token, const at::Tensor& position,
                   const at::Tensor& tables, int64_t block_size, const at::Tensor& ids, const at::Tensor& positions,
                   const at::Tensor& kv_indices, const at::Tensor& rows, const at::Tensor& lens) {
  const BatchSizes sizes = check_decode_inputs(slots, token, position, tables, block_size, ids, positions, kv_indices,
                                               rows, lens, on_gpu(tables));
  const DecodeInputs args{
      .slots = slots.const_data_ptr<int32_t>(),
      .count = sizes.count,
      .token = token.const_data_ptr<int64_t>(),
      .position = position.const_data_ptr<int64_t>(),
      .tables = tables_of(tables),
      .block_size = static_cast<int>(block_size),
      .ids = ids.data_ptr<int64_t>(),
      .positions = positions.data_ptr<int64_t>(),
      .kv_indices = kv_indices.data_ptr<int64_t>(),
      .rows = rows.data_ptr<int32_t>(),
      .lens = lens.data_ptr<int32_t>(),
  };
  const c10::cuda::CUDAGuard guard(tables.device());
  cuda::decode_inputs(args, stream_of(tables));
}

void decode_outputs(const at::Tensor& slots, const at::Tensor& tokens, const at::Tensor& token,
                    const at::Tensor& position) {
  const BatchSizes sizes = check_decode_outputs(slots, tokens, token, position, on_gpu(token));
  const c10::cuda::CUDAGuard guard(token.device());
  cuda::decode_outputs(slots.const_data_ptr<int32_t>(), sizes.count, tokens.const_data_ptr<int64_t>(),
                       token.data_ptr<int64_t>(), position.data_ptr<int64_t>(), stream_of(token));
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("apply_edits", apply_edits);
  m.impl("decode_inputs", decode_inputs);
  m.impl("decode_outputs", decode_outputs);
}

}  // namespace
}  // namespace quire::cuda::torch_api
