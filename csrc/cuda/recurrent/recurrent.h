// Layers with a state per slot: the causal convolution over a few tokens, and the linear recurrence of Gated DeltaNet
// and Mamba2.  csrc/ops.cpp has the guarantees, cpu/recurrent.h the same operators on a CPU.
//
// Both operators update states in place.  Sequences with a length of 0 are padding of a CUDA graph: their outputs are 0
// and no state is read or written.  Outputs of tokens that belong to no sequence are not written.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace quire::cuda {

struct Keep {
  int32_t end;    // the copy is taken when the step's tokens before this index are computed
  int32_t place;  // index in `states` that gets the copy
};

struct Packed {
  const int32_t* slots;   // [sequences]
  const int32_t* starts;  // [sequences + 1]
  const int32_t* lens;    // [sequences]; 0: padding; null: there is no padding
  int sequences;
  const Keep* keeps;  // [keep_count], by ascending end
  int keep_count;
};

struct ConvArgs {
  Dtype dtype;          // dtype of x, states and out
  const void* x;        // [tokens, channels]
  int64_t x_stride;     // elements between tokens
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels] or null
  void* states;         // [slots, taps - 1, channels]
  void* out;            // [tokens, channels]
  int64_t tokens, channels;
  int taps;  // kMinTaps to kMaxTaps
  bool silu;
  Packed packed;
};
constexpr int kMinTaps = 2, kMaxTaps = 4;
void causal_conv(const ConvArgs& args, cudaStream_t stream);

// [tokens, heads, size]; a head's elements are contiguous.  Strides in elements.
struct HeadRows {
  const void* data;
  int64_t token_stride, head_stride;
};

struct RecurrenceArgs {
  Dtype dtype;                         // dtype of q, k and v
  HeadRows q, k;                       // [tokens, key_heads, keys]
  HeadRows v;                          // [tokens, heads, values]
  const float* decay;                  // [tokens, heads]: logarithm of the factor of the old state
  const float* beta;                   // [tokens, heads] or null
  float* states;                       // [slots, heads, keys, values]
  float* out;                          // [tokens, heads, values]
  int heads, key_heads, keys, values;  // keys: at most kMaxKeys
  float q_scale, eps;
  Packed packed;
};
constexpr int kMaxKeys = 256;
void linear_recurrence(const RecurrenceArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
