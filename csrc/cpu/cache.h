// Operators that write keys and values into the cache, copy and fill blocks, and gather blocks into a buffer.  They
// move bytes, and convert only to e4m3.

#pragma once

#include <cstdint>
#include <vector>

namespace quire::cpu {

struct Cache {
  char* data;            // [blocks, Hkv, block_size, D]; everything inside a block is contiguous
  int64_t block_stride;  // bytes from one block to the next
  char* block(int64_t id) const { return data + id * block_stride; }
};

// [T, Hkv, D] with any strides but contiguous rows of D.
struct TokenRows {
  const char* data;
  int64_t token_stride, head_stride;  // bytes
};

// Writes token t at index kv_indices[t] = block * block_size + offset of both caches; kv_indices[t] < 0: not stored.
// Two tokens must not share an index.
void kv_write(TokenRows key, TokenRows value, Cache k_cache, Cache v_cache, const int64_t* kv_indices, int64_t tokens,
              int64_t kv_heads, int64_t block_size, int64_t row_bytes, int threads);

// kv_write into e4m3 caches: an element is divided by the scale, rounded to nearest and limited to +-448.  T: float,
// bf16 or fp16.  scales [2, Hkv], for keys and for values.
template <class T>
void kv_write_e4m3(TokenRows key, TokenRows value, Cache k_cache, Cache v_cache, const float* scales,
                   const int64_t* kv_indices, int64_t tokens, int64_t kv_heads, int64_t block_size, int64_t head_size,
                   int threads);

// Copies block pairs[2i] to block pairs[2i + 1], in every layer's cache.  No block is written twice, or both read and
// written.
void block_copy(const std::vector<Cache>& caches, const int64_t* pairs, int64_t count, int64_t block_bytes,
                int threads);

// Fills the given blocks of every layer's cache with copies of `element`.
void block_fill(const std::vector<Cache>& caches, const int64_t* blocks, int64_t count, int64_t block_bytes,
                const char* element, int64_t element_bytes, int threads);

// buffer [count, caches, block_bytes].  block_gather copies block blocks[i] of cache c to buffer[i][c]; block_scatter
// copies buffer[i][c] back to that block.
void block_gather(const std::vector<Cache>& caches, const int64_t* blocks, int64_t count, int64_t block_bytes,
                  char* buffer, int threads);
void block_scatter(const std::vector<Cache>& caches, const int64_t* blocks, int64_t count, int64_t block_bytes,
                   const char* buffer, int threads);

}  // namespace quire::cpu
