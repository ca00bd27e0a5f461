// A mixture of experts: routing (the top-k experts of each token), and the weighted sum of the experts' outputs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include <optional>

#include "cuda/common/dtype.h"
#include "experts_layout.h"

namespace quire::cuda {

constexpr int kMaxExperts = 512;   // experts per layer
constexpr int kMaxTokens = 65535;  // tokens per call
constexpr int kMaxPairs = 512;     // (token, expert) pairs per call of the kernels for few pairs

struct RouteArgs {
  Dtype dtype;         // dtype of the logits: bf16 or fp16
  const void* logits;  // [tokens, experts]
  int* chosen;         // [tokens, top], out: the experts with the largest logits, in descending order
  float* weights;      // [tokens, top], out: their probabilities in a softmax over all experts
  int tokens, experts, top;
  bool normalise;  // divide a token's weights by their sum
  bool rounded;    // round weights to dtype
};
void route(const RouteArgs& args, cudaStream_t stream);

// Activation of an expert, from its gate and up GEMM results:
//   silu     silu(gate) * up
//   clamped  g * sigmoid(alpha * g) * (u + 1), where g = min(gate, limit) and u = max(-limit, min(up, limit)): gpt-oss
enum class Activation { silu, clamped };

struct ExpertsArgs {
  Dtype dtype;           // dtype of all tensors but chosen, weights and sums: bf16 or fp16
  const void* x;         // [tokens, hidden]
  const int* chosen;     // [tokens, top]
  const float* weights;  // [tokens, top]
  // Format of gate_up and down in the layout of experts_layout.h, with x in bf16; none: plain rows in dtype, as below.
  std::optional<experts_layout::Format> packed;
  const void* gate_up;       // [experts, 2 * inner, hidden]: per expert gate rows, then up rows; clamped: alternating
  const void* gate_up_bias;  // [experts, 2 * inner], in the order of the rows; or null
  const void* down;          // [experts, hidden, inner]
  const void* down_bias;     // [experts, hidden], or null
  void* between;             // scratch, as are sums, order and gathered; memory_of() returns the bytes of each
  void* sums;
  void* order;
  void* gathered;
  void* out;                                // [tokens, hidden]
  bool add;                                 // add to out; if false, overwrite it
  int tokens, top, experts, hidden, inner;  // hidden and inner are multiples of 8
  Activation activation;
  float alpha, limit;  // constants of `clamped`
};

// few: up to kMaxPairs pairs, on any GPU since Ampere.  few_sm90: up to kMaxPairs pairs, since Hopper.  grouped: any
// number of pairs, on Hopper only.
enum class ExpertsWay { few, few_sm90, grouped };
ExpertsWay way_of(const ExpertsArgs& args);  // returns the fastest way for these sizes on this GPU
bool takes_packed(const ExpertsArgs& args);  // whether this GPU supports packed weights of these sizes

struct ExpertsMemory {
  int64_t between, sums, order, gathered;  // bytes
};
ExpertsMemory memory_of(const ExpertsArgs& args, ExpertsWay way);

void experts(const ExpertsArgs& args, ExpertsWay way, cudaStream_t stream);

}  // namespace quire::cuda
