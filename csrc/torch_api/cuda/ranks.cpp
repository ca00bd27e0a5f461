// Binds the sum of a small tensor over ranks.

#include "cuda/ranks/one_shot_sum.h"

#include <torch/library.h>

#include "torch_api/checks.h"
#include "torch_api/cuda/convert.h"

namespace quire::cuda::torch_api {
namespace {

void one_shot_sum(const at::Tensor& part, at::IntArrayRef inboxes, const at::Tensor& calls, int64_t rank, int64_t most_bytes) {
  Size ctas("CTAs");
  const int64_t ranks = static_cast<int64_t>(inboxes.size()), bytes = static_cast<int64_t>(part.nbytes());
  expect_device("part", part, on_gpu(part));
  expect_contiguous("part", part);
  ctas.agree("kSumCtas", kSumCtas);
  expect_plain("calls", calls, {ctas}, at::kInt, on_gpu(part));
  TORCH_CHECK_VALUE(ranks <= kMostRanks, "inboxes: ", ranks, " ranks, the most are ", kMostRanks);
  TORCH_CHECK_VALUE(rank >= 0 && rank < ranks, "rank: is ", rank, " of ", ranks);
  TORCH_CHECK_VALUE(most_bytes % (kSumCtas * kSumLeast) == 0 && most_bytes > 0, "most_bytes: ", most_bytes,
                    " is no multiple of ", kSumCtas * kSumLeast);
  TORCH_CHECK_VALUE(bytes <= most_bytes, "part: has ", bytes, " bytes, the most are ", most_bytes);
  TORCH_CHECK_VALUE(bytes % 16 == 0 && reinterpret_cast<uintptr_t>(part.const_data_ptr()) % 16 == 0, "part: its ", bytes,
                    " bytes are no multiple of 16, or do not start at one");
  OneShotSumArgs args{
      .dtype = model_dtype_of("part", part),
      .part = part.data_ptr(),
      .bytes = bytes,
      .most_bytes = most_bytes,
      .calls = calls.data_ptr<int>(),
      .rank = static_cast<int>(rank),
      .ranks = static_cast<int>(ranks),
  };
  for (int64_t i = 0; i < ranks; ++i) args.inboxes[i] = reinterpret_cast<void*>(inboxes[i]);
  const c10::cuda::CUDAGuard guard(part.device());
  cuda::one_shot_sum(args, stream_of(part));
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) { m.impl("one_shot_sum", one_shot_sum); }

}  // namespace
}  // namespace quire::cuda::torch_api
