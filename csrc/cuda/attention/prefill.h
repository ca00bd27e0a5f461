// Attention of prompt chunks over the paged cache: what the launchers take and promise.  prefill_mma.cuh computes it on any
// GPU since Ampere.  prefill_sm90.cu uses Hopper's own instructions for the head sizes that matter most there.
//
//   PACKED ROWS  The query heads that read the same KV head are rows of one matrix.  So a key is loaded once for all of
//                them.  Row r of a sequence, for KV head h, is query r / G and head h * G + r % G (G = heads / kv_heads).
//                A sequence with n queries has n * G rows for each KV head.
//   TILE         64 or 128 consecutive rows of one sequence and one KV head: what a CTA computes at a time.
//   ITEM         a tile and a range of keys.  That is all the keys it sees, or a part of them where there would be too
//                few tiles to fill the GPU (a few queries after a long cached prefix).
//
// prefill_plan writes the list of items once a step for all layers.  CTAs take them in order by a ticket.  Heavy sequences
// are first.  In a sequence one KV head follows the other, so that tiles that run together share keys in L2.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

constexpr int kPrefillMaxParts = 1024;  // of a tile, times its rows: more take longer to merge than they save

// 32 bytes, read by one thread as two int4.
struct PrefillItem {
  int seq;  // index into rows, q_start and lens
  int kv_head;
  int row;      // first packed row of the tile; the sequence may have fewer rows left than the tile holds
  int first;    // keys [first, last), first a multiple of 128; `last` is past the last key any row of the tile sees.
  int last;     // The causal border and the window still have to be masked
  int part;     // of `parts`; parts == 1: the item is the whole tile and its result goes straight to out
  int parts;    // at most kPrefillMaxParts / tile rows
  int partial;  // number of the tile's first partial result; that of this item is partial + part
};

// The items for one tile size.
struct PrefillList {
  int count;     // items
  int ticket;    // the next item to take: atomicAdd.  The last CTA to leave sets both back to 0 for the next layer
  int finished;  // CTAs that found no more items
  int unused;
};

// What the lists are made for.
struct PrefillTiling {
  int rows;            // of a tile
  bool whole_queries;  // a tile ends with the last head of a query: it has rows / G * G rows
  int parts_per_sm;    // tiles are cut into parts until this many items run on a multiprocessor; 0: never
};
constexpr int kPrefillLists = 3;
constexpr int kPrefillHopper =
    1;  // prefill_sm90's list; its tiles begin with a query's first head and end with a last one
constexpr PrefillTiling prefill_tiling(int list) {
  return list == 0   ? PrefillTiling{64, false, 2}
         : list == 1 ? PrefillTiling{128, true, 1}
                     : PrefillTiling{128, false, 2};
}

// Where everything lies in the bytes of the plan.  It depends on the arguments only.
struct PrefillPlan {
  PrefillList* list[kPrefillLists];
  PrefillItem* items[kPrefillLists];
  int capacity;  // items that fit in each list
  // Partial results, one a part of a tile.  The last part to arrive merges them in order.
  int rows;      // of partial results that there is room for
  int* arrived;  // [rows / 64] parts that have, at the tile's first partial; 0 between launches
  float* max;    // [partials, tile rows] running maximum, in units of log2, -inf where a row saw no key
  float* sum;    // [partials, tile rows]
  float* acc;    // [partials, tile rows, head_size] not yet divided by sum
};

struct PrefillPlanArgs {
  const int32_t* q_start;  // [seqs + 1]
  const int32_t* lens;     // [seqs]
  int first;               // sequences [first, seqs) are ours, the ones before are decodes
  int seqs;
  int heads, kv_heads, head_size;
  int window;
  void* plan;          // 16-byte aligned
  int64_t plan_bytes;  // at least prefill_plan_bytes; the same later in PrefillArgs
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
  const float* sinks;     // [heads]: a score without a value, in every softmax of the head; null: none
  const int32_t* tables;  // [max_rows, max_blocks]
  int64_t table_stride;
  const int32_t* rows;     // [seqs]
  const int32_t* q_start;  // [seqs + 1]
  const int32_t* lens;     // [seqs], keys including this step's, which are in the cache already.  0: out becomes zeros
  int first, seqs;         // sequences [first, seqs)
  int tokens;              // of the whole step
  int heads, kv_heads, head_size, block_size;
  float scale;
  int window;         // > 0: a query sees only this many keys, its own included
  float soft_cap;     // > 0: score = soft_cap * tanh(score / soft_cap)
  Dtype dtype;        // of q and out: bf16 or fp16
  Dtype cache_dtype;  // the same, or e4m3
  void* plan;         // as prefill_plan wrote it
  int64_t plan_bytes;
};

// Head sizes 64, 80, 96, 128, 192 and 256, block sizes 8, 16, 32 and 64, any G, scale > 0.  The bindings have checked that.
// Picks one of the two below.
void prefill(const PrefillArgs& args, cudaStream_t stream);

void prefill_mma(const PrefillArgs& args, cudaStream_t stream);

// Compute capability 9.x only.
bool prefill_sm90_takes(const PrefillArgs& args);
void prefill_sm90(const PrefillArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
