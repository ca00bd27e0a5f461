// The CPU's door: tensors come in, are checked, and leave as pointers.  Kernels check nothing.

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../checks.h"
#include "attention.h"
#include "cache.h"
#include "layers.h"
#include "simd.h"

namespace quire::cpu::door {

inline int threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// [blocks, Hkv, block_size, D]; inside a block contiguous, the stride between blocks is free.
void expect_cache(const char* who, const at::Tensor& cache, Size& blocks, Size& kv_heads, Size& block_size, Size& dim) {
  expect_cpu(who, cache);
  expect(who, cache, {blocks, kv_heads, block_size, dim});
  TORCH_CHECK_VALUE(cache.numel() == 0 || cache[0].is_contiguous(), who, ": blocks are not contiguous");
}

Cache bytes_of(const at::Tensor& cache) {
  return {static_cast<char*>(cache.data_ptr()), cache.stride(0) * cache.element_size()};
}

TokenRows bytes_of_rows(const at::Tensor& rows) {
  return {static_cast<const char*>(rows.const_data_ptr()), rows.stride(0) * rows.element_size(),
          rows.stride(1) * rows.element_size()};
}

void expect_below(const char* who, const int64_t* ids, int64_t count, int64_t least, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(ids[i] >= least && ids[i] < limit, who, "[", i, "] is ", ids[i], ", not in [", least, ", ", limit,
                      ")");
  }
}

void kv_write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache, const at::Tensor& v_cache,
              const at::Tensor& slots) {
  Size tokens("tokens"), blocks("blocks"), kv_heads("KV heads"), block_size("block size"), dim("head size");
  expect_cache("k_cache", k_cache, blocks, kv_heads, block_size, dim);
  expect_cache("v_cache", v_cache, blocks, kv_heads, block_size, dim);
  expect("key", key, {tokens, kv_heads, dim});
  expect("value", value, {tokens, kv_heads, dim});
  expect("slots", slots, {tokens});
  for (const auto& [who, t] : {std::pair{"key", key}, {"value", value}}) {
    expect_cpu(who, t);
    expect_last_contiguous(who, t);
    expect_dtype(who, t, k_cache.scalar_type(), "k_cache");
  }
  expect_dtype("v_cache", v_cache, k_cache.scalar_type(), "k_cache");
  expect_cpu("slots", slots);
  expect_contiguous("slots", slots);
  expect_dtype("slots", slots, at::kLong);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  expect_below("slots", slot, tokens, -1, blocks * block_size);
  cpu::kv_write(bytes_of_rows(key), bytes_of_rows(value), bytes_of(k_cache), bytes_of(v_cache), slot, tokens, kv_heads,
           block_size, dim * k_cache.element_size(), threads());
}

// run(T{}), with the kernels' own type for the dtype of t.
template <class Run>
void by_dtype(const char* who, const at::Tensor& t, const Run& run) {
  switch (t.scalar_type()) {
    case at::kFloat: return run(float{});
    case at::kBFloat16: return run(bf16{});
    case at::kHalf: return run(fp16{});
    default: TORCH_CHECK_VALUE(false, who, ": dtype is ", t.scalar_type(), ", not float32, bfloat16 or float16");
  }
}

// Every index the kernel will follow lies inside its tensor: costs a comparison per block, which holds kilobytes.
void expect_indices(const AttentionArgs& a, int64_t tokens, int64_t max_rows, int64_t max_blocks, int64_t blocks) {
  TORCH_CHECK_VALUE(a.q_start[0] == 0 && a.q_start[a.seqs] == tokens, "q_start: runs from ", a.q_start[0], " to ",
                    a.q_start[a.seqs], ", q has ", tokens, " tokens");
  for (int64_t s = 0; s < a.seqs; ++s) {
    const int64_t queries = a.q_start[s + 1] - a.q_start[s];
    TORCH_CHECK_VALUE(queries >= 0, "q_start: falls after sequence ", s);
    TORCH_CHECK_VALUE(a.lens[s] >= queries, "lens[", s, "] is ", a.lens[s], ", less than its ", queries, " queries");
    TORCH_CHECK_VALUE(a.lens[s] <= max_blocks * a.block_size, "lens[", s, "] is ", a.lens[s], ", tables hold ",
                      max_blocks, " blocks of ", a.block_size);
    TORCH_CHECK_INDEX(a.rows[s] >= 0 && a.rows[s] < max_rows, "rows[", s, "] is ", a.rows[s], ", tables have ",
                      max_rows, " rows");
    if (queries == 0) continue;
    const int32_t* table = a.tables + a.rows[s] * a.table_stride;
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, a.lens[s] - queries + 1 - a.window) : 0;
    for (int64_t i = first / a.block_size; i * a.block_size < a.lens[s]; ++i) {
      TORCH_CHECK_INDEX(table[i] >= 0 && table[i] < blocks, "tables[", a.rows[s], ", ", i, "] is ", table[i],
                        ", the cache has ", blocks, " blocks");
    }
  }
}

void paged_attention(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                     const at::Tensor& tables, const at::Tensor& rows, const at::Tensor& q_start,
                     const at::Tensor& lens, double scale, int64_t window, double soft_cap, const at::Tensor& out) {
  Size tokens("tokens"), heads("heads"), kv_heads("KV heads"), dim("head size"), blocks("blocks"),
      block_size("block size"), max_rows("table rows"), max_blocks("table columns"), seqs("sequences"),
      starts("query offsets");
  expect("q", q, {tokens, heads, dim});
  expect("out", out, {tokens, heads, dim});
  expect_cache("k_cache", k_cache, blocks, kv_heads, block_size, dim);
  expect_cache("v_cache", v_cache, blocks, kv_heads, block_size, dim);
  expect("tables", tables, {max_rows, max_blocks});
  expect("rows", rows, {seqs});
  expect("lens", lens, {seqs});
  expect("q_start", q_start, {starts});
  TORCH_CHECK_VALUE(starts == seqs + 1, "q_start: has ", int64_t{starts}, " entries for ", int64_t{seqs}, " sequences");
  TORCH_CHECK_VALUE(kv_heads > 0 && heads % kv_heads == 0, "q: ", int64_t{heads},
                    " heads are not a multiple of k_cache's ", int64_t{kv_heads});
  TORCH_CHECK_VALUE(dim > 0 && dim <= kMaxHeadSize, "q: head size ", int64_t{dim}, " is over ", kMaxHeadSize);
  TORCH_CHECK_VALUE(window >= 0, "window: ", window, " is negative");
  for (const auto& [who, t] : {std::pair{"out", out}, {"k_cache", k_cache}, {"v_cache", v_cache}}) {
    expect_dtype(who, t, q.scalar_type(), "q");
  }
  for (const auto& [who, t] : {std::pair{"q", q}, {"out", out}, {"tables", tables}}) {
    expect_cpu(who, t);
    expect_last_contiguous(who, t);
  }
  for (const auto& [who, t] : {std::pair{"rows", rows}, {"q_start", q_start}, {"lens", lens}}) {
    expect_cpu(who, t);
    expect_contiguous(who, t);
    expect_dtype(who, t, at::kInt);
  }
  expect_dtype("tables", tables, at::kInt);

  const AttentionArgs args{
      .q = q.const_data_ptr(),
      .out = out.data_ptr(),
      .q_token_stride = q.stride(0),
      .q_head_stride = q.stride(1),
      .out_token_stride = out.stride(0),
      .out_head_stride = out.stride(1),
      .k_cache = k_cache.const_data_ptr(),
      .v_cache = v_cache.const_data_ptr(),
      .k_block_stride = k_cache.stride(0),
      .v_block_stride = v_cache.stride(0),
      .tables = tables.const_data_ptr<int32_t>(),
      .table_stride = tables.stride(0),
      .rows = rows.const_data_ptr<int32_t>(),
      .q_start = q_start.const_data_ptr<int32_t>(),
      .lens = lens.const_data_ptr<int32_t>(),
      .seqs = seqs,
      .heads = heads,
      .kv_heads = kv_heads,
      .head_size = dim,
      .block_size = block_size,
      .scale = static_cast<float>(scale),
      .window = window,
      .soft_cap = static_cast<float>(soft_cap),
      .threads = threads(),
  };
  expect_indices(args, tokens, max_rows, max_blocks, blocks);
  by_dtype("q", q, [&](auto type) { cpu::paged_attention<decltype(type)>(args); });
}

// What block_copy and block_fill need to know of every cache; all have blocks of one size.
struct Caches {
  std::vector<Cache> each;
  int64_t blocks = 0, block_bytes = 0;
  explicit Caches(at::TensorList caches) {
    Size blocks_("blocks"), kv_heads("KV heads"), block_size("block size"), dim("head size");
    each.reserve(caches.size());
    for (const at::Tensor& cache : caches) {
      expect_cache("caches", cache, blocks_, kv_heads, block_size, dim);
      expect_dtype("caches", cache, caches[0].scalar_type(), "the first");
      each.push_back(bytes_of(cache));
      blocks = blocks_;
      block_bytes = kv_heads * block_size * dim * cache.element_size();
    }
  }
};

void block_copy(at::TensorList caches, const at::Tensor& pairs) {
  Size count("pairs"), two("columns");
  two.agree("a pair", 2);
  expect_cpu("pairs", pairs);
  expect("pairs", pairs, {count, two});
  expect_contiguous("pairs", pairs);
  expect_dtype("pairs", pairs, at::kLong);
  const Caches all(caches);
  const int64_t* ids = pairs.const_data_ptr<int64_t>();
  expect_below("pairs", ids, 2 * count, 0, all.blocks);
  cpu::block_copy(all.each, ids, count, all.block_bytes, threads());
}

void block_fill(at::TensorList caches, const at::Tensor& blocks, double value) {
  Size count("blocks");
  expect_cpu("blocks", blocks);
  expect("blocks", blocks, {count});
  expect_contiguous("blocks", blocks);
  expect_dtype("blocks", blocks, at::kLong);
  const Caches all(caches);
  if (all.each.empty()) return;
  const int64_t* ids = blocks.const_data_ptr<int64_t>();
  expect_below("blocks", ids, count, 0, all.blocks);
  const at::Tensor element = at::scalar_tensor(value, caches[0].options());
  cpu::block_fill(all.each, ids, count, all.block_bytes, static_cast<const char*>(element.const_data_ptr()),
             element.element_size(), threads());
}

// [tokens, size] counts as one head.
template <class T>
Heads<T> heads_of(const at::Tensor& t) {
  auto* data = static_cast<T*>(const_cast<void*>(t.const_data_ptr()));
  return {data, t.stride(0), t.dim() == 3 ? t.stride(1) : 0};
}

void norm(const at::Tensor& x, const at::Tensor* delta, const at::Tensor& weight, double eps, const at::Tensor& out) {
  Size tokens("tokens"), heads("heads"), size("size");
  const auto expect_heads = [&](const char* who, const at::Tensor& t) {
    expect_cpu(who, t);
    if (x.dim() == 3) {
      expect(who, t, {tokens, heads, size});
    } else {
      expect(who, t, {tokens, size});
    }
    expect_last_contiguous(who, t);
    expect_dtype(who, t, x.scalar_type(), "x");
  };
  expect_heads("x", x);
  expect_heads("out", out);
  if (delta) expect_heads("delta", *delta);
  expect_cpu("weight", weight);
  expect("weight", weight, {size});
  expect_contiguous("weight", weight);
  expect_dtype("weight", weight, x.scalar_type(), "x");
  by_dtype("x", x, [&](auto type) {
    using T = decltype(type);
    cpu::rms_norm<T>(heads_of<T>(x), delta ? heads_of<const T>(*delta) : Heads<const T>{}, heads_of<const T>(weight).data,
                     static_cast<float>(eps), heads_of<T>(out), tokens, x.dim() == 3 ? int64_t{heads} : 1, size,
                     threads());
  });
}

void rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& out) {
  norm(x, nullptr, weight, eps, out);
}

void add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps,
                  const at::Tensor& out) {
  norm(x, &delta, weight, eps, out);
}

void silu_mul(const at::Tensor& gate_up, const at::Tensor& out) {
  Size tokens("tokens"), two("gate and up"), size("size");
  expect("out", out, {tokens, size});
  two.agree("out", 2 * size);
  expect("gate_up", gate_up, {tokens, two});
  for (const auto& [who, t] : {std::pair{"gate_up", gate_up}, {"out", out}}) {
    expect_cpu(who, t);
    expect_contiguous(who, t);
    expect_dtype(who, t, out.scalar_type(), "out");
  }
  by_dtype("out", out, [&](auto type) {
    using T = decltype(type);
    cpu::silu_mul<T>(static_cast<const T*>(gate_up.const_data_ptr()), static_cast<T*>(out.data_ptr()), tokens, size,
                     threads());
  });
}

void rope_kv_write(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& k_cache,
                   const at::Tensor& v_cache, const at::Tensor& slots) {
  Size tokens("tokens"), all_heads("heads of q, k and v"), blocks("blocks"), kv_heads("KV heads"),
      block_size("block size"), dim("head size");
  expect_cache("k_cache", k_cache, blocks, kv_heads, block_size, dim);
  expect_cache("v_cache", v_cache, blocks, kv_heads, block_size, dim);
  expect("qkv", qkv, {tokens, all_heads, dim});
  expect_last_contiguous("qkv", qkv);
  TORCH_CHECK_VALUE(all_heads > 2 * kv_heads, "qkv: has ", int64_t{all_heads}, " heads, too few for ",
                    int64_t{kv_heads}, " KV heads");
  TORCH_CHECK_VALUE(dim % 2 == 0, "qkv: head size ", int64_t{dim}, " is odd");
  expect("cos", cos, {tokens, dim});
  expect("sin", sin, {tokens, dim});
  expect_contiguous("cos", cos);
  expect_contiguous("sin", sin);
  expect("slots", slots, {tokens});
  expect_contiguous("slots", slots);
  expect_dtype("slots", slots, at::kLong);
  for (const auto& [who, t] : {std::pair{"qkv", qkv}, {"cos", cos}, {"sin", sin}, {"v_cache", v_cache}}) {
    expect_cpu(who, t);
    expect_dtype(who, t, k_cache.scalar_type(), "k_cache");
  }
  expect_cpu("slots", slots);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  expect_below("slots", slot, tokens, -1, blocks * block_size);
  by_dtype("qkv", qkv, [&](auto type) {
    using T = decltype(type);
    cpu::rope_kv_write<T>(heads_of<T>(qkv), static_cast<const T*>(cos.const_data_ptr()),
                          static_cast<const T*>(sin.const_data_ptr()), bytes_of(k_cache), bytes_of(v_cache), slot,
                          tokens, all_heads - 2 * kv_heads, kv_heads, dim, block_size, threads());
  });
}

void row_max(const at::Tensor& x, const at::Tensor& values, const at::Tensor& places) {
  Size rows("rows"), size("size");
  expect("x", x, {rows, size});
  expect("values", values, {rows});
  expect("places", places, {rows});
  TORCH_CHECK_VALUE(size > 0, "x: rows are empty");
  expect_last_contiguous("x", x);
  expect_contiguous("values", values);
  expect_contiguous("places", places);
  expect_dtype("values", values, at::kFloat);
  expect_dtype("places", places, at::kLong);
  for (const auto& [who, t] : {std::pair{"x", x}, {"values", values}, {"places", places}}) expect_cpu(who, t);
  by_dtype("x", x, [&](auto type) {
    using T = decltype(type);
    cpu::row_max<T>(static_cast<const T*>(x.const_data_ptr()), x.stride(0), values.data_ptr<float>(),
                    places.data_ptr<int64_t>(), rows, size, threads());
  });
}

}  // namespace quire::cpu::door

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("kv_write", quire::cpu::door::kv_write);
  m.impl("paged_attention", quire::cpu::door::paged_attention);
  m.impl("block_copy", quire::cpu::door::block_copy);
  m.impl("block_fill", quire::cpu::door::block_fill);
  m.impl("rms_norm", quire::cpu::door::rms_norm);
  m.impl("add_rms_norm", quire::cpu::door::add_rms_norm);
  m.impl("silu_mul", quire::cpu::door::silu_mul);
  m.impl("rope_kv_write", quire::cpu::door::rope_kv_write);
  m.impl("row_max", quire::cpu::door::row_max);
}
