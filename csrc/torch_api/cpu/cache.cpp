// Bindings of the operators that move keys and values, on a CPU.

#include "cpu/cache.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "torch_api/cache.h"
#include "torch_api/cpu/convert.h"

namespace quire::cpu::torch_api {
namespace {

TokenRows bytes_of_rows(const at::Tensor& rows) {
  return {static_cast<const char*>(rows.const_data_ptr()), rows.stride(0) * rows.element_size(),
          rows.stride(1) * rows.element_size()};
}

std::vector<Cache> caches_of(at::TensorList caches) {
  std::vector<Cache> all;
  all.reserve(caches.size());
  for (const at::Tensor& cache : caches) all.push_back(bytes_of(cache));
  return all;
}

void kv_write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache, const at::Tensor& v_cache,
              const at::Tensor& kv_indices, const std::optional<at::Tensor>& scales) {
  const KvWriteSizes sizes = check_kv_write(key, value, k_cache, v_cache, kv_indices, scales, on_cpu());
  const auto& [blocks, kv_heads, block_size, head_size] = sizes.cache;
  const int64_t* kv_index = kv_indices.const_data_ptr<int64_t>();
  expect_below("kv_indices", kv_index, sizes.tokens, -1, blocks * block_size);
  if (sizes.scales) {
    return by_dtype("key", key, [&](auto type) {
      cpu::kv_write_e4m3<decltype(type)>(bytes_of_rows(key), bytes_of_rows(value), torch_api::bytes_of(k_cache),
                                         torch_api::bytes_of(v_cache), sizes.scales, kv_index, sizes.tokens,
                                         sizes.cache.kv_heads, sizes.cache.block_size, sizes.cache.head_size,
                                         threads());
    });
  }
  cpu::kv_write(bytes_of_rows(key), bytes_of_rows(value), torch_api::bytes_of(k_cache), torch_api::bytes_of(v_cache),
                kv_index, sizes.tokens, kv_heads, block_size, head_size * k_cache.element_size(), threads());
}

void block_copy(at::TensorList caches, const at::Tensor& pairs) {
  const int64_t count = check_pairs(pairs, on_cpu());
  const BlockSizes sizes = check_caches(caches, on_cpu());
  const int64_t* ids = pairs.const_data_ptr<int64_t>();
  expect_below("pairs", ids, 2 * count, 0, sizes.blocks);
  cpu::block_copy(caches_of(caches), ids, count, sizes.block_bytes, threads());
}

void block_fill(at::TensorList caches, const at::Tensor& blocks, double value) {
  const int64_t count = check_blocks(blocks, on_cpu());
  const BlockSizes sizes = check_caches(caches, on_cpu());
  if (caches.empty()) return;
  const int64_t* ids = blocks.const_data_ptr<int64_t>();
  expect_below("blocks", ids, count, 0, sizes.blocks);
  const at::Tensor element = at::scalar_tensor(value, caches[0].options());
  cpu::block_fill(caches_of(caches), ids, count, sizes.block_bytes, static_cast<const char*>(element.const_data_ptr()),
                  element.element_size(), threads());
}

// Shared part of block_gather and block_scatter: move(caches, blocks, count, block_bytes, buffer, threads).
template <class Move>
void move_blocks(at::TensorList caches, const at::Tensor& blocks, const at::Tensor& buffer, const Move& move) {
  const BlockSizes sizes = check_caches(caches, on_cpu());
  const int64_t count = check_blocks_and_buffer(blocks, buffer, caches.size(), sizes.block_bytes, on_cpu());
  const int64_t* ids = blocks.const_data_ptr<int64_t>();
  expect_below("blocks", ids, count, 0, sizes.blocks);
  move(caches_of(caches), ids, count, sizes.block_bytes, static_cast<char*>(buffer.data_ptr()), threads());
}

void block_gather(at::TensorList caches, const at::Tensor& blocks, const at::Tensor& buffer) {
  move_blocks(caches, blocks, buffer, cpu::block_gather);
}

void block_scatter(const at::Tensor& buffer, const at::Tensor& blocks, at::TensorList caches) {
  move_blocks(caches, blocks, buffer, cpu::block_scatter);
}

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("kv_write", kv_write);
  m.impl("block_copy", block_copy);
  m.impl("block_fill", block_fill);
  m.impl("block_gather", block_gather);
  m.impl("block_scatter", block_scatter);
}

}  // namespace
}  // namespace quire::cpu::torch_api
