// The sum of a small tensor over the ranks of a model, each on a GPU of its own, in one kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

constexpr int kMostRanks = 8, kSumCtas = 64;
constexpr int kSumLeast = 4096;  // bytes of a share of an inbox, at least: a call of few bytes has CTAs with so many each

struct OneShotSumArgs {
  Dtype dtype;
  void* part;                 // [bytes], this rank's part; becomes the sum.  Starts at 16 bytes
  int64_t bytes, most_bytes;  // a multiple of 16; the most of any call, a multiple of kSumCtas * kSumLeast
  void* inboxes[kMostRanks];  // of each rank, one_shot_inbox_bytes() that all ranks can write; zeros at first
  int* calls;                 // [kSumCtas], of this rank alone; zeros at first
  int rank, ranks;
};

constexpr int64_t one_shot_inbox_bytes(int ranks, int64_t most_bytes) { return 2 * ranks * 2 * most_bytes; }

// All ranks make the same calls, with equal sizes and in the same order.  All get the same bits: parts are added in the order
// of ranks, in float32, and rounded once.  Waits on the GPU until the other ranks have made the call, however long.
void one_shot_sum(const OneShotSumArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
