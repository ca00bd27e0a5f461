// Operators of a decoder layer, as the dispatcher calls them; ops.cpp has their arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace quire::cpu::torch_api {

void packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& scale,
                   const std::optional<at::Tensor>& zero, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& norm, double eps, bool silu_mul, bool widen,
                   const std::optional<at::Tensor>& plus, const at::Tensor& out);

void rope_kv_write(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& k_cache,
                   const at::Tensor& v_cache, const at::Tensor& kv_indices, const std::optional<at::Tensor>& q_norm,
                   const std::optional<at::Tensor>& k_norm, double eps, const std::optional<at::Tensor>& scales,
                   double norm_offset);

void paged_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                     const at::Tensor& tables, const at::Tensor& rows, const at::Tensor& q_start,
                     const at::Tensor& lens, const std::optional<at::Tensor>& scales,
                     const std::optional<at::Tensor>& sinks, int64_t decodes, const at::Tensor& plan, double scale,
                     int64_t window, double soft_cap, const at::Tensor& out);

void lora(const at::Tensor& x, at::TensorList weights, at::TensorList tables, const at::Tensor& rows,
          const at::Tensor& starts, int64_t site, const at::Tensor& y);

}  // namespace quire::cpu::torch_api
