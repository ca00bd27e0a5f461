// Products with weights of 8 bits, summed in integers.  Sums are exact, so a row's result is the same bit for bit in any
// company, on any number of threads and on any CPU.
//
//   q[k]    round(x[k] / s), where s makes the largest of the row 32,639: 16 bits, and an error of at most s / 2
//   out     (q[0] w[0] + q[1] w[1] + ...) * s * scale + bias + plus, in float, rounded once more to Out

#pragma once

#include <cstdint>

#include "cpu/product_tasks.h"
#include "cpu/simd.h"

namespace quire::cpu {

// How a weight [features, inner] lies packed: [strips, inner / kInt8Together, kColumns, kInt8Together] bytes, each of
// them w + 128.  A lane of a register multiplies and adds so many numbers at once.
#if defined(__AVX512VNNI__)
constexpr int64_t kInt8Together = 4;
#else
constexpr int64_t kInt8Together = 2;
#endif

template <class T, class Out = T>
struct Int8ProductArgs {
  const T* x;  // [rows, inner]
  int64_t x_stride;
  const uint8_t* weight;  // packed
  const float* scale;     // [strips * kColumns]
  const T* bias;          // [features], or null
  const Out* plus;        // [rows, features], or null; may be out
  int64_t plus_stride;
  Out* out;  // [rows, features]
  int64_t out_stride;
  uint8_t* workspace;  // [rows, int8_row_bytes(inner)], aligned to 64
  int64_t rows, inner, features;
  int threads;
};

// Bytes of a row of x as the product reads it: two for each number, in whole cache lines, and one line more.
constexpr int64_t int8_row_bytes(int64_t inner) { return (inner + 31) / 32 * 64 + 64; }

// T: float, bf16 or fp16.  Out: T or float.  A row with a number that is not finite becomes NaN.
template <class T, class Out>
void product_int8(const Int8ProductArgs<T, Out>& args);

// Writes w of inputs first .. first + count - 1 of a strip to `to` as pairs of inputs in bfloat16, [count / 2, kColumns, 2]:
// exact, and not scaled.  first: a multiple of kInt8Together.  to: room for count rounded up to kInt8Together.
void widen_int8(const uint8_t* weight, int64_t inner, int64_t strip, int64_t first, int64_t count, bf16* to);

}  // namespace quire::cpu
