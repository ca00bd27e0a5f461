// The GPU's door to moving keys and values: tensors come in, are checked, and leave as pointers.  What lies on the
// device (slots, pairs, blocks) cannot be looked at without waiting for it, so the caller answers for its range.

#include "cuda/cache/cache.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <utility>

#include "torch_api/cuda/convert.h"
#include "torch_api/cuda/slots.h"

namespace quire::cuda::door {

TokenRows rows_of(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1)}; }

void kv_write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache, const at::Tensor& v_cache,
              const at::Tensor& slots, const std::optional<at::Tensor>& scales) {
  Size tokens("tokens"), kv_heads("KV heads"), dim("head size");
  const KvSlots to = slots_of(key, k_cache, v_cache, slots, scales, tokens, kv_heads, dim);
  for (const auto& [who, t] : {std::pair{"key", key}, {"value", value}}) {
    expect_cuda(who, t, key);
    expect(who, t, {tokens, kv_heads, dim});
    expect_last_contiguous(who, t);
    expect_dtype(who, t, key.scalar_type(), "key");
  }
  const KvWriteArgs args{
      .dtype = model_dtype_of("key", key),
      .stored = dtype_of("k_cache", k_cache),
      .key = rows_of(key),
      .value = rows_of(value),
      .to = to,
      .tokens = tokens,
      .kv_heads = static_cast<int>(kv_heads),
      .size = static_cast<int>(dim),
  };
  const c10::cuda::CUDAGuard guard(key.device());
  cuda::kv_write(args, stream_of(key));
}

// All caches have blocks of one size, at one stride.  `like` is on their device.
BlockArgs blocks_of(at::TensorList caches, const at::Tensor& like, int64_t count) {
  Size blocks("blocks"), kv_heads("KV heads"), block_size("block size"), dim("head size"), stride("stride of blocks");
  BlockArgs args{.count = count};
  args.caches.reserve(caches.size());
  for (const at::Tensor& cache : caches) {
    expect_cache("caches", cache, blocks, kv_heads, block_size, dim, like);
    expect_dtype("caches", cache, caches[0].scalar_type(), "the first");
    stride.agree("caches", cache.stride(0));
    args.caches.push_back(static_cast<char*>(cache.data_ptr()));
    args.block_stride = stride * cache.element_size();
    args.block_bytes = kv_heads * block_size * dim * cache.element_size();
  }
  return args;
}

void block_copy(at::TensorList caches, const at::Tensor& pairs) {
  Size count("pairs"), two("columns");
  two.agree("a pair", 2);
  expect_cuda("pairs", pairs, pairs);
  expect("pairs", pairs, {count, two});
  expect_contiguous("pairs", pairs);
  expect_dtype("pairs", pairs, at::kLong);
  const BlockArgs args = blocks_of(caches, pairs, count);
  const c10::cuda::CUDAGuard guard(pairs.device());
  cuda::block_copy(args, pairs.const_data_ptr<int64_t>(), stream_of(pairs));
}

void block_fill(at::TensorList caches, const at::Tensor& blocks, double value) {
  Size count("blocks");
  expect_vector("blocks", blocks, count, at::kLong, blocks);
  const BlockArgs args = blocks_of(caches, blocks, count);
  if (args.caches.empty()) return;
  const at::Tensor element = at::scalar_tensor(value, caches[0].options().device(at::kCPU));
  uint32_t bits = 0;
  std::memcpy(&bits, element.const_data_ptr(), element.element_size());
  const c10::cuda::CUDAGuard guard(blocks.device());
  cuda::block_fill(args, blocks.const_data_ptr<int64_t>(), bits, static_cast<int>(element.element_size()),
                   stream_of(blocks));
}

// What block_gather and block_scatter check alike.
BlockArgs blocks_and_buffer(at::TensorList caches, const at::Tensor& blocks, const at::Tensor& buffer) {
  Size count("blocks"), width("caches"), bytes("bytes of a block");
  expect_vector("blocks", blocks, count, at::kLong, blocks);
  const BlockArgs args = blocks_of(caches, blocks, count);
  width.agree("caches", static_cast<int64_t>(args.caches.size()));
  bytes.agree("caches", args.block_bytes);
  expect_cuda("buffer", buffer, blocks);
  expect("buffer", buffer, {count, width, bytes});
  expect_contiguous("buffer", buffer);
  expect_dtype("buffer", buffer, at::kByte);
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

}  // namespace quire::cuda::door

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("kv_write", quire::cuda::door::kv_write);
  m.impl("block_copy", quire::cuda::door::block_copy);
  m.impl("block_fill", quire::cuda::door::block_fill);
  m.impl("block_gather", quire::cuda::door::block_gather);
  m.impl("block_scatter", quire::cuda::door::block_scatter);
}
