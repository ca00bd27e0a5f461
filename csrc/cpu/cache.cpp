#include "cache.h"

#include <algorithm>
#include <cstring>

#include "pool.h"

namespace quire::cpu {

// Below this many bytes one thread is done before a second one has woken up.
constexpr int64_t kWorthSharing = 64 << 10;

void kv_write(TokenRows key, TokenRows value, Cache k_cache, Cache v_cache, const int64_t* slots, int64_t tokens,
              int64_t kv_heads, int64_t block_size, int64_t row_bytes, int threads) {
  constexpr int64_t kTokensPerItem = 16;
  const int64_t items = (tokens + kTokensPerItem - 1) / kTokensPerItem;
  if (2 * tokens * kv_heads * row_bytes < kWorthSharing) threads = 1;
  share(items, threads, [&](Tickets& tickets) {
    for (int64_t item; tickets.take(item);) {
      const int64_t end = std::min(tokens, (item + 1) * kTokensPerItem);
      for (int64_t t = item * kTokensPerItem; t < end; ++t) {
        if (slots[t] < 0) continue;
        const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        char* k = k_cache.data + block * k_cache.block_stride + offset * row_bytes;
        char* v = v_cache.data + block * v_cache.block_stride + offset * row_bytes;
        for (int64_t h = 0; h < kv_heads; ++h) {
          const int64_t head = h * block_size * row_bytes;
          std::memcpy(k + head, key.data + t * key.token_stride + h * key.head_stride, row_bytes);
          std::memcpy(v + head, value.data + t * value.token_stride + h * value.head_stride, row_bytes);
        }
      }
    }
  });
}

void block_copy(const std::vector<Cache>& caches, const int64_t* pairs, int64_t count, int64_t block_bytes,
                int threads) {
  const int64_t items = static_cast<int64_t>(caches.size());  // one thread per cache keeps the pairs in order
  if (items * count * block_bytes < kWorthSharing) threads = 1;
  share(items, threads, [&](Tickets& tickets) {
    for (int64_t item; tickets.take(item);) {
      const Cache& cache = caches[item];
      for (int64_t i = 0; i < count; ++i) {
        std::memmove(cache.data + pairs[2 * i + 1] * cache.block_stride, cache.data + pairs[2 * i] * cache.block_stride,
                     block_bytes);
      }
    }
  });
}

void block_fill(const std::vector<Cache>& caches, const int64_t* blocks, int64_t count, int64_t block_bytes,
                const char* element, int64_t element_bytes, int threads) {
  const int64_t items = static_cast<int64_t>(caches.size());
  if (items * count * block_bytes < kWorthSharing) threads = 1;
  share(items, threads, [&](Tickets& tickets) {
    for (int64_t item; tickets.take(item);) {
      for (int64_t i = 0; i < count; ++i) {
        char* block = caches[item].data + blocks[i] * caches[item].block_stride;
        for (int64_t at = 0; at < block_bytes; at += element_bytes) std::memcpy(block + at, element, element_bytes);
      }
    }
  });
}

}  // namespace quire::cpu
