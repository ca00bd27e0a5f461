// Binding of the all-reduce over the ranks of a model.

#include "cuda/ranks/rank_sum.h"

#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "torch_api/checks.h"
#include "torch_api/cuda/convert.h"

namespace quire::cuda::torch_api {
namespace {

void rank_sum(const at::Tensor& part, const std::optional<at::Tensor>& plus, const std::optional<at::Tensor>& norm,
              double eps, const std::optional<at::Tensor>& normed, const at::Tensor& inbox, at::IntArrayRef inboxes,
              const at::Tensor& calls, int64_t rank, int64_t ctas, int64_t words_share, int64_t blocks_share,
              bool words) {
  Size rows("rows"), size("size"), counters("counters");
  const Place place = on_gpu(part);
  const at::ScalarType dtype = part.scalar_type();
  expect_plain("part", part, {rows, size}, dtype, place);
  if (plus) expect_plain("plus", *plus, {rows, size}, dtype, place, "part");
  TORCH_CHECK_VALUE(norm.has_value() == normed.has_value(), "norm, normed: only one of them is given");
  if (norm) {
    expect_plain("norm", *norm, {size}, dtype, place, "part");
    expect_plain("normed", *normed, {rows, size}, dtype, place, "part");
  }
  counters.agree("kSumCtas", kSumCtas);
  expect_plain("calls", calls, {counters}, at::kInt, place);
  const int64_t ranks = static_cast<int64_t>(inboxes.size()), row_bytes = size * part.element_size();
  TORCH_CHECK_VALUE(size <= kMaxSummed && row_bytes % 16 == 0, "part: its rows of ", int64_t{size},
                    " elements are over ", kMaxSummed, ", or no multiple of 16 bytes");
  for (const at::Tensor* t : {&part, plus ? &*plus : nullptr, norm ? &*norm : nullptr, normed ? &*normed : nullptr}) {
    TORCH_CHECK_VALUE(t == nullptr || reinterpret_cast<uintptr_t>(t->const_data_ptr()) % 16 == 0,
                      "part, plus, norm, normed: one does not start at a multiple of 16 bytes");
  }
  TORCH_CHECK_VALUE(ranks <= kMaxRanks, "inboxes: ", ranks, " ranks, the maximum is ", kMaxRanks);
  TORCH_CHECK_VALUE(rank >= 0 && rank < ranks, "rank: is ", rank, " of ", ranks);
  TORCH_CHECK_VALUE(ctas > 0 && ctas <= kSumCtas, "ctas: ", ctas, " are not 1 to ", kSumCtas);
  TORCH_CHECK_VALUE(words_share % 16 == 0 && blocks_share % 16 == 0, "shares: no multiples of 16 bytes");
  const int64_t needed = inbox_bytes(static_cast<int>(ranks), words_share, blocks_share);
  TORCH_CHECK_VALUE(static_cast<int64_t>(inbox.nbytes()) >= needed, "inbox: has ", inbox.nbytes(), " bytes, needs ",
                    needed);
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(inbox.const_data_ptr()) == static_cast<uintptr_t>(inboxes[rank]),
                    "inboxes: that of rank ", rank, " is not inbox");
  const int64_t share = words ? words_share : blocks_share, sent = (rows + ctas - 1) / ctas * row_bytes;
  TORCH_CHECK_VALUE(sent <= share, "part: a CTA would send ", sent, " bytes, the maximum is ", share);
  RankSumArgs args{
      .dtype = model_dtype_of("part", part),
      .part = part.data_ptr(),
      .plus = plus ? plus->data_ptr() : nullptr,
      .norm = norm ? norm->const_data_ptr() : nullptr,
      .normed = normed ? normed->data_ptr() : nullptr,
      .eps = static_cast<float>(eps),
      .rows = rows,
      .size = static_cast<int>(size),
      .ctas = static_cast<int>(ctas),
      .sending = words ? Sending::words : Sending::blocks,
      .words_share = words_share,
      .blocks_share = blocks_share,
      .calls = calls.data_ptr<int>(),
      .rank = static_cast<int>(rank),
      .ranks = static_cast<int>(ranks),
  };
  for (int64_t i = 0; i < ranks; ++i) args.inboxes[i] = reinterpret_cast<void*>(inboxes[i]);
  const c10::cuda::CUDAGuard guard(part.device());
  cuda::rank_sum(args, stream_of(part));
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) { m.impl("rank_sum", rank_sum); }

}  // namespace
}  // namespace quire::cuda::torch_api
