// Online-softmax state (Milakov and Gimelshein 2018), and the merge of states of different sets of keys
// (Flash-Decoding, 2023).
//
// The state covers the scores s seen so far, in units of log2: max is their maximum, sum is the sum of 2^(s - max). The
// accumulator is the sum of 2^(s - max) * value.  A state is rescaled to a common maximum by the factor 2^(max -
// common).

#pragma once

#include <cuda_runtime.h>

#include <cmath>

namespace quire::cuda {

constexpr float kLog2E = 1.4426950408889634f;

__device__ inline float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

struct SoftmaxState {
  float max = -INFINITY;
  float sum = 0;
};

// Factor that rescales sums from the maximum `from` to `to` >= from; 0 for an empty state.
__device__ inline float rescale(float from, float to) { return from == -INFINITY ? 0.f : exp2_fast(from - to); }

// Denominator of a head's softmax, including its sink: one more score, without a value.
//   sum, max  over all keys of the query
//   sinks     [heads], or null
// A query without keys has the maximum -inf and the sum 0; its sink is not added.
__device__ inline float with_sink(float sum, float max, const float* sinks, int head) {
  if (sinks == nullptr || max == -INFINITY) return sum;
  return sum + exp2_fast(sinks[head] * kLog2E - max);
}

// Returns cap * tanh(x) for doubled = 2 x log2(e), without overflow.
__device__ inline float soften(float doubled, float cap) { return cap - __fdividef(2 * cap, exp2_fast(doubled) + 1); }

}  // namespace quire::cuda
