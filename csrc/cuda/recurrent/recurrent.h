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
  Dtype dtype;         // dtype of q, k and v
  HeadRows q, k;       // [tokens, key_heads, keys]
  HeadRows v;          // [tokens, heads, values]
  const float* decay;  // [tokens, heads]: logarithm of the factor of the old state
  const float* beta;   // [tokens, heads] or null
  float* states;       // [slots, heads, keys, values]
  float* out;          // [tokens, heads, values]
  int64_t tokens;
  int heads, key_heads, keys, values;  // keys: at most kMaxKeys
  float q_scale, eps;
  Packed packed;
};
constexpr int kMaxKeys = 256;
void linear_recurrence(const RecurrenceArgs& args, cudaStream_t stream);

// out = x / sqrt(mean(x^2) + eps) * weight, then times silu(gate), in float with one rounding.
struct GatedNormArgs {
  Dtype dtype;          // dtype of gate and out, and of x unless `wide_x`
  bool wide_x;          // x is f32
  HeadRows x, gate;     // [tokens, heads, size]; gate.data null: no gate
  const float* weight;  // [size]
  void* out;            // [tokens, heads, size]
  float eps;
  int64_t tokens;
  int heads, size;
};
void gated_norm(const GatedNormArgs& args, cudaStream_t stream);

// decay = rate * softplus(a + dt_bias);  beta = beta_scale * sigmoid(b), where the sigmoid is rounded to `dtype`.
struct DeltaGatesArgs {
  Dtype dtype;                  // dtype of a and b
  const void *a, *b;            // [tokens, heads]
  int64_t a_stride, b_stride;   // elements between tokens
  const float *rate, *dt_bias;  // [heads]
  float beta_scale;
  float *decay, *beta;  // [tokens, heads]
  int64_t tokens;
  int heads;
};
void delta_gates(const DeltaGatesArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
