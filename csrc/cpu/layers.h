// Norms, activations and rotary embedding between the GEMMs of a layer, each in one pass over memory.
//
// T: float, bf16 or fp16.  Arithmetic is in float; every result is rounded to T once.

#pragma once

#include <cstdint>

#include "cpu/cache.h"

namespace quire::cpu {

// [tokens, heads, size] of T; a head's elements are contiguous.  Strides in elements.
template <class T>
struct Heads {
  T* data;
  int64_t token_stride, head_stride;
  T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// out = x / sqrt(mean(x^2) + eps) * weight [size], over the elements of each head.  out may be x.
template <class T>
void rms_norm(Heads<const T> x, const T* weight, float eps, Heads<T> out, int64_t tokens, int64_t heads, int64_t size,
              int threads);

// out [tokens, size] = silu(gate) * up, where gate_up [tokens, 2 * size] holds gate, then up.
template <class T>
void silu_mul(const T* gate_up, T* out, int64_t tokens, int64_t size, int threads);

constexpr int64_t kMaxRope = 512;  // maximum head size

template <class T>
struct RopeArgs {
  Heads<T> qkv;        // [tokens, heads + 2 * kv_heads, size]
  const T *cos, *sin;  // [tokens, size]
  int64_t cos_stride, sin_stride;
  const T *q_norm, *k_norm;  // [size], or both null
  float eps;
  float norm_offset;  // added to the elements of q_norm and k_norm
  Cache k_cache, v_cache;
  const float* scales;        // [2, kv_heads] if the caches are e4m3
  const int64_t* kv_indices;  // [tokens]
  int64_t tokens, heads, kv_heads, size, block_size;
  int threads;
};

// Rotates the queries of qkv in place; writes the rotated keys and the values to kv_indices[t] (< 0: not stored).
// Element i of a head is rotated with element i + size / 2. With q_norm and k_norm queries and keys go through rms_norm
// first.  Stored: dtype of the caches, T or e4m3.
template <class T, class Stored>
void rope_kv_write(const RopeArgs<T>& args);

// Finds the maximum of each row of x [rows, size] and its first index.  A row with a NaN gives NaN and index 0.
template <class T>
void row_max(const T* x, int64_t row_stride, float* values, int64_t* places, int64_t rows, int64_t size, int threads);

}  // namespace quire::cpu
