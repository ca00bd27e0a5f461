// A mixture of experts for a few tokens: which experts each token has, and the sum of what they compute.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

constexpr int kMostExperts = 512, kMostPairs = 512;  // of a layer; of tokens and their experts in one call

struct RouteArgs {
  Dtype dtype;         // of logits: bf16 or fp16
  const void* logits;  // [tokens, experts]
  int* chosen;         // [tokens, top], out: the experts with the largest logits, the largest first
  float* weights;      // [tokens, top], out: their share of the softmax over all experts
  int tokens, experts, top;
  bool normalise;      // weights of a token are divided by their sum
  bool rounded;        // and rounded to dtype
};
void route(const RouteArgs& args, cudaStream_t stream);

// What an expert makes of a gate and an up row's product with its input:
//   silu     silu(gate) * up
//   clamped  g * sigmoid(alpha * g) * (u + 1), where g = min(gate, limit) and u = max(-limit, min(up, limit)): gpt-oss
enum class Activation { silu, clamped };

struct ExpertsArgs {
  Dtype dtype;               // of all but chosen, weights and sums: bf16 or fp16
  const void* x;             // [tokens, hidden]
  const int* chosen;         // [tokens, top]
  const float* weights;      // [tokens, top]
  const void* gate_up;       // [experts, 2 * inner, hidden]: of each expert gate rows, then up rows; clamped: in turn
  const void* gate_up_bias;  // [experts, 2 * inner], in the order of the rows; or null
  const void* down;          // [experts, hidden, inner]
  const void* down_bias;     // [experts, hidden], or null
  void* between;             // [tokens * top, inner], for the call's own use
  float* sums;               // [tokens * top, hidden], likewise
  void* out;                 // [tokens, hidden], added to
  int tokens, top, experts, hidden, inner;  // hidden and inner are multiples of 8
  Activation activation;
  float alpha, limit;  // of `clamped`
};
void experts(const ExpertsArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
