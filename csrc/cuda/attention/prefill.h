// Interface of the prefill attention kernels: prompt chunks over the paged KV cache.  prefill_mma.cuh runs on any GPU
// since Ampere.  prefill_sm90.cu uses Hopper's wgmma and TMA for head sizes 64 and 128.
//
//   PACKED ROWS  The query heads that read the same KV head are rows of one matrix, so a key is loaded once for all of
//                them. Row r of a sequence, for KV head h, is query r / G and head h * G + r % G (G = heads /
//                kv_heads). A sequence with n queries has n * G rows per KV head.
//   TILE         64 or 128 consecutive rows of one sequence and one KV head: the unit that a CTA computes.
//   ITEM         a tile and a range of keys: all keys visible to the tile, or a part of them (split-KV) if there are
//                too few tiles to fill the GPU (a few queries after a long cached prefix).
//
// prefill_plan writes the list of items once per step for all layers.  CTAs take items in order by a ticket counter,
// expensive sequences first.  Within a sequence, KV heads follow one another, so that tiles that run together share
// keys in L2.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

constexpr int kPrefillMaxParts = 1024;  // maximum of (parts per tile) * (rows per tile), to limit the cost of merging

// 32 bytes, loaded by one thread as two int4.
struct PrefillItem {
  int seq;  // index into rows, q_start and lens
  int kv_head;
  int row;      // first packed row of the tile; the sequence may have fewer rows left than the tile
  int first;    // first key, a multiple of 128
  int last;     // one past the last key visible to any row; the kernel still masks causal border and window
  int part;     // index of this part of the tile
  int parts;    // parts of the tile, at most kPrefillMaxParts / tile rows; 1: the item is the tile and writes to out
  int partial;  // index of the tile's first partial result; this part's index is partial + part
};

// Items for one tile size.
struct PrefillList {
  int count;     // items
  int ticket;    // next item to take: atomicAdd.  The last CTA resets ticket and finished to 0 for the next layer
  int finished;  // CTAs that found no more items
  int unused;
};

// Tile size of a list, and when its tiles are split.
struct PrefillTiling {
  int rows;               // rows per tile
  bool complete_queries;  // a tile ends with the last head of a query: it has rows / G * G rows
  int parts_per_sm;       // tiles are split while a multiprocessor has fewer items than this; 0: never
};
constexpr int kPrefillLists = 3;
constexpr int kPrefillHopper = 1;  // index of prefill_sm90's list, whose tiles consist of complete queries
constexpr PrefillTiling prefill_tiling(int list) {
  return list == 0   ? PrefillTiling{64, false, 2}
         : list == 1 ? PrefillTiling{128, true, 1}
                     : PrefillTiling{128, false, 2};
}

// Layout of the plan's memory: depends only on the arguments of prefill_plan_layout().
struct PrefillPlan {
  PrefillList* list[kPrefillLists];
  PrefillItem* items[kPrefillLists];
  int capacity;  // capacity of each list, in items
  // Partial results, one per part of a tile.  The CTA that finishes a tile's last part merges all of them in order.
  int rows;      // capacity of the partial results, in rows
  int* arrived;  // [rows / 64] finished parts, at the index of the tile's first partial result; 0 between launches
  float* max;    // [partials, tile rows] running maximum, in units of log2; -inf if the row saw no key
  float* sum;    // [partials, tile rows]
  float* acc;    // [partials, tile rows, head_size] not yet divided by sum
};

struct PrefillPlanArgs {
  const int32_t* q_start;  // [seqs + 1]
  const int32_t* lens;     // [seqs]
  int first;               // plans sequences [first, seqs); earlier sequences are decodes
  int seqs;
  int heads, kv_heads, head_size;
  int window;
  void* plan;          // 16-byte aligned
  int64_t plan_bytes;  // at least prefill_plan_bytes; PrefillArgs takes the same value
};

int64_t prefill_plan_bytes(int max_seqs, int max_tokens, int heads, int kv_heads, int head_size);
PrefillPlan prefill_plan_layout(void* plan, int64_t bytes, int head_size);

// Writes the plan: one small launch.  Nothing is launched if there are no sequences.
void prefill_plan(const PrefillPlanArgs& args, cudaStream_t stream);

// Strides count elements.
struct PrefillArgs {
  const void* q;  // [tokens, heads, head_size], rows of head_size contiguous and 16-byte aligned
  void* out;
  int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
  const void* k_cache;  // [blocks, kv_heads, block_size, head_size], contiguous inside a block, 16-byte aligned
  const void* v_cache;
  int64_t k_block_stride, v_block_stride;
  int64_t blocks;
  const float* scales;    // [2, kv_heads], for keys and for values, with an e4m3 cache; else null
  const float* sinks;     // [heads]: attention sink, a score without a value in every softmax of its head; or null
  const int32_t* tables;  // [max_rows, max_blocks]
  int64_t table_stride;
  const int32_t* rows;     // [seqs]
  const int32_t* q_start;  // [seqs + 1]
  const int32_t* lens;     // [seqs]: keys in the cache, including this step's; 0: out becomes zeros
  int first, seqs;         // sequences [first, seqs)
  int tokens;              // tokens of the complete step
  int heads, kv_heads, head_size, block_size;
  float scale;
  int window;         // > 0: a query sees only its last `window` keys, including its own
  float soft_cap;     // > 0: score = soft_cap * tanh(score / soft_cap)
  Dtype dtype;        // dtype of q and out: bf16 or fp16
  Dtype cache_dtype;  // dtype, or e4m3
  void* plan;         // written by prefill_plan
  int64_t plan_bytes;
};

// Dispatches to prefill_mma() or prefill_sm90().  Supports head sizes 64, 80, 96, 128, 192 and 256, block sizes 8, 16,
// 32 and 64, any G, and scale > 0; the bindings check them.
void prefill(const PrefillArgs& args, cudaStream_t stream);

void prefill_mma(const PrefillArgs& args, cudaStream_t stream);

// Whether prefill_sm90() supports these arguments; both need compute capability 9.x.
bool prefill_sm90_takes(const PrefillArgs& args);
void prefill_sm90(const PrefillArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
