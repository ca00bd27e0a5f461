// Moving keys and values: into the cache, between blocks, over blocks, and to a buffer and back.  csrc/ops.cpp
// has the promises.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cuda/common/dtype.h"

namespace quire::cuda {

// Where a layer's keys and values go.
struct KvTarget {
  void *k_cache, *v_cache;                 // [blocks, kv_heads, block_size, size]
  int64_t k_block_stride, v_block_stride;  // numbers from one block to the next
  int block_size;
  const int64_t* kv_indices;  // [tokens]: block * block_size + offset; negative: nowhere
  const float* scales;        // [2, kv_heads] if the cache is e4m3
};

// [tokens, kv_heads, size] of keys or values; rows of `size` are contiguous.  Strides count numbers.
struct TokenRows {
  const void* data;
  int64_t token_stride, head_stride;
};

struct KvWriteArgs {
  Dtype dtype, stored;  // of key and value: f32, bf16, fp16 · of the caches: the same, or e4m3
  TokenRows key, value;
  KvTarget to;
  int64_t tokens;
  int kv_heads, size;
};
void kv_write(const KvWriteArgs& args, cudaStream_t stream);

// Every layer's K and V.
struct BlockArgs {
  std::vector<char*> caches;  // on the device
  int64_t block_stride;       // bytes from one block to the next
  int64_t block_bytes;
  int64_t count;  // of pairs, or of blocks
};

// pairs [count, 2], on the device: (from block, to block).
void block_copy(const BlockArgs& args, const int64_t* pairs, cudaStream_t stream);

// blocks [count], on the device; filled with the element (of 1, 2 or 4 bytes) over and over.
void block_fill(const BlockArgs& args, const int64_t* blocks, uint32_t element, int element_bytes, cudaStream_t stream);

// buffer [count, caches, block_bytes], on the device: block blocks[i] of cache c to buffer[i][c], and back.
void block_gather(const BlockArgs& args, const int64_t* blocks, char* buffer, cudaStream_t stream);
void block_scatter(const BlockArgs& args, const int64_t* blocks, const char* buffer, cudaStream_t stream);

}  // namespace quire::cuda
