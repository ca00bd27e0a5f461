// A mixture of experts in plain loops, the reference for the GPU kernels.  A CPU serves models with transformers'
// experts.
//
// T: float, bf16 or fp16.  Sums are float; values are rounded to T at the same points as in the GPU kernels.
#pragma once

#include <cstdint>
#include <optional>

#include "experts_layout.h"

namespace quire::cpu {

template <class T>
struct RouteArgs {
  const T* logits;  // [tokens, experts]
  int32_t* chosen;  // [tokens, top], out: experts with the largest logits, in descending order, the lower index first
  float* weights;   // [tokens, top], out: their probabilities in a softmax over all experts
  int64_t tokens, experts, top;
  bool normalise, rounded;  // divide a token's weights by their sum; round weights to T
  int threads;
};

template <class T>
void route(const RouteArgs<T>& args);

template <class T>
struct ExpertsArgs {
  const T* x;                                    // [tokens, hidden]
  const int32_t* chosen;                         // [tokens, top]
  const float* weights;                          // [tokens, top]
  std::optional<experts_layout::Format> packed;  // format of gate_up and down (experts_layout.h); none: rows of T
  const void* gate_up;    // [experts, 2 * inner, hidden]: gate rows, then up rows; alternating if clamped
  const T* gate_up_bias;  // [experts, 2 * inner], or null
  const void* down;       // [experts, hidden, inner]
  const T* down_bias;     // [experts, hidden], or null
  T* between;             // [tokens, inner], scratch
  float* totals;          // [tokens, hidden], scratch
  T* out;                 // [tokens, hidden]
  bool add;               // add to out; if false, overwrite it
  int64_t tokens, top, hidden, inner;
  bool clamped;  // g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), u = max(-limit, min(up, limit))
  float alpha, limit;
  int threads;
};

// out = sum over a token's experts of weight * (down activation(gate, up) + down_bias), rounded once, before any
// addition to out.
template <class T>
void experts(const ExpertsArgs<T>& args);

}  // namespace quire::cpu
