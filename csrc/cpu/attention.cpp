// Paged attention on a CPU, by flash attention over items of rows.
//
// A *row* is one query head of one query.  The rows of a sequence that read one KV head have indices query * G + head,
// where G = H / Hkv.  They are split into items of at most kRows rows.  So a loaded key serves the G heads of a
// decoding sequence, or up to 32 / G consecutive queries of a prompt chunk.
//
//   keys    0 ........ 64 ....... 128 ....... 192 ....... 256 ....                       ...... position of the query
//   tile    |-- 64 --|-- 64 --|-- 64 --|-- 64 --|               online softmax within a split (Milakov 2018)
//   split   |--------------- 256 ---------------|--------------- 256 ----------------|--    merged left to right
// Tiles and splits start at fixed key positions.  A row is computed by the same sequence of operations, independent of
// the other rows of its item.  So a result is bit-identical in any batch, chunking or number of threads.
//
// An item usually processes all its splits.  If there are too few items for the cores (one long sequence), each split
// becomes an item.  A second pass then merges them with the same operations in the same order (Flash-Decoding 2023).
//
// Decode moves 2 * len * D * sizeof(Kv) bytes per KV head and is bound by memory; prefill is bound by multiply-adds.

#include "cpu/attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/pool.h"
#include "cpu/simd.h"

namespace quire::cpu {
namespace {

constexpr int kRows = 32;
constexpr int kTile = 64;                 // keys; a multiple of kLanes and of every block size
constexpr int kSplit = 256;               // keys; a multiple of kTile
constexpr int kVectors = kTile / kLanes;  // vectors with one float per key of a tile
// Distance between two chunks of a tile, in floats.  The + 1 puts the chunks of a key into different sets of the L1
// cache.
constexpr int kChunk = (kTile + 1) * kLanes;
constexpr float kNone = -std::numeric_limits<float>::infinity();
// Items of up to this many rows read keys and values in place.  With more rows it is faster to widen the keys and
// values into a tile first.
constexpr int kInPlace = 4;
constexpr float kLog2e = 1.4426950408889634f;

// Cost (Item::cost) below which waking a second thread takes longer than it saves.
constexpr int64_t kWorthSharing = 2000;

struct Item {
  int seq, kv_head;
  int row, rows;         // packed rows [row, row + rows) of the sequence
  int first, last;       // keys [first, last) visible to any of these rows
  int64_t partial = -1;  // index of the first split's state; -1: the item writes its output itself
  int64_t cost() const {
    return static_cast<int64_t>(last - first) * (rows + 3);
  }  // 3: loading a key and its value takes as long as computing 3 rows
};

// Online-softmax state of each row of an item: a key's weight is 2^(score - max), acc is the weighted sum of values.
struct State {
  float max[kRows];
  float sum[kRows];
  alignas(64) float acc[kRows * kMaxHeadSize];  // [rows, padded head size]

  void clear(int rows, int dim) {
    std::fill_n(max, rows, kNone);
    std::fill_n(sum, rows, 0.0f);
    std::fill_n(acc, rows * dim, 0.0f);
  }
};

template <class Kv>
struct Scratch {
  // Addresses in the caches of this tile's keys, its values and the next tile's keys.  A key that no row sees gets the
  // address of another key.
  const Kv *keys[kTile], *values[kTile], *next[kTile];
  alignas(64) float query[kRows * kMaxHeadSize];  // [rows, padded head size], padding zero
  // Keys, then values, in chunks of kLanes elements: [chunks, keys + 1, kLanes], padding zero.  Chunks are outermost so
  // that all offsets in the inner loops are constants.
  alignas(64) float tile[kMaxHeadSize / kLanes * kChunk];
  alignas(64) float weight[kRows * kTile];  // [rows, keys]
  float rescale[kRows];
  int first[kRows], last[kRows];  // keys [first, last) visible to each row
  State total, split;
};

float exp2_one(float x) { return exp2(broadcast(x))[0]; }

// Converts `from` [count] to float, in chunks of kLanes elements that lie `stride` floats apart in `to`.  Zeros fill up
// the last chunk.
template <class T>
void widen(float* to, int stride, const T* from, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes, to += stride) store(to, load(from + i));
  if (i == count) return;
  T rest[kLanes] = {};
  std::copy(from + i, from + count, rest);
  store(to, load(rest));
}

// Computes score[r * kTile + k] = query[r] . key k, for R rows and the kLanes / R keys from `key` on.  at(k, c) returns
// chunk c of key k.  Every dot product sums chunk after chunk and then across lanes, in one order for any R.
template <int R, class At>
void dot(float* score, const float* query, const At& at, int key, int dim) {
  constexpr int K = kLanes / R;
  Floats sums[kLanes] = {};
  for (int c = 0; c * kLanes < dim; ++c) {
    Floats q[R];
    unroll<R>([&](auto r) { q[r] = load(query + r * dim + c * kLanes); });
    unroll<K>([&](auto k) {
      const Floats x = at(key + k, c);
      unroll<R>([&](auto r) { sums[r * K + k] = fma(q[r], x, sums[r * K + k]); });
    });
  }
  const Floats all = sum_each(sums);
  unroll<R>([&](auto r) { std::memcpy(score + r * kTile + key, reinterpret_cast<const float*>(&all) + r * K, 4 * K); });
}

// Computes acc[r] = acc[r] * rescale[r] + the sum over keys [first, last) of weight[r, key] * value of key, for R rows
// and the C chunks from `chunk` on.  at(k, c) returns chunk c of the value of key k.
template <int R, int C, class At>
void add_values(float* acc, const float* rescale, const float* weight, const At& at, int chunk, int first, int last,
                int dim) {
  acc += chunk * kLanes;
  Floats sums[R * C];
  unroll<R * C>([&](auto i) { sums[i] = load(acc + i / C * dim + i % C * kLanes) * broadcast(rescale[i / C]); });
  for (int k = first; k < last; ++k) {
    Floats value[C];
    unroll<C>([&](auto c) { value[c] = at(k, chunk + c); });
    unroll<R * C>([&](auto i) { sums[i] = fma(broadcast(weight[i / C * kTile + k]), value[i % C], sums[i]); });
  }
  unroll<R * C>([&](auto i) { store(acc + i / C * dim + i % C * kLanes, sums[i]); });
}

template <int R, class At>
void add_values(float* acc, const float* rescale, const float* weight, const At& at, int first, int last, int dim) {
  int c = 0;
  for (; (c + 4) * kLanes <= dim; c += 4) add_values<R, 4>(acc, rescale, weight, at, c, first, last, dim);
  for (; c * kLanes < dim; ++c) add_values<R, 1>(acc, rescale, weight, at, c, first, last, dim);
}

// Calls use(row, R) for groups of 4, 2 and 1 rows, R a constant.
template <class Use>
void each_group(int rows, const Use& use) {
  int r = 0;
  for (; rows - r >= 4; r += 4) use(r, std::integral_constant<int, 4>{});
  if (rows - r >= 2) {
    use(r, std::integral_constant<int, 2>{});
    r += 2;
  }
  if (rows > r) use(r, std::integral_constant<int, 1>{});
}

// Merges the state of one split into `into`.  The caller must merge splits from left to right.
void merge(State& into, const float* max, const float* sum, const float* acc, int rows, int dim) {
  for (int r = 0; r < rows; ++r) {
    if (max[r] == kNone) continue;  // no key of this split is visible to the row
    const float top = std::max(into.max[r], max[r]);
    const float a = exp2_one(into.max[r] - top), b = exp2_one(max[r] - top);
    into.max[r] = top;
    into.sum[r] = into.sum[r] * a + sum[r] * b;
    for (int d = r * dim; d < (r + 1) * dim; d += kLanes) {
      store(into.acc + d, fma(load(acc + d), broadcast(b), load(into.acc + d) * broadcast(a)));
    }
  }
}

template <class T, class Kv>
class Attention {
 public:
  explicit Attention(const AttentionArgs& args)
      : a_(args),
        group_(static_cast<int>(args.heads / args.kv_heads)),
        dim_(static_cast<int>((args.head_size + kLanes - 1) / kLanes * kLanes)) {}

  void run() {
    plan();
    share(static_cast<int64_t>(items_.size()), threads_, [&](Tickets& tickets) {
      Scratch<Kv> scratch;
      // Takes the next item early: its first keys are prefetched while the present item is computed.
      int64_t i, next;
      for (bool more = tickets.take(i); more; i = next) {
        more = tickets.take(next);
        compute(items_[i], more ? &items_[next] : nullptr, scratch);
      }
    });
    share(static_cast<int64_t>(merges_.size()), threads_, [&](Tickets& tickets) {
      Scratch<Kv> scratch;
      for (int64_t i; tickets.take(i);) merge_splits(merges_[i], scratch);
    });
  }

 private:
  // Fills items_ and merges_.  Expensive items come first, so that the items taken last are small.
  void plan() {
    int64_t cost = 0;
    std::vector<Item> unsplit;
    for (int s = 0; s < a_.seqs; ++s) {
      if (a_.lens[s] == 0) {
        write_zeros(s);
        continue;
      }
      const int rows = (a_.q_start[s + 1] - a_.q_start[s]) * group_;
      for (int row = 0; row < rows; row += kRows) {
        Item item{s, 0, row, std::min(kRows, rows - row), 0, 0};
        item.first = first_key(position(item, 0));
        item.last = position(item, item.rows - 1) + 1;
        for (item.kv_head = 0; item.kv_head < a_.kv_heads; ++item.kv_head) unsplit.push_back(item);
        cost += a_.kv_heads * item.cost();
      }
    }
    threads_ = cost < kWorthSharing ? 1 : a_.threads;

    const int64_t large = threads_ > 1 ? cost / (2 * threads_) : cost;  // at most 2 * threads items are larger
    int64_t partials = 0;
    for (Item& item : unsplit) {
      const int begin = item.first / kSplit, end = (item.last + kSplit - 1) / kSplit;
      if (item.cost() <= large || end - begin == 1) {
        items_.push_back(item);
        continue;
      }
      item.partial = partials;
      merges_.push_back(item);
      for (int split = begin; split < end; ++split) {
        Item part = item;
        part.first = std::max(item.first, split * kSplit);
        part.last = std::min(item.last, (split + 1) * kSplit);
        part.partial = partials;
        partials += partial_size(item);
        items_.push_back(part);
      }
    }
    partials_.resize(partials);
    std::stable_sort(items_.begin(), items_.end(), [](const Item& x, const Item& y) { return x.cost() > y.cost(); });
  }

  void write_zeros(int seq) const {
    for (int64_t token = a_.q_start[seq]; token < a_.q_start[seq + 1]; ++token) {
      for (int64_t head = 0; head < a_.heads; ++head) {
        T* out = static_cast<T*>(a_.out) + token * a_.out_token_stride + head * a_.out_head_stride;
        std::fill_n(out, a_.head_size, T{});
      }
    }
  }

  int64_t partial_size(const Item& item) const { return item.rows * (2 + static_cast<int64_t>(dim_)); }

  int position(const Item& item, int row) const {
    const int queries = a_.q_start[item.seq + 1] - a_.q_start[item.seq];
    return a_.lens[item.seq] - queries + (item.row + row) / group_;
  }

  int first_key(int position) const {
    return a_.window > 0 ? static_cast<int>(std::max<int64_t>(0, position + 1 - a_.window)) : 0;
  }

  // Offset, in elements, of a row of the item in q or out.
  int64_t row_offset(const Item& item, int row, int64_t token_stride, int64_t head_stride) const {
    const int64_t token = a_.q_start[item.seq] + (item.row + row) / group_;
    const int64_t head = item.kv_head * group_ + (item.row + row) % group_;
    return token * token_stride + head * head_stride;
  }

  void compute(const Item& item, const Item* next, Scratch<Kv>& s) {
    for (int r = 0; r < item.rows; ++r) {
      const T* q = static_cast<const T*>(a_.q) + row_offset(item, r, a_.q_token_stride, a_.q_head_stride);
      widen(s.query + r * dim_, kLanes, q, a_.head_size);
      s.last[r] = position(item, r) + 1;
      s.first[r] = first_key(s.last[r] - 1);
    }
    s.total.clear(item.rows, dim_);
    for (int begin = item.first / kSplit * kSplit; begin < item.last; begin += kSplit) {
      s.split.clear(item.rows, dim_);
      for (int tile = begin; tile < begin + kSplit; tile += kTile) {
        if (tile + kTile <= item.first || tile >= item.last) continue;
        if (tile + kTile < item.last) {
          locate(s.next, k_cache(), a_.k_block_stride, item, tile + kTile);
        } else if (next) {
          locate(s.next, k_cache(), a_.k_block_stride, *next, next->first / kTile * kTile);
        } else {
          std::copy_n(s.keys, kTile, s.next);
        }
        attend(item, tile, s);
      }
      if (item.partial >= 0) {
        float* p = partials_.data() + item.partial;
        p = std::copy_n(s.split.max, item.rows, p);
        p = std::copy_n(s.split.sum, item.rows, p);
        std::copy_n(s.split.acc, item.rows * dim_, p);
        return;
      }
      merge(s.total, s.split.max, s.split.sum, s.split.acc, item.rows, dim_);
    }
    finish(item, s.total);
  }

  void merge_splits(const Item& item, Scratch<Kv>& s) {
    s.total.clear(item.rows, dim_);
    const int splits = (item.last + kSplit - 1) / kSplit - item.first / kSplit;
    for (int i = 0; i < splits; ++i) {
      const float* p = partials_.data() + item.partial + i * partial_size(item);
      merge(s.total, p, p + item.rows, p + 2 * item.rows, item.rows, dim_);
    }
    finish(item, s.total);
  }

  void finish(const Item& item, State& total) {
    for (int r = 0; r < item.rows; ++r) {
      T* out = static_cast<T*>(a_.out) + row_offset(item, r, a_.out_token_stride, a_.out_head_stride);
      const float* acc = total.acc + r * dim_;
      const Floats share = broadcast(value_scale(item) / (total.sum[r] + sink(item, r, total.max[r])));
      int d = 0;
      for (; d + kLanes <= a_.head_size; d += kLanes) store(out + d, load(acc + d) * share);
      if (d == a_.head_size) continue;
      T rest[kLanes];
      store(rest, load(acc + d) * share);
      std::copy_n(rest, a_.head_size - d, out + d);
    }
  }

  // Contribution of the head's sink to a row's sum of exp2(score - max).
  float sink(const Item& item, int row, float max) const {
    if (!a_.sinks) return 0.0f;
    const float score = a_.sinks[item.kv_head * group_ + (item.row + row) % group_] * kLog2e;
    return exp2_one(std::min(score - max, 126.0f));  // beyond 2^126 the weights of earlier keys are zero
  }

  const Kv* k_cache() const { return static_cast<const Kv*>(a_.k_cache); }
  const Kv* v_cache() const { return static_cast<const Kv*>(a_.v_cache); }

  float key_scale(const Item& item) const { return a_.scales ? a_.scales[item.kv_head] : 1.0f; }
  float value_scale(const Item& item) const { return a_.scales ? a_.scales[a_.kv_heads + item.kv_head] : 1.0f; }

  // Adds keys [tile, tile + kTile) to s.split.
  void attend(const Item& item, int tile, Scratch<Kv>& s) {
    locate(s.keys, k_cache(), a_.k_block_stride, item, tile);
    locate(s.values, v_cache(), a_.v_block_stride, item, tile);
    const int begin = std::max(tile, item.first) - tile, end = std::min(tile + kTile, item.last) - tile;
    if (item.rows <= kInPlace && a_.head_size == dim_) {
      const auto in_place = [](const Kv* const* rows) {
        return [rows](int k, int c) { return load(rows[k] + c * kLanes); };
      };
      multiply(item, tile, s, in_place(s.keys), s.values);
      for (int r = 0; r < item.rows; ++r) weigh(item, r, tile, s);
      accumulate(item, tile, s, in_place(s.values), s.next);
    } else {
      const auto widened = [&](int k, int c) { return load(s.tile + c * kChunk + k * kLanes); };
      gather(s.tile, s.keys, begin, end, s.values);
      multiply(item, tile, s, widened, nullptr);
      for (int r = 0; r < item.rows; ++r) weigh(item, r, tile, s);
      gather(s.tile, s.values, begin, end, s.next);
      accumulate(item, tile, s, widened, nullptr);
    }
  }

  // Computes s.weight = scores of all rows, undefined for keys that no row sees.  Meanwhile prefetches the keys or
  // values at the addresses in `ahead`.
  template <class At>
  void multiply(const Item& item, int tile, Scratch<Kv>& s, const At& at, const Kv* const* ahead) const {
    each_group(item.rows, [&](int r, auto R) {
      const int from = std::max(s.first[r], tile) - tile, to = std::min(s.last[r + R - 1], tile + kTile) - tile;
      constexpr int kKeys = kLanes / R;
      for (int key = from / kKeys * kKeys; key < to; key += kKeys) {
        if (ahead) unroll<kKeys>([&](auto k) { fetch(ahead[key + k]); });
        dot<R>(s.weight + r * kTile, s.query + r * dim_, at, key, dim_);
      }
    });
  }

  // s.split.acc += s.weight * values.  The first and the last row of a group bound the keys of the rows in between.
  template <class At>
  void accumulate(const Item& item, int tile, Scratch<Kv>& s, const At& at, const Kv* const* ahead) const {
    each_group(item.rows, [&](int r, auto R) {
      const int from = std::max(s.first[r], tile) - tile, to = std::min(s.last[r + R - 1], tile + kTile) - tile;
      add_values<R>(
          s.split.acc + r * dim_, s.rescale + r, s.weight + r * kTile,
          [&](int k, int c) {
            if (ahead && c == 0) fetch(ahead[k]);
            return at(k, c);
          },
          from, to, dim_);
    });
  }

  // Sets rows to the addresses of the item's keys [tile, tile + kTile) in a cache.
  void locate(const Kv** rows, const Kv* cache, int64_t block_stride, const Item& item, int tile) const {
    const int begin = std::max(tile, item.first), end = std::min(tile + kTile, item.last);
    const int32_t* table = a_.tables + a_.rows[item.seq] * a_.table_stride;
    const int block_size = static_cast<int>(a_.block_size);
    for (int key = begin; key < end;) {
      const int offset = key % block_size, count = std::min(end - key, block_size - offset);
      const int64_t row = static_cast<int64_t>(item.kv_head) * block_size + offset;
      const Kv* from = cache + table[key / block_size] * block_stride + row * a_.head_size;
      for (int i = 0; i < count; ++i) rows[key - tile + i] = from + i * a_.head_size;
      key += count;
    }
    std::fill(rows, rows + (begin - tile), rows[begin - tile]);
    std::fill(rows + (end - tile), rows + kTile, rows[begin - tile]);
  }

  // Converts the keys or values at rows[begin] .. rows[end - 1] to float: `to` [chunks, kTile + 1, kLanes].  Other keys
  // in `to` keep their contents.
  void gather(float* to, const Kv* const* rows, int begin, int end, const Kv* const* ahead) const {
    for (int i = begin; i < end; ++i) {
      fetch(ahead[i]);
      widen(to + i * kLanes, kChunk, rows[i], a_.head_size);
    }
  }

  // Prefetches a key or value.  Blocks lie anywhere in memory, so the hardware prefetcher cannot predict the next one.
  void fetch(const Kv* row) const {
    const char* line = reinterpret_cast<const char*>(row);
    for (int64_t i = 0; i < a_.head_size * int64_t{sizeof(Kv)}; i += 64) __builtin_prefetch(line + i, 0, 2);
  }

  // Turns the scores of row r into weights, and updates max, sum and the factor for acc.
  void weigh(const Item& item, int r, int tile, Scratch<Kv>& s) {
    const float scale = a_.scale * key_scale(item);
    float* weight = s.weight + r * kTile;
    s.rescale[r] = 1.0f;
    const int first = s.first[r] - tile, last = s.last[r] - tile;
    if (first >= kTile || last <= 0) {
      std::fill_n(weight, kTile, 0.0f);
      return;
    }
    Floats score[kVectors];
    unroll<kVectors>([&](auto v) {
      constexpr int k = v * kLanes;
      score[v] = broadcast(kNone);
      if (k >= last || k + kLanes <= first) return;
      score[v] = load(weight + k);
      if (a_.soft_cap > 0) {
        score[v] = tanh(score[v] * broadcast(scale / a_.soft_cap)) * broadcast(a_.soft_cap * kLog2e);
      } else {
        score[v] = score[v] * broadcast(scale * kLog2e);
      }
      // Scores of keys that the row does not see may be NaN, so a select replaces them: adding -inf would keep the NaN.
      const Ints key = lane_indices() + k;
      score[v] = ((key >= first) & (key < last)) ? score[v] : broadcast(kNone);
    });
    Floats top = score[0];
    unroll<kVectors>([&](auto v) { top = max(top, score[v]); });
    const float new_max = std::max(s.split.max[r], max_lane(top));
    Floats sums = {};
    unroll<kVectors>([&](auto v) {
      const Floats w = exp2(score[v] - broadcast(new_max));
      store(weight + v * kLanes, w);
      sums += w;
    });
    s.rescale[r] = exp2_one(s.split.max[r] - new_max);
    s.split.max[r] = new_max;
    s.split.sum[r] = s.split.sum[r] * s.rescale[r] + sum(sums);
  }

  const AttentionArgs& a_;
  const int group_;  // G, query heads per KV head
  const int dim_;    // head size, padded to a multiple of kLanes
  int threads_ = 1;
  std::vector<Item> items_;
  std::vector<Item> merges_;  // items whose splits run as separate items
  std::vector<float> partials_;
};

}  // namespace

template <class T, class Kv>
void paged_attention(const AttentionArgs& args) {
  Attention<T, Kv>(args).run();
}

template void paged_attention<float, float>(const AttentionArgs&);
template void paged_attention<bf16, bf16>(const AttentionArgs&);
template void paged_attention<fp16, fp16>(const AttentionArgs&);
template void paged_attention<float, e4m3>(const AttentionArgs&);
template void paged_attention<bf16, e4m3>(const AttentionArgs&);
template void paged_attention<fp16, e4m3>(const AttentionArgs&);

}  // namespace quire::cpu
