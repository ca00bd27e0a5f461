// The CPU's door: tensors come in, are checked, and leave as pointers.  Kernels check nothing.

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_api/checks.h"
#include "torch_api/linear_chain.h"
#include "cpu/attention.h"
#include "cpu/batch.h"
#include "cpu/cache.h"
#include "cpu/layers.h"
#include "cpu/product.h"
#include "cpu/sampling.h"
#include "cpu/simd.h"

namespace quire::cpu::door {

std::atomic<int> chosen_threads{0};

void set_threads(int64_t threads) {
  TORCH_CHECK_VALUE(threads >= 0, "threads: ", threads, " is negative");
  chosen_threads = static_cast<int>(threads);
}

inline int threads() {
  if (at::in_parallel_region()) return 1;
  const int chosen = chosen_threads.load(std::memory_order_relaxed);
  return chosen ? chosen : at::get_num_threads();
}

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

template <class Id>
void expect_below(const char* who, const Id* ids, int64_t count, int64_t least, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(ids[i] >= least && ids[i] < limit, who, "[", i, "] is ", ids[i], ", not in [", least, ", ", limit,
                      ")");
  }
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

// The scales [2, Hkv] that an e4m3 cache must have and no other may have; null without.
const float* expect_scales(const at::Tensor& k_cache, const std::optional<at::Tensor>& scales, Size& kv_heads) {
  const bool e4m3 = k_cache.scalar_type() == at::kFloat8_e4m3fn;
  TORCH_CHECK_VALUE(scales.has_value() == e4m3, "scales: ", scales ? "given" : "missing", " for a cache of ",
                    k_cache.scalar_type());
  if (!scales) return nullptr;
  Size two("rows, for keys and values,");
  two.agree("a cache", 2);
  expect_cpu("scales", *scales);
  expect("scales", *scales, {two, kv_heads});
  expect_contiguous("scales", *scales);
  expect_dtype("scales", *scales, at::kFloat);
  return scales->const_data_ptr<float>();
}

// A contiguous vector.
void expect_plain(const char* who, const at::Tensor& t, Size& size, at::ScalarType dtype) {
  expect_cpu(who, t);
  expect(who, t, {size});
  expect_contiguous(who, t);
  expect_dtype(who, t, dtype);
}

void kv_write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache, const at::Tensor& v_cache,
              const at::Tensor& slots, const std::optional<at::Tensor>& scales) {
  Size tokens("tokens"), blocks("blocks"), kv_heads("KV heads"), block_size("block size"), dim("head size");
  expect_cache("k_cache", k_cache, blocks, kv_heads, block_size, dim);
  expect_cache("v_cache", v_cache, blocks, kv_heads, block_size, dim);
  const float* scale = expect_scales(k_cache, scales, kv_heads);
  expect("key", key, {tokens, kv_heads, dim});
  expect("value", value, {tokens, kv_heads, dim});
  expect("slots", slots, {tokens});
  for (const auto& [who, t] : {std::pair{"key", key}, {"value", value}}) {
    expect_cpu(who, t);
    expect_last_contiguous(who, t);
    if (!scale) expect_dtype(who, t, k_cache.scalar_type(), "k_cache");
  }
  expect_dtype("value", value, key.scalar_type(), "key");
  expect_dtype("v_cache", v_cache, k_cache.scalar_type(), "k_cache");
  expect_cpu("slots", slots);
  expect_contiguous("slots", slots);
  expect_dtype("slots", slots, at::kLong);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  expect_below("slots", slot, tokens, -1, blocks * block_size);
  if (scale) {
    return by_dtype("key", key, [&](auto type) {
      cpu::kv_write_e4m3<decltype(type)>(bytes_of_rows(key), bytes_of_rows(value), bytes_of(k_cache), bytes_of(v_cache),
                                         scale, slot, tokens, kv_heads, block_size, dim, threads());
    });
  }
  cpu::kv_write(bytes_of_rows(key), bytes_of_rows(value), bytes_of(k_cache), bytes_of(v_cache), slot, tokens, kv_heads,
           block_size, dim * k_cache.element_size(), threads());
}

// Every index the kernel will follow lies inside its tensor: costs a comparison per block, which holds kilobytes.
void expect_indices(const AttentionArgs& a, int64_t tokens, int64_t max_rows, int64_t max_blocks, int64_t blocks) {
  TORCH_CHECK_VALUE(a.q_start[0] == 0 && a.q_start[a.seqs] == tokens, "q_start: runs from ", a.q_start[0], " to ",
                    a.q_start[a.seqs], ", q has ", tokens, " tokens");
  for (int64_t s = 0; s < a.seqs; ++s) {
    const int64_t queries = a.q_start[s + 1] - a.q_start[s];
    TORCH_CHECK_VALUE(queries >= 0, "q_start: falls after sequence ", s);
    if (a.lens[s] == 0) continue;
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
                     const at::Tensor& lens, const std::optional<at::Tensor>& scales, int64_t /*decodes*/,
                     const at::Tensor& /*plan*/, double scale, int64_t window, double soft_cap,
                     const at::Tensor& out) {
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
  const float* scale_of = expect_scales(k_cache, scales, kv_heads);
  expect_dtype("out", out, q.scalar_type(), "q");
  if (!scale_of) expect_dtype("k_cache", k_cache, q.scalar_type(), "q");
  expect_dtype("v_cache", v_cache, k_cache.scalar_type(), scale_of ? "k_cache" : "q");
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
      .scales = scale_of,
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
  by_dtype("q", q, [&](auto type) {
    using T = decltype(type);
    scale_of ? cpu::paged_attention<T, e4m3>(args) : cpu::paged_attention<T, T>(args);
  });
}

// Threads here take work as they find time for it: nothing to plan.
void attention_plan(const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t, int64_t, int64_t,
                    const at::Tensor&) {}

int64_t attention_plan_bytes(const at::Tensor&, int64_t, int64_t, int64_t, int64_t, int64_t) { return 0; }

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

// What block_gather and block_scatter do alike: move(caches, blocks, count, block_bytes, buffer, threads).
template <class Move>
void move_blocks(at::TensorList caches, const at::Tensor& blocks, const at::Tensor& buffer, const Move& move) {
  Size count("blocks"), width("caches"), bytes("bytes of a block");
  const Caches all(caches);
  width.agree("caches", static_cast<int64_t>(all.each.size()));
  bytes.agree("caches", all.block_bytes);
  expect_plain("blocks", blocks, count, at::kLong);
  expect_cpu("buffer", buffer);
  expect("buffer", buffer, {count, width, bytes});
  expect_contiguous("buffer", buffer);
  expect_dtype("buffer", buffer, at::kByte);
  const int64_t* ids = blocks.const_data_ptr<int64_t>();
  expect_below("blocks", ids, count, 0, all.blocks);
  move(all.each, ids, count, all.block_bytes, static_cast<char*>(buffer.data_ptr()), threads());
}

void block_gather(at::TensorList caches, const at::Tensor& blocks, const at::Tensor& buffer) {
  move_blocks(caches, blocks, buffer, cpu::block_gather);
}

void block_scatter(const at::Tensor& buffer, const at::Tensor& blocks, at::TensorList caches) {
  move_blocks(caches, blocks, buffer, cpu::block_scatter);
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

void linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
            const std::optional<at::Tensor>& norm, double eps, bool add, bool silu_mul, const at::Tensor& out) {
  expect_linear(x, weight, bias, norm, silu_mul, out);
  for (const auto& [who, t] : {std::pair{"x", x}, {"weight", weight}, {"out", out}}) expect_cpu(who, t);
  if (bias) expect_cpu("bias", *bias);
  if (norm) expect_cpu("norm", *norm);
  linear_chain(x, weight, bias, norm, eps, add, silu_mul, out);
}

std::tuple<int64_t, int64_t> product_layout(const at::Tensor& like) {
  std::tuple<int64_t, int64_t> layout;
  by_dtype("like", like, [&](auto type) { layout = {kColumns, kTogether<decltype(type)>}; });
  return layout;
}

void product(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
             const std::optional<at::Tensor>& plus, const at::Tensor& out) {
  Size rows("rows"), inner("inner size"), features("features"), strips("strips"), steps("steps"), columns("columns"),
      together("numbers together");
  expect("x", x, {rows, inner});
  expect("out", out, {rows, features});
  if (plus) expect("plus", *plus, {rows, features});
  if (bias) expect_plain("bias", *bias, features, x.scalar_type());
  const auto [wide, deep] = product_layout(x);
  columns.agree("this build", wide);
  together.agree("this build", deep);
  strips.agree("out", (features + wide - 1) / wide);
  steps.agree("x", (inner + deep - 1) / deep);
  expect("packed", packed, {strips, steps, columns, together});
  expect_contiguous("packed", packed);
  for (const auto& [who, t] : {std::pair{"x", &x}, {"out", &out}, {"packed", &packed}, {"plus", plus ? &*plus : &out}}) {
    expect_cpu(who, *t);
    expect_last_contiguous(who, *t);
    expect_dtype(who, *t, x.scalar_type(), "x");
  }
  by_dtype("x", x, [&](auto type) {
    using T = decltype(type);
    const auto numbers = [](const at::Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
    cpu::product<T>({
        .x = numbers(x),
        .x_stride = x.stride(0),
        .weight = numbers(packed),
        .bias = bias ? numbers(*bias) : nullptr,
        .plus = plus ? numbers(*plus) : nullptr,
        .plus_stride = plus ? plus->stride(0) : 0,
        .out = static_cast<T*>(out.data_ptr()),
        .out_stride = out.stride(0),
        .rows = rows,
        .inner = inner,
        .features = features,
        .threads = threads(),
    });
  });
}

void rope_kv_write(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& k_cache,
                   const at::Tensor& v_cache, const at::Tensor& slots, const std::optional<at::Tensor>& q_norm,
                   const std::optional<at::Tensor>& k_norm, double eps, const std::optional<at::Tensor>& scales) {
  Size tokens("tokens"), all_heads("heads of q, k and v"), blocks("blocks"), kv_heads("KV heads"),
      block_size("block size"), dim("head size");
  expect_cache("k_cache", k_cache, blocks, kv_heads, block_size, dim);
  expect_cache("v_cache", v_cache, blocks, kv_heads, block_size, dim);
  const float* scale = expect_scales(k_cache, scales, kv_heads);
  expect("qkv", qkv, {tokens, all_heads, dim});
  expect_last_contiguous("qkv", qkv);
  TORCH_CHECK_VALUE(all_heads > 2 * kv_heads, "qkv: has ", int64_t{all_heads}, " heads, too few for ",
                    int64_t{kv_heads}, " KV heads");
  TORCH_CHECK_VALUE(dim % 2 == 0, "qkv: head size ", int64_t{dim}, " is odd");
  TORCH_CHECK_VALUE(dim <= kMaxRope, "qkv: head size ", int64_t{dim}, " is over ", kMaxRope);
  for (const auto& [who, t] : {std::pair{"cos", cos}, {"sin", sin}}) {
    expect(who, t, {tokens, dim});
    expect_last_contiguous(who, t);
  }
  TORCH_CHECK_VALUE(q_norm.has_value() == k_norm.has_value(), "q_norm, k_norm: only one of them is given");
  if (q_norm) {
    for (const auto& [who, t] : {std::pair{"q_norm", *q_norm}, {"k_norm", *k_norm}}) {
      expect_plain(who, t, dim, qkv.scalar_type());
    }
  }
  for (const auto& [who, t] : {std::pair{"qkv", qkv}, {"cos", cos}, {"sin", sin}}) {
    expect_cpu(who, t);
    expect_dtype(who, t, scale ? qkv.scalar_type() : k_cache.scalar_type(), scale ? "qkv" : "k_cache");
  }
  expect_dtype("v_cache", v_cache, k_cache.scalar_type(), "k_cache");
  expect_plain("slots", slots, tokens, at::kLong);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  expect_below("slots", slot, tokens, -1, blocks * block_size);
  by_dtype("qkv", qkv, [&](auto type) {
    using T = decltype(type);
    const auto numbers = [](const at::Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
    const RopeArgs<T> args{
        .qkv = heads_of<T>(qkv),
        .cos = numbers(cos),
        .sin = numbers(sin),
        .cos_stride = cos.stride(0),
        .sin_stride = sin.stride(0),
        .q_norm = q_norm ? numbers(*q_norm) : nullptr,
        .k_norm = k_norm ? numbers(*k_norm) : nullptr,
        .eps = static_cast<float>(eps),
        .k_cache = bytes_of(k_cache),
        .v_cache = bytes_of(v_cache),
        .scales = scale,
        .slots = slot,
        .tokens = tokens,
        .heads = all_heads - 2 * kv_heads,
        .kv_heads = kv_heads,
        .size = dim,
        .block_size = block_size,
        .threads = threads(),
    };
    scale ? cpu::rope_kv_write<T, e4m3>(args) : cpu::rope_kv_write<T, T>(args);
  });
}

// [max_rows, max_blocks], rows contiguous.
Tables tables_of(const at::Tensor& tables, Size& max_rows, Size& max_blocks) {
  expect_cpu("tables", tables);
  expect("tables", tables, {max_rows, max_blocks});
  expect_last_contiguous("tables", tables);
  expect_dtype("tables", tables, at::kInt);
  return {tables.data_ptr<int32_t>(), tables.stride(0), tables.size(1)};
}

// The seats, each -1 or a row of the mirror.
const int32_t* seats_of(const at::Tensor& seats, Size& count, Size& max_rows) {
  expect_plain("seats", seats, count, at::kInt);
  const int32_t* seat = seats.const_data_ptr<int32_t>();
  expect_below("seats", seat, count, -1, max_rows);
  return seat;
}

void apply_edits(const at::Tensor& edits, const at::Tensor& tables) {
  Size count("edits"), three("columns"), max_rows("table rows"), max_blocks("table columns");
  three.agree("an edit", 3);
  expect_cpu("edits", edits);
  expect("edits", edits, {count, three});
  expect_contiguous("edits", edits);
  expect_dtype("edits", edits, at::kInt);
  const Tables mirror = tables_of(tables, max_rows, max_blocks);
  const int32_t* edit = edits.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    const int32_t row = edit[3 * i], column = edit[3 * i + 1];
    TORCH_CHECK_INDEX(row >= -1 && row < max_rows, "edits[", i, "]: row is ", row, ", tables have ", int64_t{max_rows});
    TORCH_CHECK_INDEX(row < 0 || (column >= 0 && column < max_blocks), "edits[", i, "]: column is ", column,
                      ", tables have ", int64_t{max_blocks});
  }
  cpu::apply_edits(edit, count, mirror);
}

void decode_inputs(const at::Tensor& seats, const at::Tensor& token, const at::Tensor& position,
                   const at::Tensor& tables, int64_t block_size, const at::Tensor& ids, const at::Tensor& positions,
                   const at::Tensor& slots, const at::Tensor& rows, const at::Tensor& lens) {
  Size count("seats"), max_rows("table rows"), max_blocks("table columns");
  TORCH_CHECK_VALUE(block_size > 0, "block_size: ", block_size, " is not positive");
  const Tables mirror = tables_of(tables, max_rows, max_blocks);
  expect_plain("token", token, max_rows, at::kLong);
  expect_plain("position", position, max_rows, at::kLong);
  const int32_t* seat = seats_of(seats, count, max_rows);
  for (const auto& [who, t] : {std::pair{"ids", ids}, {"positions", positions}, {"slots", slots}}) {
    expect_plain(who, t, count, at::kLong);
  }
  for (const auto& [who, t] : {std::pair{"rows", rows}, {"lens", lens}}) expect_plain(who, t, count, at::kInt);
  cpu::decode_inputs(seat, count, token.const_data_ptr<int64_t>(), position.const_data_ptr<int64_t>(), mirror,
                     block_size,
                     {ids.data_ptr<int64_t>(), positions.data_ptr<int64_t>(), slots.data_ptr<int64_t>(),
                      rows.data_ptr<int32_t>(), lens.data_ptr<int32_t>()});
}

void decode_outputs(const at::Tensor& seats, const at::Tensor& tokens, const at::Tensor& token,
                    const at::Tensor& position) {
  Size count("seats"), max_rows("table rows");
  expect_plain("token", token, max_rows, at::kLong);
  expect_plain("position", position, max_rows, at::kLong);
  const int32_t* seat = seats_of(seats, count, max_rows);
  expect_plain("tokens", tokens, count, at::kLong);
  cpu::decode_outputs(seat, count, tokens.const_data_ptr<int64_t>(), token.data_ptr<int64_t>(),
                      position.data_ptr<int64_t>());
}

void sample(const at::Tensor& logits, const at::Tensor& seats, const at::Tensor& known, const at::Tensor& table,
            bool general, const at::Tensor& tokens, const at::Tensor& outcome) {
  Size rows("rows"), size("size"), max_seqs("seats"), words("words of a seat");
  expect("logits", logits, {rows, size});
  expect_last_contiguous("logits", logits);
  TORCH_CHECK_VALUE(size > 0 && size < 1 << 22, "logits: rows of ", int64_t{size}, ", not 1 to 4194303");
  words.agree("this operator", sizeof(sampling::Seat) / 8);
  expect("table", table, {max_seqs, words});
  for (const auto& [who, t] : {std::pair{"seats", seats}, {"known", known}, {"tokens", tokens}, {"outcome", outcome}}) {
    expect(who, t, {rows});
  }
  for (const auto& [who, t] :
       {std::pair{"seats", seats}, {"known", known}, {"tokens", tokens}, {"outcome", outcome}, {"table", table}}) {
    expect_cpu(who, t);
    expect_contiguous(who, t);
    expect_dtype(who, t, t.is_same(outcome) ? at::kByte : at::kLong);
  }
  expect_cpu("logits", logits);
  expect_below("seats", seats.const_data_ptr<int64_t>(), rows, -1, max_seqs);
  const cpu::SampleArgs args{logits.stride(0),
                             seats.const_data_ptr<int64_t>(),
                             known.const_data_ptr<int64_t>(),
                             static_cast<const sampling::Seat*>(table.const_data_ptr()),
                             general,
                             tokens.data_ptr<int64_t>(),
                             outcome.data_ptr<uint8_t>(),
                             rows,
                             size};
  by_dtype("logits", logits, [&](auto type) {
    cpu::sample(static_cast<const decltype(type)*>(logits.const_data_ptr()), args, threads());
  });
}

}  // namespace quire::cpu::door

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("kv_write", quire::cpu::door::kv_write);
  m.impl("paged_attention", quire::cpu::door::paged_attention);
  m.impl("attention_plan", quire::cpu::door::attention_plan);
  m.impl("attention_plan_bytes", quire::cpu::door::attention_plan_bytes);
  m.impl("block_copy", quire::cpu::door::block_copy);
  m.impl("block_fill", quire::cpu::door::block_fill);
  m.impl("block_gather", quire::cpu::door::block_gather);
  m.impl("block_scatter", quire::cpu::door::block_scatter);
  m.impl("rms_norm", quire::cpu::door::rms_norm);
  m.impl("add_rms_norm", quire::cpu::door::add_rms_norm);
  m.impl("silu_mul", quire::cpu::door::silu_mul);
  m.impl("linear", quire::cpu::door::linear);
  m.impl("product", quire::cpu::door::product);
  m.impl("product_layout", quire::cpu::door::product_layout);
  m.impl("rope_kv_write", quire::cpu::door::rope_kv_write);
  m.impl("apply_edits", quire::cpu::door::apply_edits);
  m.impl("decode_inputs", quire::cpu::door::decode_inputs);
  m.impl("decode_outputs", quire::cpu::door::decode_outputs);
  m.impl("sample", quire::cpu::door::sample);
}

TORCH_LIBRARY_IMPL(quire, CompositeExplicitAutograd, m) { m.impl("set_threads", quire::cpu::door::set_threads); }
