// Checks of KV caches and of the operators that move keys and values, shared by the bindings of all devices.
#pragma once

#include <optional>
#include <utility>

#include "torch_api/checks.h"

namespace quire {

struct CacheSizes {
  Size blocks{"blocks"}, kv_heads{"KV heads"}, block_size{"block size"}, head_size{"head size"};
};

// cache [blocks, Hkv, block_size, D]: contiguous inside a block; the stride between blocks is free.
inline void expect_cache(const char* who, const at::Tensor& cache, CacheSizes& sizes, const Place& place) {
  expect_device(who, cache, place);
  expect(who, cache, {sizes.blocks, sizes.kv_heads, sizes.block_size, sizes.head_size});
  const int64_t head = sizes.block_size * sizes.head_size;
  const auto has_stride = [&](int64_t dim, int64_t stride) {
    return cache.size(dim) == 1 || cache.stride(dim) == stride;
  };
  TORCH_CHECK_VALUE(cache.numel() == 0 || (has_stride(3, 1) && has_stride(2, sizes.head_size) && has_stride(1, head)),
                    who, ": blocks are not contiguous");
}

// Returns the scales [2, Hkv] f32 of an e4m3 cache, for keys and for values, and null for other caches.  Raises
// ValueError if an e4m3 cache has no scales, or another cache has some.
inline const float* expect_scales(const at::Tensor& k_cache, const std::optional<at::Tensor>& scales, Size& kv_heads,
                                  const Place& place) {
  const bool e4m3 = k_cache.scalar_type() == at::kFloat8_e4m3fn;
  TORCH_CHECK_VALUE(scales.has_value() == e4m3, "scales: ", scales ? "given" : "missing", " for a cache of ",
                    k_cache.scalar_type());
  if (!scales) return nullptr;
  Size two("rows, for keys and values,");
  two.agree("a cache", 2);
  expect_plain("scales", *scales, {two, kv_heads}, at::kFloat, place);
  return scales->const_data_ptr<float>();
}

// Checks that both caches have the dtype of the tensor `like`, or e4m3.
inline void expect_cache_dtypes(const at::Tensor& k_cache, const at::Tensor& v_cache, const char* like,
                                at::ScalarType dtype) {
  const bool e4m3 = k_cache.scalar_type() == at::kFloat8_e4m3fn;
  if (!e4m3) expect_dtype("k_cache", k_cache, dtype, like);
  expect_dtype("v_cache", v_cache, k_cache.scalar_type(), e4m3 ? "k_cache" : like);
}

struct KvWriteSizes {
  Size tokens{"tokens"};
  CacheSizes cache;
  const float* scales = nullptr;
};

inline KvWriteSizes check_kv_write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache,
                                   const at::Tensor& v_cache, const at::Tensor& kv_indices,
                                   const std::optional<at::Tensor>& scales, const Place& place) {
  KvWriteSizes sizes;
  expect_cache("k_cache", k_cache, sizes.cache, place);
  expect_cache("v_cache", v_cache, sizes.cache, place);
  sizes.scales = expect_scales(k_cache, scales, sizes.cache.kv_heads, place);
  for (const auto& [who, t] : {std::pair{"key", key}, {"value", value}}) {
    expect_device(who, t, place);
    expect(who, t, {sizes.tokens, sizes.cache.kv_heads, sizes.cache.head_size});
    expect_last_contiguous(who, t);
    expect_dtype(who, t, key.scalar_type(), "key");
  }
  expect_cache_dtypes(k_cache, v_cache, "key", key.scalar_type());
  expect_plain("kv_indices", kv_indices, {sizes.tokens}, at::kLong, place);
  return sizes;
}

// Number and bytes of the blocks, equal for all caches of a call.
struct BlockSizes {
  int64_t blocks = 0;
  int64_t block_bytes = 0;
};

inline BlockSizes check_caches(at::TensorList caches, const Place& place) {
  CacheSizes sizes;
  BlockSizes block_sizes;
  for (const at::Tensor& cache : caches) {
    expect_cache("caches", cache, sizes, place);
    expect_dtype("caches", cache, caches[0].scalar_type(), "the first");
    block_sizes.blocks = sizes.blocks;
    block_sizes.block_bytes = sizes.kv_heads * sizes.block_size * sizes.head_size * cache.element_size();
  }
  return block_sizes;
}

// pairs [n, 2] i64.  Returns n.
inline int64_t check_pairs(const at::Tensor& pairs, const Place& place) {
  Size count("pairs"), two("columns");
  two.agree("a pair", 2);
  expect_plain("pairs", pairs, {count, two}, at::kLong, place);
  return count;
}

// blocks [n] i64.  Returns n.
inline int64_t check_blocks(const at::Tensor& blocks, const Place& place) {
  Size count("blocks");
  expect_plain("blocks", blocks, {count}, at::kLong, place);
  return count;
}

// blocks [n] i64, buffer [n, caches, bytes of a block] u8.  Returns n.
inline int64_t check_blocks_and_buffer(const at::Tensor& blocks, const at::Tensor& buffer, int64_t caches,
                                       int64_t block_bytes, const Place& place) {
  Size count("blocks"), width("caches"), bytes("bytes of a block");
  width.agree("caches", caches);
  bytes.agree("caches", block_bytes);
  expect_plain("blocks", blocks, {count}, at::kLong, place);
  expect_plain("buffer", buffer, {count, width, bytes}, at::kByte, place);
  return count;
}

}  // namespace quire
