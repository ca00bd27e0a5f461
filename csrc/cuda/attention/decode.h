// Attention of sequences with one query each over the paged cache: what the launchers take and promise.
//
//   HEAD GROUP  the query heads that read one KV head, up to 16 of them.  They are computed together, so that a key is
//               loaded once for all.  More heads to a KV head make several groups, which load its keys once each.
//   TILE        16 keys of one sequence and one KV head, from a multiple of 16 on.
//   SHARE       the consecutive tiles that one warp computes.  Tiles are counted sequence by sequence, in it head group
//               by head group, in it key by key.  All CTAs have equal parts, give or take a tile.  Where there is little
//               to do, each has a head group instead.  The warps of a CTA have equal shares.  So a share may begin and
//               end in the middle of a head group's keys.
//   PIECE       the tiles of a share that belong to one head group of one sequence.  The results of its pieces are
//               merged, in order: those of a CTA's warps in shared memory, then those of several CTAs by the last of
//               them to arrive.
//
//   warps   |      0      |      1      |      2      |     3       |  ...      shares of 13 tiles
//   tiles   |aaaaaaa|bbbbbbbbbbbbbbbbbbbbb|cccc|ddddddddd|eeeeeeeeeeeee...      a, b, ..: head groups of sequences
//   pieces  |   a   |  b  |      b      | b |c |  d  | d |   e     |
//
// decode_plan finds where each share begins, once a step for all layers.

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
  void* plan;  // decode_plan_bytes, 16-byte aligned
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
  const float* sinks;     // [heads]: a score without a value, in every softmax of the head; null: none
  const int32_t* tables;  // [max_rows, max_blocks]
  int64_t table_stride;
  const int32_t* rows;  // [seqs]
  int seqs;             // as in the plan
  int heads, kv_heads, head_size, block_size;
  float scale;
  float soft_cap;     // > 0: score = soft_cap * tanh(score / soft_cap)
  Dtype dtype;        // of q and out: bf16 or fp16
  Dtype cache_dtype;  // the same, or e4m3
  void* plan;         // as decode_plan wrote it
};

// Head sizes 64, 80, 96, 128, 192 and 256, block sizes 8, 16, 32 and 64.  The bindings have checked all that.
// rows and tables must have been written before decode_plan was called.  They and the plan are read early: the kernel in
// front of this one may still run.
// Reads no key outside the window and none past the end.  A sequence of no keys has its query's output set to zeros.
void decode(const DecodeArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
