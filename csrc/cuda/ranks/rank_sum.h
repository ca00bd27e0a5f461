// All-reduce of a tensor over the ranks of a model (one GPU each), fused with the residual addition and the norm that
// follow it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

constexpr int kMaxRanks = 8, kSumCtas = 256, kMaxSummed = 16384;

// Protocol.  words: the call number in every 8 bytes.  blocks: plain data, followed by one call number per CTA.
enum class Sending { words, blocks };

struct RankSumArgs {
  Dtype dtype;       // dtype of all tensors: f32, bf16, fp16
  void* part;        // [rows, size], this rank's partial result
  void* plus;        // [rows, size], equal on all ranks: plus += reduced result; if null, part = reduced result
  const void* norm;  // [size]: normed = rms_norm(result, norm, eps) after the sum; or null
  void* normed;      // [rows, size]
  float eps;
  int64_t rows;
  int size;  // at most kMaxSummed; rows are 16-byte aligned
  int ctas;  // maximum CTAs, up to kSumCtas; all must be resident on each rank's GPU at once
  Sending sending;
  int64_t words_share, blocks_share;  // maximum bytes of part per CTA, sent as words or blocks; multiples of 16
  void* inboxes[kMaxRanks];           // one per rank, inbox_bytes() writable by all ranks; initially zeros
  int* calls;                         // [kSumCtas], private to this rank; initially zeros
  int rank, ranks;
};

// An inbox: sequence numbers of calls, then words, then blocks, each [2 alternating calls, source ranks, CTAs].
constexpr int64_t kMarkBytes = 16;  // bytes of a CTA's call number
constexpr int64_t inbox_bytes(int ranks, int64_t words_share, int64_t blocks_share) {
  return int64_t{2} * ranks * kSumCtas * (kMarkBytes + 2 * words_share + blocks_share);
}

// All ranks make the same calls, with equal sizes and in the same order.  All ranks get the same bits: parts are summed
// in rank order, then plus is added, in float32 with one rounding.  Waits on the GPU for the other ranks' calls,
// without a limit.
void rank_sum(const RankSumArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
