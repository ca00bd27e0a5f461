// Launcher of prefill_sm90.cuh: makes the TMA descriptors of q and the caches and picks the kernel.

#include "cuda/attention/prefill_sm90.h"

#include <cudaTypedefs.h>

#include "cuda/common/launch.cuh"

namespace quire::cuda {

namespace {

// The driver's function that encodes TMA descriptors, looked up at run time, so that the extension does not link
// libcuda.
PFN_cuTensorMapEncodeTiled_v12000 encode_tiled() {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &status),
          "cuTensorMapEncodeTiled");
    if (status != cudaDriverEntryPointSuccess)
      throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return encode;
}

// TMA descriptor of a 4-dimensional tensor of 16-bit elements.  sizes: innermost dimension first.  strides: in
// elements, from the second dimension on.  Boxes are 64 columns wide and swizzled; TMA fills zeros outside of the
// tensor.
CUtensorMap describe(const void* data, Dtype dtype, const cuuint64_t (&sizes)[4], const int64_t (&strides)[3],
                     cuuint32_t box1, cuuint32_t box3) {
  CUtensorMap map;
  const cuuint64_t bytes[] = {strides[0] * 2ull, strides[1] * 2ull, strides[2] * 2ull};
  const cuuint32_t box[] = {64, box1, 1, box3}, steps[] = {1, 1, 1, 1};
  const CUresult result =
      encode_tiled()(&map, dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                     const_cast<void*>(data), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled failed with " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace

bool prefill_sm90_takes(const PrefillArgs& a) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 && (a.head_size == 64 || a.head_size == 128) &&
         a.cache_dtype == a.dtype && a.heads / a.kv_heads <= sm90::kRows;
}

void prefill_sm90(const PrefillArgs& a, cudaStream_t stream) {
  if (a.first >= a.seqs || a.tokens == 0) return;
  const cuuint64_t size = a.head_size, kv_heads = a.kv_heads, group = a.heads / a.kv_heads, block_size = a.block_size;
  const PrefillPlan plan = prefill_plan_layout(a.plan, a.plan_bytes, a.head_size);
  constexpr float kLog2E = 1.4426950408889634f;
  sm90::Params params{
      .q = describe(a.q, a.dtype, {size, group, kv_heads, static_cast<cuuint64_t>(a.tokens)},
                    {a.q_head_stride, a.q_head_stride * static_cast<int64_t>(group), a.q_token_stride},
                    static_cast<cuuint32_t>(group), static_cast<cuuint32_t>(sm90::kRows / group)),
      .out = a.out,
      .out_token_stride = a.out_token_stride,
      .out_head_stride = a.out_head_stride,
      .tables = a.tables,
      .table_stride = a.table_stride,
      .rows = a.rows,
      .q_start = a.q_start,
      .lens = a.lens,
      .group = static_cast<int>(group),
      .tile_queries = static_cast<int>(sm90::kRows / group),
      .block_size = a.block_size,
      .window = a.window,
      .scale_log2 = (a.soft_cap > 0 ? a.soft_cap : a.scale) * kLog2E,
      .sinks = a.sinks,
      .cap_in = a.soft_cap > 0 ? a.scale / a.soft_cap : 0.f,
      .list = plan.list[kPrefillHopper],
      .items = plan.items[kPrefillHopper],
      .arrived = plan.arrived,
      .max = plan.max,
      .sum = plan.sum,
      .acc = plan.acc,
  };
  const auto describe_cache = [&](const void* cache, int64_t block_stride) {
    const auto head = static_cast<int64_t>(block_size * size);
    return describe(cache, a.dtype, {size, block_size, kv_heads, static_cast<cuuint64_t>(a.blocks)},
                    {a.head_size, head, block_stride}, static_cast<cuuint32_t>(block_size), 1);
  };
  params.slack = 8 / params.scale_log2;
  params.k = describe_cache(a.k_cache, a.k_block_stride);
  params.v = describe_cache(a.v_cache, a.v_block_stride);
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount);
  const bool bf16 = a.dtype == Dtype::bf16;
  switch (a.head_size) {
    case 64: return (bf16 ? sm90::run<__nv_bfloat16, 64> : sm90::run<__half, 64>)(params, sms, stream);
    case 128: return (bf16 ? sm90::run<__nv_bfloat16, 128> : sm90::run<__half, 128>)(params, sms, stream);
  }
}

}  // namespace quire::cuda
