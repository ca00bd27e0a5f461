// Checks of the operators between the linear layers of a decoder layer, shared by the bindings of all devices.
#pragma once

#include <optional>
#include <utility>

#include "torch_api/cache.h"
#include "torch_api/checks.h"

namespace quire {

struct NormSizes {
  Size tokens{"tokens"}, size{"size"};
  int64_t heads = 1;
};

// x, out [T, size], or [T, heads, size] with a norm per head; weight [size].
inline NormSizes check_rms_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& out,
                                const Place& place) {
  NormSizes sizes;
  Size heads("heads");
  for (const auto& [who, t] : {std::pair{"x", x}, {"out", out}}) {
    expect_device(who, t, place);
    if (x.dim() == 3) {
      expect(who, t, {sizes.tokens, heads, sizes.size});
    } else {
      expect(who, t, {sizes.tokens, sizes.size});
    }
    expect_last_contiguous(who, t);
    expect_dtype(who, t, x.scalar_type(), "x");
  }
  if (x.dim() == 3) sizes.heads = heads;
  expect_plain("weight", weight, {sizes.size}, x.scalar_type(), place, "x");
  return sizes;
}

struct SiluMulSizes {
  Size tokens{"tokens"}, size{"size"};
};

// gate_up [T, 2 * size], out [T, size].
inline SiluMulSizes check_silu_mul(const at::Tensor& gate_up, const at::Tensor& out, const Place& place) {
  SiluMulSizes sizes;
  Size two("gate and up");
  expect_plain("out", out, {sizes.tokens, sizes.size}, out.scalar_type(), place);
  two.agree("out", 2 * sizes.size);
  expect_plain("gate_up", gate_up, {sizes.tokens, two}, out.scalar_type(), place, "out");
  return sizes;
}

struct RopeSizes {
  Size tokens{"tokens"}, all_heads{"heads of q, k and v"};
  CacheSizes cache;
  const float* scales = nullptr;
  int64_t heads() const { return all_heads - 2 * cache.kv_heads; }
};

inline RopeSizes check_rope_kv_write(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                                     const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& kv_indices,
                                     const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
                                     const std::optional<at::Tensor>& scales, int64_t max_head_size,
                                     const Place& place) {
  RopeSizes sizes;
  Size& head_size = sizes.cache.head_size;
  expect_cache("k_cache", k_cache, sizes.cache, place);
  expect_cache("v_cache", v_cache, sizes.cache, place);
  sizes.scales = expect_scales(k_cache, scales, sizes.cache.kv_heads, place);
  expect_device("qkv", qkv, place);
  expect("qkv", qkv, {sizes.tokens, sizes.all_heads, head_size});
  expect_last_contiguous("qkv", qkv);
  TORCH_CHECK_VALUE(sizes.heads() > 0, "qkv: has ", int64_t{sizes.all_heads}, " heads, too few for ",
                    int64_t{sizes.cache.kv_heads}, " KV heads");
  TORCH_CHECK_VALUE(head_size % 2 == 0, "qkv: head size ", int64_t{head_size}, " is odd");
  TORCH_CHECK_VALUE(head_size <= max_head_size, "qkv: head size ", int64_t{head_size}, " is over ", max_head_size);
  expect_cache_dtypes(k_cache, v_cache, "qkv", qkv.scalar_type());
  for (const auto& [who, t] : {std::pair{"cos", cos}, {"sin", sin}}) {
    expect_device(who, t, place);
    expect(who, t, {sizes.tokens, head_size});
    expect_last_contiguous(who, t);
    expect_dtype(who, t, qkv.scalar_type(), "qkv");
  }
  TORCH_CHECK_VALUE(q_norm.has_value() == k_norm.has_value(), "q_norm, k_norm: only one of them is given");
  if (q_norm) {
    for (const auto& [who, t] : {std::pair{"q_norm", *q_norm}, {"k_norm", *k_norm}}) {
      expect_plain(who, t, {head_size}, qkv.scalar_type(), place, "qkv");
    }
  }
  expect_plain("kv_indices", kv_indices, {sizes.tokens}, at::kLong, place);
  return sizes;
}

}  // namespace quire
