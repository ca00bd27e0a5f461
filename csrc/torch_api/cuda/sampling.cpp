// The GPU's door to sampling: tensors come in, are checked as far as the host can, and leave as pointers.

#include "cuda/sampling/sampling.h"

#include <torch/library.h>

#include "torch_api/cuda/convert.h"

namespace quire::cuda::door {
namespace {

void sample(const at::Tensor& logits, const at::Tensor& seats, const at::Tensor& known, const at::Tensor& table,
            bool general, const at::Tensor& tokens, const at::Tensor& outcome) {
  Size rows("rows"), size("size"), max_seqs("seats"), words("words of a seat");
  expect("logits", logits, {rows, size});
  expect_last_contiguous("logits", logits);
  TORCH_CHECK_VALUE(size > 0 && size < 1 << 22, "logits: rows of ", int64_t{size}, ", not 1 to 4194303");
  words.agree("this operator", sizeof(sampling::Seat) / 8);
  expect("table", table, {max_seqs, words});
  expect_cuda("table", table, logits);
  expect_contiguous("table", table);
  expect_dtype("table", table, at::kLong);
  expect_vector("seats", seats, rows, at::kLong, logits);
  expect_vector("known", known, rows, at::kLong, logits);
  expect_vector("tokens", tokens, rows, at::kLong, logits);
  expect_vector("outcome", outcome, rows, at::kByte, logits);
  const c10::cuda::CUDAGuard guard(logits.device());
  cuda::sample(
      {
          .dtype = model_dtype_of("logits", logits),
          .logits = logits.const_data_ptr(),
          .row_stride = logits.stride(0),
          .seats = seats.const_data_ptr<int64_t>(),
          .known = known.const_data_ptr<int64_t>(),
          .table = static_cast<const sampling::Seat*>(table.const_data_ptr()),
          .general = general,
          .tokens = tokens.data_ptr<int64_t>(),
          .outcome = outcome.data_ptr<uint8_t>(),
          .rows = rows,
          .size = static_cast<int>(int64_t{size}),
      },
      stream_of(logits));
}

}  // namespace
}  // namespace quire::cuda::door

TORCH_LIBRARY_IMPL(quire, CUDA, m) { m.impl("sample", quire::cuda::door::sample); }
