// A mixture of experts: which experts each token has, and the sum of what they compute.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

constexpr int kMostExperts = 512;   // experts per layer
constexpr int kMostTokens = 65535;  // tokens per call
constexpr int kMostPairs = 512;     // (token, expert) pairs per call of the kernels for few pairs

struct RouteArgs {
  Dtype dtype;         // dtype of the logits: bf16 or fp16
  const void* logits;  // [tokens, experts]
  int* chosen;         // [tokens, top], out: the experts with the largest logits, the largest first
  float* weights;      // [tokens, top], out: their share of the softmax over all experts
  int tokens, experts, top;
  bool normalise;  // weights of a token are divided by their sum
  bool rounded;    // weights are rounded to dtype
};
void route(const RouteArgs& args, cudaStream_t stream);

// What an expert makes of a gate and an up row's GEMM with its input:
//   silu     silu(gate) * up
//   clamped  g * sigmoid(alpha * g) * (u + 1), where g = min(gate, limit) and u = max(-limit, min(up, limit)): gpt-oss
enum class Activation { silu, clamped };

struct ExpertsArgs {
  Dtype dtype;               // dtype of all but chosen, weights and sums: bf16 or fp16
  const void* x;             // [tokens, hidden]
  const int* chosen;         // [tokens, top]
  const float* weights;      // [tokens, top]
  const void* gate_up;       // [experts, 2 * inner, hidden]: per expert gate rows, then up rows; clamped: interleaved
  const void* gate_up_bias;  // [experts, 2 * inner], in the order of the rows; or null
  const void* down;          // [experts, hidden, inner]
  const void* down_bias;     // [experts, hidden], or null
  void* between;             // scratch memory, like the next three: `memory_of` says how many bytes each needs
  void* sums;
  void* order;
  void* gathered;
  void* out;                                // [tokens, hidden], added to
  int tokens, top, experts, hidden, inner;  // hidden and inner are multiples of 8
  Activation activation;
  float alpha, limit;  // constants of `clamped`
};

// few, few_sm90: up to kMostPairs pairs, on any GPU since Ampere, and since Hopper; grouped: any number, on Hopper only.
enum class ExpertsWay { few, few_sm90, grouped };
ExpertsWay way_of(const ExpertsArgs& args);  // the fastest for these sizes on this GPU

struct ExpertsMemory {
  int64_t between, sums, order, gathered;  // bytes
};
ExpertsMemory memory_of(const ExpertsArgs& args, ExpertsWay way);

void experts(const ExpertsArgs& args, ExpertsWay way, cudaStream_t stream);

}  // namespace quire::cuda
