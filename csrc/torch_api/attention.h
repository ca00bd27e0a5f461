// Checks of paged_attention and attention_plan, shared by the bindings of all devices.
#pragma once

#include <optional>
#include <utility>

#include "torch_api/cache.h"
#include "torch_api/checks.h"

namespace quire {

inline void expect_heads(int64_t heads, int64_t kv_heads, int64_t window) {
  TORCH_CHECK_VALUE(kv_heads > 0 && heads % kv_heads == 0, "q: ", heads, " heads are not a multiple of k_cache's ",
                    kv_heads);
  TORCH_CHECK_VALUE(window >= 0, "window: ", window, " is negative");
}

// lens [S] i32, q_start [S + 1] i32.
inline void expect_sequences(const at::Tensor& q_start, const at::Tensor& lens, Size& seqs, const Place& place) {
  Size starts("query offsets");
  expect_plain("lens", lens, {seqs}, at::kInt, place);
  expect_plain("q_start", q_start, {starts}, at::kInt, place);
  TORCH_CHECK_VALUE(starts == seqs + 1, "q_start: has ", int64_t{starts}, " entries for ", int64_t{seqs}, " sequences");
}

struct AttentionSizes {
  Size tokens{"tokens"}, heads{"heads"}, max_rows{"table rows"}, max_blocks{"table columns"}, seqs{"sequences"};
  CacheSizes cache;
  const float* scales = nullptr;
  const float* sinks = nullptr;
};

inline AttentionSizes check_paged_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                                            const at::Tensor& tables, const at::Tensor& rows, const at::Tensor& q_start,
                                            const at::Tensor& lens, const std::optional<at::Tensor>& scales,
                                            const std::optional<at::Tensor>& sinks, int64_t window,
                                            const at::Tensor& out, const Place& place) {
  AttentionSizes sizes;
  for (const auto& [who, t] : {std::pair{"q", q}, {"out", out}}) {
    expect_device(who, t, place);
    expect(who, t, {sizes.tokens, sizes.heads, sizes.cache.head_size});
    expect_last_contiguous(who, t);
    expect_dtype(who, t, q.scalar_type(), "q");
  }
  expect_cache("k_cache", k_cache, sizes.cache, place);
  expect_cache("v_cache", v_cache, sizes.cache, place);
  expect_heads(sizes.heads, sizes.cache.kv_heads, window);
  sizes.scales = expect_scales(k_cache, scales, sizes.cache.kv_heads, place);
  if (sinks) {
    expect_plain("sinks", *sinks, {sizes.heads}, at::kFloat, place);
    sizes.sinks = sinks->const_data_ptr<float>();
  }
  expect_cache_dtypes(k_cache, v_cache, "q", q.scalar_type());
  expect_device("tables", tables, place);
  expect("tables", tables, {sizes.max_rows, sizes.max_blocks});
  expect_last_contiguous("tables", tables);
  expect_dtype("tables", tables, at::kInt);
  expect_plain("rows", rows, {sizes.seqs}, at::kInt, place);
  expect_sequences(q_start, lens, sizes.seqs, place);
  return sizes;
}

}  // namespace quire
