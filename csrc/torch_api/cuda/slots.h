// Where keys and values of a step go: what kv_write and rope_kv_write check alike.
#pragma once

#include <optional>
#include <utility>

#include "cuda/cache/cache.h"
#include "torch_api/cuda/convert.h"

namespace quire::cuda::door {

// The caches are of the dtype of `like`, or of e4m3 with scales.
inline KvSlots slots_of(const at::Tensor& like, const at::Tensor& k_cache, const at::Tensor& v_cache,
                        const at::Tensor& slots, const std::optional<at::Tensor>& scales, Size& tokens, Size& kv_heads,
                        Size& dim) {
  Size blocks("blocks"), block_size("block size");
  expect_cache("k_cache", k_cache, blocks, kv_heads, block_size, dim, like);
  expect_cache("v_cache", v_cache, blocks, kv_heads, block_size, dim, like);
  expect_dtype("v_cache", v_cache, k_cache.scalar_type(), "k_cache");
  expect_vector("slots", slots, tokens, at::kLong, like);
  if (k_cache.scalar_type() == at::kFloat8_e4m3fn) {
    TORCH_CHECK_VALUE(scales, "scales: a cache of float8_e4m3fn needs them");
    Size two("keys and values");
    two.agree("scales", 2);
    expect_cuda("scales", *scales, like);
    expect("scales", *scales, {two, kv_heads});
    expect_contiguous("scales", *scales);
    expect_dtype("scales", *scales, at::kFloat);
  } else {
    TORCH_CHECK_VALUE(!scales, "scales: only a cache of float8_e4m3fn has them, this one is ", k_cache.scalar_type());
    expect_dtype("k_cache", k_cache, like.scalar_type(), "the tokens");
  }
  return {
      .k_cache = k_cache.data_ptr(),
      .v_cache = v_cache.data_ptr(),
      .k_block_stride = k_cache.stride(0),
      .v_block_stride = v_cache.stride(0),
      .block_size = static_cast<int>(block_size),
      .slots = slots.const_data_ptr<int64_t>(),
      .scales = scales ? scales->const_data_ptr<float>() : nullptr,
  };
}

}  // namespace quire::cuda::door
