// The inner loop of linear layers with unquantised weights: some rows of x times one strip of a packed weight.

#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/product.h"
#include "cpu/product_tasks.h"
#include "cpu/simd.h"

namespace quire::cpu {

// Rows multiplied at once: 2 * kRows accumulators and the weights fill the registers.
constexpr int kRows = kLanes == 16 ? 12 : kLanes == 8 ? 5 : 4;
// Elements of `inner` that are summed in a register before they are added to the sum of earlier runs.  The rounding
// error of a sum grows with its length.  For a float32 T that matters; for 16-bit types it is far below the final
// rounding.
template <class T>
constexpr int64_t kRun = sizeof(T) == 4 ? 128 : 512;
constexpr int64_t kAhead = 2048;  // prefetch distance of the weights, in bytes

// Type of packed x: bf16 if the CPU has an instruction that multiplies pairs of bf16, otherwise float.
template <class T>
using Met = std::conditional_t<kTogether<T> == 2, bf16, float>;

// Copies `inner` elements of a row of x, and appends a zero if the last pair of elements is incomplete.
template <class T>
void lay_row(Met<T>* to, const T* from, int64_t inner) {
  if constexpr (std::is_same_v<T, Met<T>>) {
    std::memcpy(to, from, inner * sizeof(T));
    if (inner % kTogether<T>) to[inner] = Met<T>{};
  } else {
    over_lanes(inner, [&](int64_t k, auto n) { write(to + k, read(from + k, n), n); });
  }
}

// Loads kColumns weights as two vectors.  For bfloat16 a shift and a mask unpack the even weights into one vector and
// the odd weights into the other; in_order() restores the order of the sums at the end.
template <class T>
inline void load_columns(const T* weight, Floats& first, Floats& second) {
  if constexpr (std::is_same_v<T, bf16>) {
    Words pairs;
    std::memcpy(&pairs, weight, sizeof pairs);
    first = bit_cast<Floats>(pairs << 16);
    second = bit_cast<Floats>(pairs & 0xffff0000);
  } else {
    first = load(weight);
    second = load(weight + kLanes);
  }
}

template <int... i>
inline void in_order(Floats& even, Floats& odd, std::integer_sequence<int, i...>) {
  const Floats first = __builtin_shufflevector(even, odd, (i / 2 + i % 2 * kLanes)...);
  odd = __builtin_shufflevector(even, odd, ((i + kLanes) / 2 + i % 2 * kLanes)...);
  even = first;
}

// Whether the first kLanes columns of a strip can be computed without the others.
template <class T>
constexpr bool kHalves = !std::is_same_v<T, bf16> || kTogether<T> == 2;

// sums[row] = x[row] times a strip, over at most one run.  x: rows `stride` apart.  steps: steps of kTogether elements.
// vectors: 2, or 1 for the first kLanes columns only; sums[row][1] is then zero.
template <class T, int rows, int vectors = 2>
inline void multiply_rows(const Met<T>* x, int64_t stride, const T* weight, int64_t steps, Floats (&sums)[rows][2]) {
  static_assert(vectors == 2 || kHalves<T>);
  constexpr int64_t kStepBytes = kColumns * kTogether<T> * sizeof(T) * vectors / 2;
  Floats sum[rows][2] = {};  // stays in registers, because no pointer refers to it
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t line = 0; line < kStepBytes; line += 64) {
      __builtin_prefetch(reinterpret_cast<const uint8_t*>(weight) + kAhead + line);
    }
#if defined(__AVX512BF16__)
    if constexpr (kTogether<T> == 2) {
      const auto left = bit_cast<__m512bh>(_mm512_loadu_si512(weight));
      const auto right = vectors == 2 ? bit_cast<__m512bh>(_mm512_loadu_si512(weight + 2 * kLanes)) : left;
      unroll<rows>([&](auto i) {
        int32_t pair;
        std::memcpy(&pair, x + i * stride, sizeof pair);
        const auto both = bit_cast<__m512bh>(_mm512_set1_epi32(pair));
        sum[i][0] = _mm512_dpbf16_ps(sum[i][0], left, both);
        if constexpr (vectors == 2) sum[i][1] = _mm512_dpbf16_ps(sum[i][1], right, both);
      });
    } else
#endif
    {
      Floats left, right;
      if constexpr (vectors == 2) {
        load_columns(weight, left, right);
      } else {
        left = load(weight);
      }
      unroll<rows>([&](auto i) {
        const Floats x_value = broadcast(static_cast<float>(x[i * stride]));
        sum[i][0] = fma(left, x_value, sum[i][0]);
        if constexpr (vectors == 2) sum[i][1] = fma(right, x_value, sum[i][1]);
      });
    }
    weight += kColumns * kTogether<T>;
    x += kTogether<T>;
  }
  if constexpr (!kHalves<T>) {
    unroll<rows>([&](auto i) { in_order(sum[i][0], sum[i][1], std::make_integer_sequence<int, kLanes>{}); });
  }
  unroll<rows>([&](auto i) {
    sums[i][0] = sum[i][0];
    sums[i][1] = sum[i][1];
  });
}

}  // namespace quire::cpu
