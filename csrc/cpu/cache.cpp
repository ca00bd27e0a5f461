#include "cpu/cache.h"

#include <algorithm>
#include <cstring>

#include "cpu/pool.h"
#include "cpu/simd.h"

namespace quire::cpu {

// Bytes below which waking a second thread takes longer than it saves.
constexpr int64_t kWorthSharing = 64 << 10;

namespace {

// For each token with kv_indices[t] >= 0, calls store(to, from, head) for the key rows (head 0 .. kv_heads - 1) and the
// value rows (head kv_heads .. 2 * kv_heads - 1).
template <class Store>
void write_rows(TokenRows key, TokenRows value, Cache k_cache, Cache v_cache, const int64_t* kv_indices, int64_t tokens,
                int64_t kv_heads, int64_t block_size, int64_t row_bytes, int threads, const Store& store) {
  constexpr int64_t kTokensPerItem = 16;
  const int64_t items = (tokens + kTokensPerItem - 1) / kTokensPerItem;
  if (2 * tokens * kv_heads * row_bytes < kWorthSharing) threads = 1;
  share(items, threads, [&](Tickets& tickets) {
    for (int64_t item; tickets.take(item);) {
      const int64_t end = std::min(tokens, (item + 1) * kTokensPerItem);
      for (int64_t t = item * kTokensPerItem; t < end; ++t) {
        if (kv_indices[t] < 0) continue;
        const int64_t block = kv_indices[t] / block_size, offset = kv_indices[t] % block_size;
        char* k = k_cache.data + block * k_cache.block_stride + offset * row_bytes;
        char* v = v_cache.data + block * v_cache.block_stride + offset * row_bytes;
        for (int64_t h = 0; h < kv_heads; ++h) {
          const int64_t head = h * block_size * row_bytes;
          store(k + head, key.data + t * key.token_stride + h * key.head_stride, h);
          store(v + head, value.data + t * value.token_stride + h * value.head_stride, kv_heads + h);
        }
      }
    }
  });
}

}  // namespace

void kv_write(TokenRows key, TokenRows value, Cache k_cache, Cache v_cache, const int64_t* kv_indices, int64_t tokens,
              int64_t kv_heads, int64_t block_size, int64_t row_bytes, int threads) {
  write_rows(key, value, k_cache, v_cache, kv_indices, tokens, kv_heads, block_size, row_bytes, threads,
             [&](char* to, const char* from, int64_t) { std::memcpy(to, from, row_bytes); });
}

template <class T>
void kv_write_e4m3(TokenRows key, TokenRows value, Cache k_cache, Cache v_cache, const float* scales,
                   const int64_t* kv_indices, int64_t tokens, int64_t kv_heads, int64_t block_size, int64_t head_size,
                   int threads) {
  const auto store_row = [&](char* to, const char* from, int64_t head) {
    const Floats scale = broadcast(scales[head]);
    T in[kLanes] = {};
    e4m3 out[kLanes];
    for (int64_t i = 0; i < head_size; i += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, head_size - i);
      std::memcpy(in, from + i * sizeof(T), n * sizeof(T));
      store(out, load(in) / scale);
      std::memcpy(to + i, out, n);
    }
  };
  write_rows(key, value, k_cache, v_cache, kv_indices, tokens, kv_heads, block_size, head_size, threads, store_row);
}

template void kv_write_e4m3<float>(TokenRows, TokenRows, Cache, Cache, const float*, const int64_t*, int64_t, int64_t,
                                   int64_t, int64_t, int);
template void kv_write_e4m3<bf16>(TokenRows, TokenRows, Cache, Cache, const float*, const int64_t*, int64_t, int64_t,
                                  int64_t, int64_t, int);
template void kv_write_e4m3<fp16>(TokenRows, TokenRows, Cache, Cache, const float*, const int64_t*, int64_t, int64_t,
                                  int64_t, int64_t, int);

namespace {

// Calls move(cache, c, i) for every cache c and every i < count.
template <class Move>
void over_blocks(const std::vector<Cache>& caches, int64_t count, int64_t block_bytes, int threads, const Move& move) {
  const int64_t items = static_cast<int64_t>(caches.size());
  if (items * count * block_bytes < kWorthSharing) threads = 1;
  share(items, threads, [&](Tickets& tickets) {
    for (int64_t c; tickets.take(c);) {
      for (int64_t i = 0; i < count; ++i) move(caches[c], c, i);
    }
  });
}

}  // namespace

void block_copy(const std::vector<Cache>& caches, const int64_t* pairs, int64_t count, int64_t block_bytes,
                int threads) {
  over_blocks(caches, count, block_bytes, threads, [&](const Cache& cache, int64_t, int64_t i) {
    std::memcpy(cache.block(pairs[2 * i + 1]), cache.block(pairs[2 * i]), block_bytes);
  });
}

void block_fill(const std::vector<Cache>& caches, const int64_t* blocks, int64_t count, int64_t block_bytes,
                const char* element, int64_t element_bytes, int threads) {
  over_blocks(caches, count, block_bytes, threads, [&](const Cache& cache, int64_t, int64_t i) {
    char* block = cache.block(blocks[i]);
    for (int64_t at = 0; at < block_bytes; at += element_bytes) std::memcpy(block + at, element, element_bytes);
  });
}

void block_gather(const std::vector<Cache>& caches, const int64_t* blocks, int64_t count, int64_t block_bytes,
                  char* buffer, int threads) {
  const int64_t width = static_cast<int64_t>(caches.size());
  over_blocks(caches, count, block_bytes, threads, [&](const Cache& cache, int64_t c, int64_t i) {
    std::memcpy(buffer + (i * width + c) * block_bytes, cache.block(blocks[i]), block_bytes);
  });
}

void block_scatter(const std::vector<Cache>& caches, const int64_t* blocks, int64_t count, int64_t block_bytes,
                   const char* buffer, int threads) {
  const int64_t width = static_cast<int64_t>(caches.size());
  over_blocks(caches, count, block_bytes, threads, [&](const Cache& cache, int64_t c, int64_t i) {
    std::memcpy(cache.block(blocks[i]), buffer + (i * width + c) * block_bytes, block_bytes);
  });
}

}  // namespace quire::cpu
