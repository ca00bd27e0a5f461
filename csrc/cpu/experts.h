// A mixture of experts, in plain loops: what the GPU's kernels must compute.  Serving on a CPU takes transformers' experts.
//
// T: float, bf16 or fp16.  Sums are float; rounding to T is where the GPU's kernels round.
#pragma once

#include <cstdint>

namespace quire::cpu {

template <class T>
struct RouteArgs {
  const T* logits;  // [tokens, experts]
  int32_t*
      chosen;  // [tokens, top], out: the experts with the largest logits, the largest first, of equal ones the first
  float* weights;  // [tokens, top], out: their shares of the softmax over all experts
  int64_t tokens, experts, top;
  bool normalise, rounded;  // weights of a token are divided by their sum; and rounded to T
  int threads;
};

template <class T>
void route(const RouteArgs<T>& args);

template <class T>
struct ExpertsArgs {
  const T* x;             // [tokens, hidden]
  const int32_t* chosen;  // [tokens, top]
  const float* weights;   // [tokens, top]
  const T* gate_up;       // [experts, 2 * inner, hidden]: gate rows, then up rows; clamped: in turn
  const T* gate_up_bias;  // [experts, 2 * inner], or null
  const T* down;          // [experts, hidden, inner]
  const T* down_bias;     // [experts, hidden], or null
  T* between;             // [tokens, inner], for the call's own use
  float* totals;          // [tokens, hidden], likewise
  T* out;                 // [tokens, hidden], added to
  int64_t tokens, top, hidden, inner;
  bool clamped;  // g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), u = max(-limit, min(up, limit))
  float alpha, limit;
  int threads;
};

// out += sum over a token's experts of weight * (down activation(gate, up) + down_bias), rounded once before it is added.
template <class T>
void experts(const ExpertsArgs<T>& args);

}  // namespace quire::cpu
