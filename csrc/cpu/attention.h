// Paged attention: decode and chunked prefill of any mix of sequences in one ragged call.

#pragma once

#include <cstdint>

namespace quire::cpu {

constexpr int64_t kMaxHeadSize = 512;

struct AttentionArgs {
  const void* q;                          // [T, H, D]
  void* out;                              // [T, H, D]
  int64_t q_token_stride, q_head_stride;  // elements; rows of D are contiguous
  int64_t out_token_stride, out_head_stride;

  const void* k_cache;  // [blocks, Hkv, block_size, D]; everything inside a block is contiguous
  const void* v_cache;
  int64_t k_block_stride, v_block_stride;  // elements from one block to the next
  const float* scales;                     // [2, Hkv], for keys and for values, if the cache is e4m3; else null
  const float* sinks;  // [H]: attention sinks: a score without a value in every softmax of a head; or null

  const int32_t* tables;   // [max_rows, max_blocks]
  int64_t table_stride;    // elements
  const int32_t* rows;     // [S]
  const int32_t* q_start;  // [S + 1]
  const int32_t* lens;     // [S]

  int64_t seqs, heads, kv_heads, head_size, block_size;
  float scale;
  int64_t window;  // 0: none
  float soft_cap;  // 0: none
  int threads;     // at::get_num_threads()
};

// T: float, bf16 or fp16, the dtype of q and out.  Kv: the dtype of both caches, T or e4m3.  Accumulates in float.  A
// sequence with lens 0 gives zeros.
//
// A query's result depends only on the query, its position, its visible keys and values, window, soft cap and sinks.
// It does not depend on other sequences, the chunks of its prompt, block ids, block size or the number of threads.  One
// exception: if a value is infinite or NaN, earlier queries of the same chunk may become NaN, by 0 * inf.  The kernel
// never reads a key that no query of this call sees.
template <class T, class Kv>
void paged_attention(const AttentionArgs& args);

}  // namespace quire::cpu
