// Bindings of the operators that move keys and values, on a GPU.

#include "cuda/cache/cache.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <cstring>
#include <optional>

#include "torch_api/cache.h"
#include "torch_api/cuda/convert.h"

namespace quire::cuda::torch_api {
namespace {

TokenRows rows_of(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1)}; }

void kv_write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache, const at::Tensor& v_cache,
              const at::Tensor& kv_indices, const std::optional<at::Tensor>& scales) {
  const KvWriteSizes sizes = check_kv_write(key, value, k_cache, v_cache, kv_indices, scales, on_gpu(key));
  const KvWriteArgs args{
      .dtype = model_dtype_of("key", key),
      .stored = dtype_of("k_cache", k_cache),
      .key = rows_of(key),
      .value = rows_of(value),
      .to = kv_target_of(k_cache, v_cache, sizes.cache.block_size, kv_indices, sizes.scales),
      .tokens = sizes.tokens,
      .kv_heads = static_cast<int>(sizes.cache.kv_heads),
      .size = static_cast<int>(sizes.cache.head_size),
  };
  const c10::cuda::CUDAGuard guard(key.device());
  cuda::kv_write(args, stream_of(key));
}

// Makes the kernels' arguments.  Checks that all caches have one stride between blocks.  `like`: a tensor on their device.
BlockArgs blocks_of(at::TensorList caches, const at::Tensor& like, int64_t count) {
  const BlockSizes sizes = check_caches(caches, on_gpu(like));
  Size stride("stride of blocks");
  BlockArgs args{.count = count};
  args.caches.reserve(caches.size());
  for (const at::Tensor& cache : caches) {
    stride.agree("caches", cache.stride(0));
    args.caches.push_back(static_cast<char*>(cache.data_ptr()));
    args.block_stride = stride * cache.element_size();
    args.block_bytes = sizes.block_bytes;
  }
  return args;
}

void block_copy(at::TensorList caches, const at::Tensor& pairs) {
  const BlockArgs args = blocks_of(caches, pairs, check_pairs(pairs, on_gpu(pairs)));
  const c10::cuda::CUDAGuard guard(pairs.device());
  cuda::block_copy(args, pairs.const_data_ptr<int64_t>(), stream_of(pairs));
}

void block_fill(at::TensorList caches, const at::Tensor& blocks, double value) {
  const BlockArgs args = blocks_of(caches, blocks, check_blocks(blocks, on_gpu(blocks)));
  if (args.caches.empty()) return;
  const at::Tensor element = at::scalar_tensor(value, caches[0].options().device(at::kCPU));
  uint32_t bits = 0;
  std::memcpy(&bits, element.const_data_ptr(), element.element_size());
  const c10::cuda::CUDAGuard guard(blocks.device());
  cuda::block_fill(args, blocks.const_data_ptr<int64_t>(), bits, static_cast<int>(element.element_size()),
                   stream_of(blocks));
}

// Shared checks of block_gather and block_scatter.
BlockArgs blocks_and_buffer(at::TensorList caches, const at::Tensor& blocks, const at::Tensor& buffer) {
  const BlockArgs args = blocks_of(caches, blocks, check_blocks(blocks, on_gpu(blocks)));
  check_blocks_and_buffer(blocks, buffer, caches.size(), args.block_bytes, on_gpu(blocks));
  return args;
}

void block_gather(at::TensorList caches, const at::Tensor& blocks, const at::Tensor& buffer) {
  const BlockArgs args = blocks_and_buffer(caches, blocks, buffer);
  const c10::cuda::CUDAGuard guard(blocks.device());
  cuda::block_gather(args, blocks.const_data_ptr<int64_t>(), static_cast<char*>(buffer.data_ptr()), stream_of(blocks));
}

void block_scatter(const at::Tensor& buffer, const at::Tensor& blocks, at::TensorList caches) {
  const BlockArgs args = blocks_and_buffer(caches, blocks, buffer);
  const c10::cuda::CUDAGuard guard(blocks.device());
  cuda::block_scatter(args, blocks.const_data_ptr<int64_t>(), static_cast<const char*>(buffer.const_data_ptr()),
                      stream_of(blocks));
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("kv_write", kv_write);
  m.impl("block_copy", block_copy);
  m.impl("block_fill", block_fill);
  m.impl("block_gather", block_gather);
  m.impl("block_scatter", block_scatter);
}

}  // namespace
}  // namespace quire::cuda::torch_api
