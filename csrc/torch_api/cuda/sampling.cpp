// Bindings of sampling on a GPU.

#include "cuda/sampling/sampling.h"

#include <torch/library.h>

#include "torch_api/cuda/convert.h"
#include "torch_api/sampling.h"

namespace quire::cuda::torch_api {
namespace {

void sample(const at::Tensor& logits, const at::Tensor& slots, const at::Tensor& known, const at::Tensor& table,
            bool general, const at::Tensor& tokens, const at::Tensor& outcome) {
  const SampleSizes sizes = check_sample(logits, slots, known, table, tokens, outcome, on_gpu(logits));
  const SampleArgs args{
      .dtype = model_dtype_of("logits", logits),
      .logits = logits.const_data_ptr(),
      .row_stride = logits.stride(0),
      .slots = slots.const_data_ptr<int64_t>(),
      .known = known.const_data_ptr<int64_t>(),
      .table = static_cast<const sampling::Settings*>(table.const_data_ptr()),
      .general = general,
      .tokens = tokens.data_ptr<int64_t>(),
      .outcome = outcome.data_ptr<uint8_t>(),
      .rows = sizes.rows,
      .size = static_cast<int>(sizes.size),
  };
  const c10::cuda::CUDAGuard guard(logits.device());
  cuda::sample(args, stream_of(logits));
}

void argmax(const at::Tensor& logits, int64_t first, const at::Tensor& keys) {
  const SampleSizes sizes = check_argmax(logits, first, keys, on_gpu(logits));
  const ArgmaxArgs args{
      .dtype = model_dtype_of("logits", logits),
      .logits = logits.const_data_ptr(),
      .row_stride = logits.stride(0),
      .first = first,
      .keys = keys.data_ptr<int64_t>(),
      .rows = sizes.rows,
      .size = static_cast<int>(sizes.size),
  };
  const c10::cuda::CUDAGuard guard(logits.device());
  cuda::argmax(args, stream_of(logits));
}

void chosen(const at::Tensor& keys, const at::Tensor& slots, const at::Tensor& tokens, const at::Tensor& outcome) {
  const SampleSizes sizes = check_chosen(keys, slots, tokens, outcome, on_gpu(keys));
  const c10::cuda::CUDAGuard guard(keys.device());
  cuda::chosen(keys.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(), tokens.data_ptr<int64_t>(),
               outcome.data_ptr<uint8_t>(), sizes.rows, stream_of(keys));
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("sample", sample);
  m.impl("argmax", argmax);
  m.impl("chosen", chosen);
}

}  // namespace
}  // namespace quire::cuda::torch_api
