// Operators that write keys and values into the cache, copy and fill blocks, and move blocks to a buffer and back.
// csrc/ops.cpp has the guarantees.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cuda/common/dtype.h"

namespace quire::cuda {

// Destination of a layer's keys and values.
struct KvTarget {
  void *k_cache, *v_cache;                 // [blocks, kv_heads, block_size, size]
  int64_t k_block_stride, v_block_stride;  // elements from one block to the next
  int block_size;
  const int64_t* kv_indices;  // [tokens]: block * block_size + offset; negative: not stored
  const float* scales;        // [2, kv_heads] if the cache is e4m3
};

// Keys or values [tokens, kv_heads, size]; rows of `size` are contiguous.  Strides in elements.
struct TokenRows {
  const void* data;
  int64_t token_stride, head_stride;
};

struct KvWriteArgs {
  Dtype dtype, stored;  // key and value: f32, bf16, fp16 · caches: the same, or e4m3
  TokenRows key, value;
  KvTarget to;
  int64_t tokens;
  int kv_heads, size;
};
void kv_write(const KvWriteArgs& args, cudaStream_t stream);

// The caches (K and V of every layer), and the blocks to move.
struct BlockArgs {
  std::vector<char*> caches;  // device pointers
  int64_t block_stride;       // bytes from one block to the next
  int64_t block_bytes;
  int64_t count;  // number of pairs, or of blocks
};

// pairs [count, 2], on the device: (source block, destination block).
void block_copy(const BlockArgs& args, const int64_t* pairs, cudaStream_t stream);

// blocks [count], on the device; filled with repetitions of the element (1, 2 or 4 bytes).
void block_fill(const BlockArgs& args, const int64_t* blocks, uint32_t element, int element_bytes, cudaStream_t stream);

// buffer [count, caches, block_bytes], on the device.  block_gather copies block blocks[i] of cache c to buffer[i][c];
// block_scatter copies buffer[i][c] back to that block.
void block_gather(const BlockArgs& args, const int64_t* blocks, char* buffer, cudaStream_t stream);
void block_scatter(const BlockArgs& args, const int64_t* blocks, const char* buffer, cudaStream_t stream);

}  // namespace quire::cuda
