// Linear layers with int8 weights and exact integer sums.  So a row's result is bit-identical in any batch, on any
// number of threads and on any CPU.
//
//   q[k]    round(x[k] / s), where s maps the row's maximum to 32,639: 16 bits, and an error of at most s / 2
//   out     (q[0] w[0] + q[1] w[1] + ...) * s * scale + bias + plus, in float, rounded once more to Out

#pragma once

#include <cstdint>

#include "cpu/product_tasks.h"
#include "cpu/simd.h"

namespace quire::cpu {

// Packed layout of a weight [features, inner]: [strips, inner / kInt8Together, kColumns, kInt8Together] bytes.  A byte
// is the weight + 128.  kInt8Together: elements per lane of a multiply-add instruction.
#if defined(__AVX512VNNI__)
constexpr int64_t kInt8Together = 4;
#else
constexpr int64_t kInt8Together = 2;
#endif

template <class T, class Out = T>
struct Int8ProductArgs : ProductArgs<T, Out, uint8_t> {
  const float* scale;  // [strips * kColumns]
  uint8_t* workspace;  // [rows, int8_row_bytes(inner)], aligned to 64
};

// Bytes of a row of quantised x: two per element, rounded up to cache lines, and one line for its scale and sum.
constexpr int64_t int8_row_bytes(int64_t inner) { return (inner + 31) / 32 * 64 + 64; }

// T: float, bf16 or fp16.  Out: T or float.  A row with a value that is not finite becomes NaN.
template <class T, class Out>
void product_int8(const Int8ProductArgs<T, Out>& args);

// Converts a strip's integer weights of inputs first .. first + count - 1 to bfloat16, exactly and without their scale,
// as pairs of inputs: `to` [count / 2, kColumns, 2].  first: a multiple of kInt8Together.  `to` must have capacity for
// count rounded up to kInt8Together.
void widen_int8(const uint8_t* weight, int64_t inner, int64_t strip, int64_t first, int64_t count, bf16* to);

}  // namespace quire::cpu
