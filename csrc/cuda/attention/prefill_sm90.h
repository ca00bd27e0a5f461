// Interface between prefill_sm90.cu and its kernels, which are compiled in separate files.
#pragma once

#include <cuda.h>

#include "cuda/attention/prefill.h"

namespace quire::cuda::sm90 {

constexpr int kRows = 128;  // rows per tile

struct Params {
  CUtensorMap q, k, v;  // [tokens, kv_heads, G, D]; [blocks, kv_heads, block_size, D]
  void* out;
  int64_t out_token_stride, out_head_stride;
  const int32_t* tables;
  int64_t table_stride;
  const int32_t *rows, *q_start, *lens;
  int group, tile_queries;  // G and 128 / G
  int block_size;
  int window;
  float scale_log2;    // scale * log2(e): turns a score into an exponent of 2
  float slack;         // 8 / scale_log2: a score may exceed the softmax base by this much
  const float* sinks;  // [heads], or null
  float cap_in;        // with a soft cap: scores become tanh(cap_in * score) first; else 0
  PrefillList* list;
  const PrefillItem* items;
  int* arrived;  // as in PrefillPlan, but two counters per tile (one per warpgroup), with one byte per warp
  float *max, *sum, *acc;
};

template <class T, int D>
void run(const Params& params, int sms, cudaStream_t stream);

}  // namespace quire::cuda::sm90
