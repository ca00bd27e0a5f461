// Bindings of attention on a CPU.

#include "cpu/attention.h"

#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "torch_api/attention.h"
#include "torch_api/cpu/bindings.h"
#include "torch_api/cpu/convert.h"

namespace quire::cpu::torch_api {
namespace {

// Checks every index that the kernel will read.  That is cheap: one comparison per block of several kilobytes.
void expect_indices(const AttentionArgs& a, int64_t tokens, int64_t max_rows, int64_t max_blocks, int64_t blocks) {
  TORCH_CHECK_VALUE(a.q_start[0] == 0 && a.q_start[a.seqs] == tokens, "q_start: runs from ", a.q_start[0], " to ",
                    a.q_start[a.seqs], ", q has ", tokens, " tokens");
  for (int64_t s = 0; s < a.seqs; ++s) {
    const int64_t queries = a.q_start[s + 1] - a.q_start[s];
    TORCH_CHECK_VALUE(queries >= 0, "q_start: falls after sequence ", s);
    if (a.lens[s] == 0) continue;
    TORCH_CHECK_VALUE(a.lens[s] >= queries, "lens[", s, "] is ", a.lens[s], ", less than its ", queries, " queries");
    TORCH_CHECK_VALUE(a.lens[s] <= max_blocks * a.block_size, "lens[", s, "] is ", a.lens[s], ", tables hold ",
                      max_blocks, " blocks of ", a.block_size);
    TORCH_CHECK_INDEX(a.rows[s] >= 0 && a.rows[s] < max_rows, "rows[", s, "] is ", a.rows[s], ", tables have ",
                      max_rows, " rows");
    if (queries == 0) continue;
    const int32_t* table = a.tables + a.rows[s] * a.table_stride;
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, a.lens[s] - queries + 1 - a.window) : 0;
    for (int64_t i = first / a.block_size; i * a.block_size < a.lens[s]; ++i) {
      TORCH_CHECK_INDEX(table[i] >= 0 && table[i] < blocks, "tables[", a.rows[s], ", ", i, "] is ", table[i],
                        ", the cache has ", blocks, " blocks");
    }
  }
}

}  // namespace

void paged_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                     const at::Tensor& tables, const at::Tensor& rows, const at::Tensor& q_start,
                     const at::Tensor& lens, const std::optional<at::Tensor>& scales,
                     const std::optional<at::Tensor>& sinks, int64_t /*decodes*/, const at::Tensor& /*plan*/,
                     double scale, int64_t window, double soft_cap, const at::Tensor& out) {
  AttentionSizes sizes =
      check_paged_attention(q, k_cache, v_cache, tables, rows, q_start, lens, scales, sinks, window, out, on_cpu());
  const int64_t head_size = sizes.cache.head_size;
  TORCH_CHECK_VALUE(head_size > 0 && head_size <= kMaxHeadSize, "q: head size ", head_size, " is over ", kMaxHeadSize);
  const AttentionArgs args{
      .q = q.const_data_ptr(),
      .out = out.data_ptr(),
      .q_token_stride = q.stride(0),
      .q_head_stride = q.stride(1),
      .out_token_stride = out.stride(0),
      .out_head_stride = out.stride(1),
      .k_cache = k_cache.const_data_ptr(),
      .v_cache = v_cache.const_data_ptr(),
      .k_block_stride = k_cache.stride(0),
      .v_block_stride = v_cache.stride(0),
      .scales = sizes.scales,
      .sinks = sizes.sinks,
      .tables = tables.const_data_ptr<int32_t>(),
      .table_stride = tables.stride(0),
      .rows = rows.const_data_ptr<int32_t>(),
      .q_start = q_start.const_data_ptr<int32_t>(),
      .lens = lens.const_data_ptr<int32_t>(),
      .seqs = sizes.seqs,
      .heads = sizes.heads,
      .kv_heads = sizes.cache.kv_heads,
      .head_size = head_size,
      .block_size = sizes.cache.block_size,
      .scale = static_cast<float>(scale),
      .window = window,
      .soft_cap = static_cast<float>(soft_cap),
      .threads = threads(),
  };
  expect_indices(args, sizes.tokens, sizes.max_rows, sizes.max_blocks, sizes.cache.blocks);
  by_dtype("q", q, [&](auto type) {
    using T = decltype(type);
    sizes.scales ? cpu::paged_attention<T, e4m3>(args) : cpu::paged_attention<T, T>(args);
  });
}

namespace {

// A CPU needs no plan: its threads take work by ticket.
void attention_plan(const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t, int64_t, int64_t,
                    const at::Tensor&) {}

int64_t attention_plan_bytes(const at::Tensor&, int64_t, int64_t, int64_t, int64_t, int64_t) { return 0; }

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("paged_attention", paged_attention);
  m.impl("attention_plan", attention_plan);
  m.impl("attention_plan_bytes", attention_plan_bytes);
}

}  // namespace
}  // namespace quire::cpu::torch_api
