// Interface of the decode attention kernels: sequences with one query each, over the paged KV cache.
//
//   HEAD GROUP  up to 16 query heads that read one KV head.  They are computed together, so a key is loaded once for all
//               of them.  If more query heads read a KV head, they form several groups, and each group loads the keys.
//   TILE        16 keys of one sequence and one KV head, starting at a multiple of 16.
//   SHARE       consecutive tiles for one warp. Tiles are ordered by sequence, then head group, then key. All CTAs get the same
//               number of tiles (+- 1); with little work each CTA gets one head group instead. The warps of a CTA have equal
//               shares.  So a share may begin and end in the middle of a head group's keys.
//   SEGMENT     the tiles of a share that belong to one head group of one sequence. Segments of a head group are merged in
//               order (split-KV): first those of a CTA's warps, in shared memory, then those of several CTAs, by the last of
//               these CTAs to finish.
//
//   warps     |      0      |      1      |      2      |     3       |  ...      shares of 13 tiles
//   tiles     |aaaaaaa|bbbbbbbbbbbbbbbbbbbbb|cccc|ddddddddd|eeeeeeeeeeeee...      a, b, ..: head groups of sequences
//   segments  |   a   |  b  |      b      | b |c |  d  | d |   e     |
//
// decode_plan computes where each share begins, once per step for all layers.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

constexpr int kDecodeMaxSeqs = 4096;

struct DecodePlanArgs {
  const int32_t* q_start;  // [seqs + 1]
  const int32_t* lens;     // [seqs]
  int seqs;                // at most kDecodeMaxSeqs, each with one query or none
  int heads, kv_heads, head_size;
  int window;
  void* plan;  // decode_plan_bytes() bytes, 16-byte aligned
};

int64_t decode_plan_bytes(int max_seqs, int heads, int kv_heads, int head_size);

// Writes the plan: one small launch.
void decode_plan(const DecodePlanArgs& args, cudaStream_t stream);

// Strides count elements.
struct DecodeArgs {
  const void* q;  // [tokens, heads, head_size], rows of head_size contiguous and 4-byte aligned
  void* out;
  int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
  const void* k_cache;  // [blocks, kv_heads, block_size, head_size], contiguous inside a block, 16-byte aligned
  const void* v_cache;
  int64_t k_block_stride, v_block_stride;
  const float* scales;    // [2, kv_heads], for keys and for values, with an e4m3 cache; else null
  const float* sinks;     // [heads]: attention sink, a score without a value in every softmax of its head; or null
  const int32_t* tables;  // [max_rows, max_blocks]
  int64_t table_stride;
  const int32_t* rows;  // [seqs]: row of `tables` of each sequence
  int seqs;             // as in DecodePlanArgs
  int heads, kv_heads, head_size, block_size;
  float scale;
  float soft_cap;     // > 0: score = soft_cap * tanh(score / soft_cap)
  Dtype dtype;        // dtype of q and out: bf16 or fp16
  Dtype cache_dtype;  // dtype, or e4m3
  void* plan;         // written by decode_plan
};

// Supports head sizes 64, 80, 96, 128, 192 and 256 and block sizes 8, 16, 32 and 64; the bindings check them.  rows and
// tables must be written before decode_plan is called: this kernel reads them and the plan before the preceding kernel
// has ended.  Reads no key outside the window or past the sequence's end.  A sequence without keys gets zeros.
void decode(const DecodeArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
