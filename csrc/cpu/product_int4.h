// Linear layers with int4 weights: integer sums within a group of inputs, float sums over the groups, from the first
// group to the last.  A row's result is bit-identical in any batch, on any number of threads and on any CPU.
//
//   q[k]    round(x[k] / s), where s maps the row's maximum to 32,639: 16 bits, and an error of at most s / 2
//   sum[g]  q[k] (w[k] - zero[g]) + q[k + 1] (w[k + 1] - zero[g]) + ... over the inputs k of group g, exact
//   out     (sum[0] * scale[0] + sum[1] * scale[1] + ...) * s + bias + plus, in float, rounded once more to Out

#pragma once

#include <cstdint>

#include "cpu/product_tasks.h"
#include "cpu/simd.h"

namespace quire::cpu {

// Packed layout of a weight [features, inner]: [strips, inner / kInt4Together, kLanes, kInt4Together] bytes.  In lane c
// of a strip, the low nibble belongs to feature c of the strip, and the high nibble to feature kLanes + c.
constexpr int64_t kInt4Together = 4;
constexpr int64_t kInt4Block = 32;           // elements of `inner` per block; a group consists of blocks
constexpr int64_t kInt4LargestGroup = 4096;  // 4096 * 15 * 32,639 fits into 32 bits

template <class T, class Out = T>
struct Int4ProductArgs : ProductArgs<T, Out, uint8_t> {
  const fp16* scale;        // [strips, groups, kColumns]; null if wide_scale is set
  const float* wide_scale;  // [strips, groups, kColumns], scales as float; null if scale is set
  const uint8_t* zero;      // [strips, groups, kColumns]; null: all zero points are 8
  int64_t group;            // elements of `inner` that share a scale: a divisor of inner
  uint8_t* workspace;       // [rows, int4_row_bytes(inner, group)], aligned to 64
};

// Bytes of a row of quantised x: two per element, four per group, and four for the row's scale; rounded up to 64.
constexpr int64_t int4_row_bytes(int64_t inner, int64_t group) {
  return (2 * inner + 4 * (inner / group + 1) + 63) / 64 * 64;
}

// T: float, bf16 or fp16.  Out: T or float.  A row with a value that is not finite becomes NaN.
template <class T, class Out>
void product_int4(const Int4ProductArgs<T, Out>& args);

// Dequantises inputs first .. first + count - 1 of a strip to bfloat16, as pairs of inputs: `to` [count / 2, kColumns,
// 2]. first, count: multiples of kInt4Block.
template <class Out>
void widen_int4(const Int4ProductArgs<bf16, Out>& args, int64_t strip, int64_t first, int64_t count, bf16* to);

}  // namespace quire::cpu
