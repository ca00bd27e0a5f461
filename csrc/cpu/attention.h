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
  const float* scales;                     // [2, Hkv] of an e4m3 cache, for keys and for values; else null
  const float* sinks;                      // [H]: a score without a value, in every softmax of the head; null: none

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

// T: float, bf16 or fp16, of q and out.  Kv: of both caches, T or e4m3.  Sums are kept in float.
// A sequence with lens 0 has zeros as its result.
// The result of one query depends only on the query, its position, the keys and values it sees, window, soft cap
// and sinks.
// It does not depend on other sequences, the chunks of its prompt, block places, block size or the number of threads.
// One exception: an infinite or NaN value may reach earlier queries of the same chunk, as 0 * inf.
// The kernel never reads a key that no query of this call sees.
template <class T, class Kv>
void paged_attention(const AttentionArgs& args);

}  // namespace quire::cpu
