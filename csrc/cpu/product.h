// Linear layers that sum in one fixed order, independent of the rest of the call.  So a row's result is bit-identical
// alone, in a batch, in any chunk of a prompt and on any number of threads.

#pragma once

#include <cstdint>

#include "cpu/product_tasks.h"
#include "cpu/simd.h"

namespace quire::cpu {

// Packed layout of a weight [features, inner]: [strips, inner / kTogether, kColumns, kTogether], padded with zeros.
//
//   strip 0: features 0 .. kColumns - 1      | inner 0 and 1 of feature 0, of feature 1, ... | inner 2 and 3 ... |
//   strip 1: the next kColumns ...           (kTogether 2: elements per bf16 multiply-add instruction)
template <class T>
constexpr int64_t kTogether = 1;
#if defined(__AVX512BF16__)
template <>
inline constexpr int64_t kTogether<bf16> = 2;
#endif

// out = x weight^T + bias + plus.  Sums in float, over runs of `inner` that start at fixed positions, run after run;
// one rounding at the end, to Out.  T: float, bf16 or fp16.  Out: T or float.
template <class T, class Out>
void product(const ProductArgs<T, Out>& args);

}  // namespace quire::cpu
