// The sum of a tensor over the ranks of a model, each on a GPU of its own, with the residual and the norm that follow it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

constexpr int kMostRanks = 8, kSumCtas = 256, kMaxSummed = 16384;

// How parts travel.  words: with the call's number in every 8 bytes.  blocks: plain, with one number a CTA after them.
enum class Sending { words, blocks };

struct RankSumArgs {
  Dtype dtype;       // of everything: f32, bf16, fp16
  void* part;        // [rows, size], this rank's part
  void* plus;        // [rows, size], equal on all ranks: += the sum; or null: part = the sum
  const void* norm;  // [size], then normed = rms_norm(the result, norm, eps); or null
  void* normed;      // [rows, size]
  float eps;
  int64_t rows;
  int size;  // at most kMaxSummed; rows start at 16 bytes
  int ctas;  // at most, up to kSumCtas; all must fit on each rank's GPU at once
  Sending sending;
  int64_t words_share, blocks_share;  // bytes of parts that a CTA may send in a call, either way; multiples of 16
  void* inboxes[kMostRanks];          // of each rank, inbox_bytes() that all ranks can write; zeros at first
  int* calls;                         // [kSumCtas], of this rank alone; zeros at first
  int rank, ranks;
};

// An inbox: numbers of calls, then words, then blocks, each [2 calls in turn, from each rank, CTAs].
constexpr int64_t kMarkBytes = 16;  // of a CTA's number of a call
constexpr int64_t inbox_bytes(int ranks, int64_t words_share, int64_t blocks_share) {
  return int64_t{2} * ranks * kSumCtas * (kMarkBytes + 2 * words_share + blocks_share);
}

// All ranks make the same calls, with equal sizes and in the same order.  All get the same bits: parts are added in the order
// of ranks, in float32, then plus, with one rounding.  Waits on the GPU until the other ranks have made the call, however long.
void rank_sum(const RankSumArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
