// Bindings of attention on a GPU.

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "cuda/attention/decode.h"
#include "cuda/attention/prefill.h"
#include "torch_api/attention.h"
#include "torch_api/cuda/convert.h"

namespace quire::cuda::torch_api {

namespace {

// Kernels load 16 bytes at a time.
void expect_aligned(const char* who, const at::Tensor& t) {
  bool aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) aligned &= t.size(i) <= 1 || t.stride(i) * t.element_size() % 16 == 0;
  TORCH_CHECK_VALUE(aligned, who, ": rows do not begin at multiples of 16 bytes");
}

void expect_head_size(int64_t head_size) {
  constexpr std::array kHeadSizes{64, 80, 96, 128, 192, 256};
  TORCH_CHECK_VALUE(std::find(kHeadSizes.begin(), kHeadSizes.end(), head_size) != kHeadSizes.end(), "q: head size ",
                    head_size, " is not 64, 80, 96, 128, 192 or 256");
}

int narrow(int64_t size) { return static_cast<int>(size); }

// The plan's memory: first the plan of the decoding sequences, then the plan of the prompt chunks.
struct PlanParts {
  int64_t decode_bytes, prefill_bytes;
  char *decode, *prefill;
};

// The model's sizes determine where the second part begins, because the first always has its maximum size.
PlanParts parts_of(const at::Tensor& plan, int64_t heads, int64_t kv_heads, int64_t head_size) {
  const int64_t decode_bytes = decode_plan_bytes(kDecodeMaxSeqs, static_cast<int>(heads), static_cast<int>(kv_heads),
                                                 static_cast<int>(head_size));
  char* bytes = static_cast<char*>(plan.data_ptr());
  TORCH_CHECK_VALUE(plan.numel() >= decode_bytes, "plan: has ", plan.numel(),
                    " bytes, attention_plan_bytes gives more");
  return {decode_bytes, plan.numel() - decode_bytes, bytes, bytes + decode_bytes};
}

void expect_plan(const at::Tensor& plan, const Place& place) {
  Size bytes("bytes");
  expect_plain("plan", plan, {bytes}, at::kByte, place);
  expect_aligned("plan", plan);
}

void expect_decodes(int64_t decodes, int64_t seqs) {
  TORCH_CHECK_VALUE(decodes >= 0 && decodes <= seqs, "decodes: ", decodes, " of ", seqs, " sequences");
  TORCH_CHECK_VALUE(decodes <= kDecodeMaxSeqs, "decodes: ", decodes, ", at most ", kDecodeMaxSeqs);
}

// Arguments shared by decodes and prompt chunks.
template <class Args>
Args common_args(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& tables,
                 const at::Tensor& rows, const AttentionSizes& sizes, double scale, double soft_cap,
                 const at::Tensor& out) {
  Args args{};
  args.q = q.const_data_ptr();
  args.out = out.data_ptr();
  args.q_token_stride = q.stride(0);
  args.q_head_stride = q.stride(1);
  args.out_token_stride = out.stride(0);
  args.out_head_stride = out.stride(1);
  args.k_cache = k_cache.const_data_ptr();
  args.v_cache = v_cache.const_data_ptr();
  args.k_block_stride = k_cache.stride(0);
  args.v_block_stride = v_cache.stride(0);
  args.scales = sizes.scales;
  args.sinks = sizes.sinks;
  args.tables = tables.const_data_ptr<int32_t>();
  args.table_stride = tables.stride(0);
  args.rows = rows.const_data_ptr<int32_t>();
  args.heads = narrow(sizes.heads);
  args.kv_heads = narrow(sizes.cache.kv_heads);
  args.head_size = narrow(sizes.cache.head_size);
  args.block_size = narrow(sizes.cache.block_size);
  args.scale = static_cast<float>(scale);
  args.soft_cap = static_cast<float>(soft_cap);
  args.dtype = dtype_of("q", q);
  args.cache_dtype = dtype_of("k_cache", k_cache);
  return args;
}

void paged_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                     const at::Tensor& tables, const at::Tensor& rows, const at::Tensor& q_start,
                     const at::Tensor& lens, const std::optional<at::Tensor>& scales,
                     const std::optional<at::Tensor>& sinks, int64_t decodes, const at::Tensor& plan, double scale,
                     int64_t window, double soft_cap, const at::Tensor& out) {
  const AttentionSizes sizes =
      check_paged_attention(q, k_cache, v_cache, tables, rows, q_start, lens, scales, sinks, window, out, on_gpu(q));
  const int64_t block_size = sizes.cache.block_size, seqs = sizes.seqs;
  expect_head_size(sizes.cache.head_size);
  TORCH_CHECK_VALUE(block_size == 8 || block_size == 16 || block_size == 32 || block_size == 64, "k_cache: block size ",
                    block_size, " is not 8, 16, 32 or 64");
  TORCH_CHECK_VALUE(q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf, "q: dtype is ", q.scalar_type(),
                    ", attention on a GPU needs bfloat16 or float16");
  for (const auto& [who, t] : {std::pair{"q", q}, {"out", out}, {"k_cache", k_cache}, {"v_cache", v_cache}}) {
    expect_aligned(who, t);
  }
  expect_plan(plan, on_gpu(q));
  expect_decodes(decodes, seqs);
  if (seqs == 0 || sizes.tokens == 0) return;

  const c10::cuda::CUDAGuard guard(q.device());
  const cudaStream_t stream = stream_of(q);
  const PlanParts parts = parts_of(plan, sizes.heads, sizes.cache.kv_heads, sizes.cache.head_size);
  if (decodes > 0) {
    auto args = common_args<DecodeArgs>(q, k_cache, v_cache, tables, rows, sizes, scale, soft_cap, out);
    args.seqs = narrow(decodes);
    args.plan = parts.decode;
    decode(args, stream);
  }
  if (decodes == seqs) return;
  auto args = common_args<PrefillArgs>(q, k_cache, v_cache, tables, rows, sizes, scale, soft_cap, out);
  args.blocks = sizes.cache.blocks;
  args.q_start = q_start.const_data_ptr<int32_t>();
  args.lens = lens.const_data_ptr<int32_t>();
  args.first = narrow(decodes);
  args.seqs = narrow(seqs);
  args.tokens = narrow(sizes.tokens);
  args.window = narrow(window);
  args.plan = parts.prefill;
  args.plan_bytes = parts.prefill_bytes;
  prefill(args, stream);
}

void attention_plan(const at::Tensor& q_start, const at::Tensor& lens, int64_t decodes, int64_t heads, int64_t kv_heads,
                    int64_t head_size, int64_t window, const at::Tensor& plan) {
  Size seqs("sequences");
  expect_sequences(q_start, lens, seqs, on_gpu(lens));
  expect_heads(heads, kv_heads, window);
  expect_head_size(head_size);
  expect_plan(plan, on_gpu(lens));
  expect_decodes(decodes, seqs);

  const c10::cuda::CUDAGuard guard(lens.device());
  const cudaStream_t stream = stream_of(lens);
  const PlanParts parts = parts_of(plan, heads, kv_heads, head_size);
  if (decodes > 0) {
    decode_plan({.q_start = q_start.const_data_ptr<int32_t>(),
                 .lens = lens.const_data_ptr<int32_t>(),
                 .seqs = narrow(decodes),
                 .heads = narrow(heads),
                 .kv_heads = narrow(kv_heads),
                 .head_size = narrow(head_size),
                 .window = narrow(window),
                 .plan = parts.decode},
                stream);
  }
  if (decodes == seqs) return;
  prefill_plan({.q_start = q_start.const_data_ptr<int32_t>(),
                .lens = lens.const_data_ptr<int32_t>(),
                .first = narrow(decodes),
                .seqs = narrow(seqs),
                .heads = narrow(heads),
                .kv_heads = narrow(kv_heads),
                .head_size = narrow(head_size),
                .window = narrow(window),
                .plan = parts.prefill,
                .plan_bytes = parts.prefill_bytes},
               stream);
}

int64_t attention_plan_bytes(const at::Tensor& like, int64_t max_seqs, int64_t max_tokens, int64_t heads,
                             int64_t kv_heads, int64_t head_size) {
  const c10::cuda::CUDAGuard guard(like.device());
  expect_heads(heads, kv_heads, 0);
  expect_head_size(head_size);
  return decode_plan_bytes(kDecodeMaxSeqs, narrow(heads), narrow(kv_heads), narrow(head_size)) +
         prefill_plan_bytes(narrow(max_seqs), narrow(max_tokens), narrow(heads), narrow(kv_heads), narrow(head_size));
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("paged_attention", paged_attention);
  m.impl("attention_plan", attention_plan);
  m.impl("attention_plan_bytes", attention_plan_bytes);
}

}  // namespace
}  // namespace quire::cuda::torch_api
