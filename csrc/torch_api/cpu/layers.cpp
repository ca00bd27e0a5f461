// Bindings of the operators between the linear layers of a decoder layer, on a CPU.

#include "cpu/layers.h"

#include <torch/library.h>

#include <optional>

#include "torch_api/cpu/bindings.h"
#include "torch_api/cpu/convert.h"
#include "torch_api/layers.h"

namespace quire::cpu::torch_api {
namespace {

void rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& out) {
  const NormSizes sizes = check_rms_norm(x, weight, out, on_cpu());
  by_dtype("x", x, [&](auto type) {
    using T = decltype(type);
    cpu::rms_norm<T>(heads_of<const T>(x), heads_of<const T>(weight).data, static_cast<float>(eps), heads_of<T>(out),
                     sizes.tokens, sizes.heads, sizes.size, threads());
  });
}

void silu_mul(const at::Tensor& gate_up, const at::Tensor& out) {
  const SiluMulSizes sizes = check_silu_mul(gate_up, out, on_cpu());
  by_dtype("out", out, [&](auto type) {
    using T = decltype(type);
    cpu::silu_mul<T>(static_cast<const T*>(gate_up.const_data_ptr()), static_cast<T*>(out.data_ptr()), sizes.tokens,
                     sizes.size, threads());
  });
}

}  // namespace

void rope_kv_write(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& k_cache,
                   const at::Tensor& v_cache, const at::Tensor& kv_indices, const std::optional<at::Tensor>& q_norm,
                   const std::optional<at::Tensor>& k_norm, double eps, const std::optional<at::Tensor>& scales,
                   double norm_offset) {
  const RopeSizes sizes =
      check_rope_kv_write(qkv, cos, sin, k_cache, v_cache, kv_indices, q_norm, k_norm, scales, kMaxRope, on_cpu());
  const int64_t* kv_index = kv_indices.const_data_ptr<int64_t>();
  expect_below("kv_indices", kv_index, sizes.tokens, -1, sizes.cache.blocks * sizes.cache.block_size);
  by_dtype("qkv", qkv, [&](auto type) {
    using T = decltype(type);
    const auto data_of = [](const at::Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
    const RopeArgs<T> args{
        .qkv = heads_of<T>(qkv),
        .cos = data_of(cos),
        .sin = data_of(sin),
        .cos_stride = cos.stride(0),
        .sin_stride = sin.stride(0),
        .q_norm = q_norm ? data_of(*q_norm) : nullptr,
        .k_norm = k_norm ? data_of(*k_norm) : nullptr,
        .eps = static_cast<float>(eps),
        .norm_offset = static_cast<float>(norm_offset),
        .k_cache = bytes_of(k_cache),
        .v_cache = bytes_of(v_cache),
        .scales = sizes.scales,
        .kv_indices = kv_index,
        .tokens = sizes.tokens,
        .heads = sizes.heads(),
        .kv_heads = sizes.cache.kv_heads,
        .size = sizes.cache.head_size,
        .block_size = sizes.cache.block_size,
        .threads = threads(),
    };
    sizes.scales ? cpu::rope_kv_write<T, e4m3>(args) : cpu::rope_kv_write<T, T>(args);
  });
}

namespace {

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("rope_kv_write", rope_kv_write);
}

}  // namespace
}  // namespace quire::cpu::torch_api
