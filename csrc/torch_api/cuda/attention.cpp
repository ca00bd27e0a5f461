// The GPU's door to attention: tensors come in, are checked, and leave as pointers.  What only the device knows (lengths,
// tables, rows) cannot be checked without waiting for it, and is not.

#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "cuda/attention/decode.h"
#include "cuda/attention/prefill.h"
#include "torch_api/cuda/convert.h"

namespace quire::cuda::door {

namespace {

// Rows are read 16 bytes at a time.
void expect_aligned(const char* who, const at::Tensor& t) {
  bool aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) aligned &= t.size(i) <= 1 || t.stride(i) * t.element_size() % 16 == 0;
  TORCH_CHECK_VALUE(aligned, who, ": rows do not begin at multiples of 16 bytes");
}

void expect_sizes(int64_t heads, int64_t kv_heads, int64_t head_size, int64_t window) {
  TORCH_CHECK_VALUE(kv_heads > 0 && heads % kv_heads == 0, "q: ", heads, " heads are not a multiple of k_cache's ",
                    kv_heads);
  constexpr std::array kHeadSizes{64, 80, 96, 128, 256};
  TORCH_CHECK_VALUE(std::find(kHeadSizes.begin(), kHeadSizes.end(), head_size) != kHeadSizes.end(), "q: head size ",
                    head_size, " is not 64, 80, 96, 128 or 256");
  TORCH_CHECK_VALUE(window >= 0, "window: ", window, " is negative");
}

// The plan of the decodes comes first, that of the rest behind it.
struct PlanParts {
  int64_t decode_bytes, prefill_bytes;
  char *decode, *prefill;
};

// Each part can be found by knowing only the sizes of the model, not for how many sequences the plan was made: the part of
// the decodes takes as many bytes as it takes for the most sequences it can hold.
PlanParts parts_of(const at::Tensor& plan, int64_t heads, int64_t kv_heads, int64_t head_size) {
  const int64_t decode_bytes =
      decode_plan_bytes(kDecodeMaxSeqs, static_cast<int>(heads), static_cast<int>(kv_heads), static_cast<int>(head_size));
  char* bytes = static_cast<char*>(plan.data_ptr());
  TORCH_CHECK_VALUE(plan.numel() >= decode_bytes, "plan: has ", plan.numel(), " bytes, attention_plan_bytes said more");
  return {decode_bytes, plan.numel() - decode_bytes, bytes, bytes + decode_bytes};
}

void expect_plan(const at::Tensor& plan, const at::Tensor& like) {
  Size bytes("bytes");
  expect_cuda("plan", plan, like);
  expect("plan", plan, {bytes});
  expect_contiguous("plan", plan);
  expect_dtype("plan", plan, at::kByte);
  expect_aligned("plan", plan);
}

void expect_decodes(int64_t decodes, int64_t seqs) {
  TORCH_CHECK_VALUE(decodes >= 0 && decodes <= seqs, "decodes: ", decodes, " of ", seqs, " sequences");
  TORCH_CHECK_VALUE(decodes <= kDecodeMaxSeqs, "decodes: ", decodes, ", at most ", kDecodeMaxSeqs);
}

}  // namespace

void paged_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                     const at::Tensor& tables, const at::Tensor& rows, const at::Tensor& q_start,
                     const at::Tensor& lens, const std::optional<at::Tensor>& scales, int64_t decodes,
                     const at::Tensor& plan, double scale, int64_t window, double soft_cap, const at::Tensor& out) {
  Size tokens("tokens"), heads("heads"), kv_heads("KV heads"), dim("head size"), blocks("blocks"),
      block_size("block size"), max_rows("table rows"), max_blocks("table columns"), seqs("sequences"),
      starts("query offsets"), two("keys and values");
  expect("q", q, {tokens, heads, dim});
  expect("out", out, {tokens, heads, dim});
  expect_cache("k_cache", k_cache, blocks, kv_heads, block_size, dim, q);
  expect_cache("v_cache", v_cache, blocks, kv_heads, block_size, dim, q);
  expect("tables", tables, {max_rows, max_blocks});
  expect("rows", rows, {seqs});
  expect("lens", lens, {seqs});
  expect("q_start", q_start, {starts});
  TORCH_CHECK_VALUE(starts == seqs + 1, "q_start: has ", int64_t{starts}, " entries for ", int64_t{seqs}, " sequences");
  expect_sizes(heads, kv_heads, dim, window);
  TORCH_CHECK_VALUE(block_size == 8 || block_size == 16 || block_size == 32 || block_size == 64,
                    "k_cache: block size ", int64_t{block_size}, " is not 8, 16, 32 or 64");
  TORCH_CHECK_VALUE(q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf, "q: dtype is ", q.scalar_type(),
                    ", attention on a GPU wants bfloat16 or float16");
  expect_dtype("out", out, q.scalar_type(), "q");
  if (scales) {
    two.agree("caches", 2);
    expect_cuda("scales", *scales, q);
    expect("scales", *scales, {two, kv_heads});
    expect_contiguous("scales", *scales);
    expect_dtype("scales", *scales, at::kFloat);
    expect_dtype("k_cache", k_cache, at::kFloat8_e4m3fn, "scales");
  } else {
    expect_dtype("k_cache", k_cache, q.scalar_type(), "q");
  }
  expect_dtype("v_cache", v_cache, k_cache.scalar_type(), "k_cache");
  for (const auto& [who, t] : {std::pair{"q", q}, {"out", out}, {"tables", tables}}) {
    expect_cuda(who, t, q);
    expect_last_contiguous(who, t);
  }
  for (const auto& [who, t] : {std::pair{"q", q}, {"out", out}, {"k_cache", k_cache}, {"v_cache", v_cache}}) {
    expect_aligned(who, t);
  }
  for (const auto& [who, t] : {std::pair{"rows", rows}, {"q_start", q_start}, {"lens", lens}}) {
    expect_cuda(who, t, q);
    expect_contiguous(who, t);
    expect_dtype(who, t, at::kInt);
  }
  expect_dtype("tables", tables, at::kInt);
  expect_plan(plan, q);
  expect_decodes(decodes, seqs);
  if (seqs == 0 || tokens == 0) return;

  const c10::cuda::CUDAGuard guard(q.device());
  const cudaStream_t stream = stream_of(q);
  const PlanParts parts = parts_of(plan, heads, kv_heads, dim);
  const auto narrow = [](int64_t size) { return static_cast<int>(size); };
  const float* scale_numbers = scales ? scales->const_data_ptr<float>() : nullptr;
  if (decodes > 0) {
    decode(
        {
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
            .scales = scale_numbers,
            .tables = tables.const_data_ptr<int32_t>(),
            .table_stride = tables.stride(0),
            .rows = rows.const_data_ptr<int32_t>(),
            .seqs = narrow(decodes),
            .heads = narrow(heads),
            .kv_heads = narrow(kv_heads),
            .head_size = narrow(dim),
            .block_size = narrow(block_size),
            .scale = static_cast<float>(scale),
            .soft_cap = static_cast<float>(soft_cap),
            .dtype = dtype_of("q", q),
            .cache_dtype = dtype_of("k_cache", k_cache),
            .plan = parts.decode,
        },
        stream);
  }
  if (decodes == seqs) return;
  const PrefillArgs chunks{
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
      .blocks = blocks,
      .scales = scale_numbers,
      .tables = tables.const_data_ptr<int32_t>(),
      .table_stride = tables.stride(0),
      .rows = rows.const_data_ptr<int32_t>(),
      .q_start = q_start.const_data_ptr<int32_t>(),
      .lens = lens.const_data_ptr<int32_t>(),
      .first = narrow(decodes),
      .seqs = narrow(seqs),
      .tokens = narrow(tokens),
      .heads = narrow(heads),
      .kv_heads = narrow(kv_heads),
      .head_size = narrow(dim),
      .block_size = narrow(block_size),
      .scale = static_cast<float>(scale),
      .window = narrow(window),
      .soft_cap = static_cast<float>(soft_cap),
      .dtype = dtype_of("q", q),
      .cache_dtype = dtype_of("k_cache", k_cache),
      .plan = parts.prefill,
      .plan_bytes = parts.prefill_bytes,
  };
  prefill(chunks, stream);
}

void attention_plan(const at::Tensor& q_start, const at::Tensor& lens, int64_t decodes, int64_t heads, int64_t kv_heads,
                    int64_t head_size, int64_t window, const at::Tensor& plan) {
  Size seqs("sequences"), starts("query offsets");
  for (const auto& [who, t, size] :
       {std::tuple<const char*, const at::Tensor&, Size&>{"lens", lens, seqs}, {"q_start", q_start, starts}}) {
    expect_cuda(who, t, lens);
    expect(who, t, {size});
    expect_contiguous(who, t);
    expect_dtype(who, t, at::kInt);
  }
  TORCH_CHECK_VALUE(starts == seqs + 1, "q_start: has ", int64_t{starts}, " entries for ", int64_t{seqs}, " sequences");
  expect_sizes(heads, kv_heads, head_size, window);
  expect_plan(plan, lens);
  expect_decodes(decodes, seqs);

  const c10::cuda::CUDAGuard guard(lens.device());
  const cudaStream_t stream = stream_of(lens);
  const PlanParts parts = parts_of(plan, heads, kv_heads, head_size);
  const auto narrow = [](int64_t size) { return static_cast<int>(size); };
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
  const auto narrow = [](int64_t size) { return static_cast<int>(size); };
  expect_sizes(heads, kv_heads, head_size, 0);
  return decode_plan_bytes(kDecodeMaxSeqs, narrow(heads), narrow(kv_heads), narrow(head_size)) +
         prefill_plan_bytes(narrow(max_seqs), narrow(max_tokens), narrow(heads), narrow(kv_heads), narrow(head_size));
}

}  // namespace quire::cuda::door

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("paged_attention", quire::cuda::door::paged_attention);
  m.impl("attention_plan", quire::cuda::door::attention_plan);
  m.impl("attention_plan_bytes", quire::cuda::door::attention_plan_bytes);
}
