// Binding of `decoder_layers`: all layers of a decoder in one operator, on a CPU.  For one token of a small model each
// kernel takes about 20 us, so a Python call per kernel would add 20 % or more.

#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

#include "torch_api/checks.h"
#include "torch_api/cpu/bindings.h"
#include "torch_api/linear.h"

namespace quire::cpu::torch_api {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

// Tensors of a linear layer, in the order of `weights`.
constexpr int64_t kTensorsPerLinear = 4;
struct PackedWeight {
  MaybeTensor packed, scale, zero, bias;
};
// Tensors of a layer: four norms, then the linear layers qkv, o, gate and up, and down.
constexpr int64_t kLinears = 4;
constexpr int64_t kTensorsPerLayer = 4 + kLinears * kTensorsPerLinear;

void decoder_layers(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                    const c10::List<MaybeTensor>& weights, at::TensorList k_caches, at::TensorList v_caches,
                    const c10::List<MaybeTensor>& scales, at::TensorList kv_indices, at::TensorList tables,
                    at::IntArrayRef groups, const at::Tensor& rows, const at::Tensor& q_start, const at::Tensor& lens,
                    int64_t heads, int64_t inner, double eps, double head_eps, double scale, at::IntArrayRef windows,
                    bool widen, at::TensorList lora_weights, at::TensorList lora_tables, const MaybeTensor& lora_rows,
                    const MaybeTensor& lora_starts) {
  const int64_t layers = windows.size();
  Size tokens("tokens"), hidden("hidden size"), count("layers");
  expect("x", x, {tokens, hidden});
  count.agree("windows", layers);
  count.agree("k_caches", k_caches.size());
  count.agree("v_caches", v_caches.size());
  count.agree("scales", scales.size());
  count.agree("groups", groups.size());
  TORCH_CHECK_VALUE(kv_indices.size() == tables.size(), "tables: has ", tables.size(), " groups, kv_indices has ",
                    kv_indices.size());
  TORCH_CHECK_VALUE(static_cast<int64_t>(weights.size()) == layers * kTensorsPerLayer, "weights: has ", weights.size(),
                    " tensors, not ", kTensorsPerLayer, " for each of ", layers, " layers");
  TORCH_CHECK_VALUE(lora_weights.empty() || (lora_rows && lora_starts), "lora_rows: adapters without rows");
  if (layers == 0) return;
  TORCH_CHECK_VALUE(k_caches[0].dim() == 4, "k_caches: has ", k_caches[0].dim(), " dimensions, not 4");
  const int64_t kv_heads = k_caches[0].size(1), head_size = k_caches[0].size(3);
  const at::Tensor qkv = at::empty({tokens, heads + 2 * kv_heads, head_size}, x.options());
  const at::Tensor attended = at::empty({tokens, heads, head_size}, x.options());
  const at::Tensor gated = at::empty({tokens, inner}, x.options());
  const at::Tensor queries = qkv.narrow(1, 0, heads), flat_qkv = qkv.flatten(1), flat_attended = attended.flatten(1);
  const at::Tensor no_plan = at::empty({0}, x.options().dtype(at::kByte));
  for (int64_t layer = 0; layer < layers; ++layer) {
    const auto weight = [&](int64_t i) -> MaybeTensor { return weights.get(layer * kTensorsPerLayer + i); };
    const auto multiply = [&](int64_t i, const at::Tensor& from, const MaybeTensor& norm, bool silu_mul,
                              const MaybeTensor& plus, const at::Tensor& out) {
      const int64_t first = 4 + i * kTensorsPerLinear;
      const PackedWeight w{weight(first), weight(first + 1), weight(first + 2), weight(first + 3)};
      TORCH_CHECK_VALUE(w.packed, "weights: layer ", layer, " has no linear layer ", i);
      if (lora_weights.empty()) {
        packed_linear(from, *w.packed, w.scale, w.zero, w.bias, norm, eps, silu_mul, widen, plus, out);
        return;
      }
      // An adapter is added between the GEMM and the activation, so these are separate operators, with the same bits.
      const at::Tensor input = norm ? normed(from, *norm, eps) : from;
      const at::Tensor y = silu_mul ? at::empty({out.size(0), 2 * out.size(1)}, out.options()) : out;
      packed_linear(input, *w.packed, w.scale, w.zero, w.bias, std::nullopt, eps, false, widen, plus, y);
      lora(input, lora_weights, lora_tables, *lora_rows, *lora_starts, kLinears * layer + i, y);
      if (silu_mul) silu_product(y, out);
    };
    const at::Tensor &keys = k_caches[layer], &values = v_caches[layer];
    const MaybeTensor of_cache = scales.get(layer);
    const int64_t group = groups[layer];
    TORCH_CHECK_VALUE(group >= 0 && group < static_cast<int64_t>(tables.size()), "groups: layer ", layer, " has ",
                      group, ", of ", tables.size());
    multiply(0, x, weight(0), false, std::nullopt, flat_qkv);
    rope_kv_write(qkv, cos, sin, keys, values, kv_indices[group], weight(1), weight(2), head_eps, of_cache, 0.0);
    paged_attention(queries, keys, values, tables[group], rows, q_start, lens, of_cache, std::nullopt, 0, no_plan,
                    scale, windows[layer], 0.0, attended);
    multiply(1, flat_attended, std::nullopt, false, x, x);
    multiply(2, x, weight(3), true, std::nullopt, gated);
    multiply(3, gated, std::nullopt, false, x, x);
  }
}

TORCH_LIBRARY_IMPL(quire, CPU, m) { m.impl("decoder_layers", decoder_layers); }

}  // namespace
}  // namespace quire::cpu::torch_api
