// Linear layer with unquantised weights.  A task is some rows times some strips of the weight.  Within a task, for each
// run (kRun consecutive elements) of `inner`:
//
//        run of inner          strip
//      +-------------+      +---------+      up to kRows rows at a time are packed together (`Rows`) and multiplied by a
//  x   | kRows rows  |   w  | a run   |      strip of weights, in as many accumulators as there are registers. Every element
//      +-------------+      | of inner|      of the result has its own lane, which sums the run from left to right, so
//                           +---------+      its neighbours cannot affect its sum.

#include "cpu/product.h"

#include <algorithm>

namespace quire::cpu {
namespace {

constexpr int kRows = kLanes == 16 ? 12 : kLanes == 8 ? 5 : 4;  // fills the registers: kRows x 2 accumulators, weights
// Elements of `inner` that are summed in a register before they are added to the sum of earlier runs.  The rounding
// error of a sum grows with its length.  That matters in float32; in 16 bits it is far below the final rounding.
template <class T>
constexpr int64_t kRun = sizeof(T) == 4 ? 128 : 512;
constexpr int64_t kTaskRows = 8 * kRows;
// Up to this many rows, each strip is read from first to last before the next one, because sequential reads are
// prefetched best, and x is packed again for each strip.  With more rows, each packed run of x is used for all strips.
constexpr int64_t kFewRows = 2;
constexpr int64_t kAhead = 2048;  // prefetch distance of the weights, in bytes

// Type of packed x: bf16 if the CPU has an instruction that multiplies pairs of bf16, otherwise float.
template <class T>
using Met = std::conditional_t<kTogether<T> == 2, bf16, float>;

// Some rows of x over one run, padded so that equal positions of two rows fall into different cache sets.
template <class T>
struct alignas(64) Rows {
  static constexpr int64_t kStride = kRun<T> + 64 / sizeof(Met<T>);
  Met<T> values[kRows * kStride];
};

template <class T>
void lay(Rows<T>& rows, const T* x, int64_t stride, int64_t count, int64_t inner) {
  for (int64_t i = 0; i < count; ++i) {
    const T* from = x + i * stride;
    Met<T>* to = rows.values + i * Rows<T>::kStride;
    if constexpr (std::is_same_v<T, Met<T>>) {
      std::memcpy(to, from, inner * sizeof(T));
      if (inner % kTogether<T>) to[inner] = Met<T>{};
    } else {
      int64_t k = 0;
      for (; k + kLanes <= inner; k += kLanes) store(to + k, load(from + k));
      if (k < inner) {
        T rest[kLanes] = {};
        std::copy_n(from + k, inner - k, rest);
        Met<T> wide[kLanes];
        store(wide, load(rest));
        std::copy_n(wide, inner - k, to + k);
      }
    }
  }
}

// Loads kColumns weights as two vectors.  For bfloat16 these hold the even and the odd weights, which a shift and a
// mask unpack; in_order() restores the order of their sums at the end.
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

// sums [rows, kTaskStrips * kColumns] += x times a strip, over one run (first: =).  steps: steps of kTogether elements.
template <class T, int rows>
void multiply(const Rows<T>& x, const T* weight, int64_t steps, float* sums, bool first) {
  Floats sum[rows][2] = {};
  const Met<T>* values = x.values;
  constexpr int64_t kStepBytes = kColumns * kTogether<T> * sizeof(T);
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t line = 0; line < kStepBytes; line += 64) {
      __builtin_prefetch(reinterpret_cast<const uint8_t*>(weight) + kAhead + line);
    }
#if defined(__AVX512BF16__)
    if constexpr (kTogether<T> == 2) {
      const auto left = bit_cast<__m512bh>(_mm512_loadu_si512(weight));
      const auto right = bit_cast<__m512bh>(_mm512_loadu_si512(weight + 2 * kLanes));
      unroll<rows>([&](auto i) {
        int32_t pair;
        std::memcpy(&pair, values + i * Rows<T>::kStride, sizeof pair);
        const auto both = bit_cast<__m512bh>(_mm512_set1_epi32(pair));
        sum[i][0] = _mm512_dpbf16_ps(sum[i][0], left, both);
        sum[i][1] = _mm512_dpbf16_ps(sum[i][1], right, both);
      });
    } else
#endif
    {
      Floats left, right;
      load_columns(weight, left, right);
      unroll<rows>([&](auto i) {
        const Floats x_value = broadcast(static_cast<float>(values[i * Rows<T>::kStride]));
        sum[i][0] = fma(left, x_value, sum[i][0]);
        sum[i][1] = fma(right, x_value, sum[i][1]);
      });
    }
    weight += kColumns * kTogether<T>;
    values += kTogether<T>;
  }
  unroll<rows>([&](auto i) {
    if constexpr (std::is_same_v<T, bf16> && kTogether<T> == 1) {
      in_order(sum[i][0], sum[i][1], std::make_integer_sequence<int, kLanes>{});
    }
    float* to = sums + i * kTaskStrips * kColumns;
    store(to, first ? sum[i][0] : load(to) + sum[i][0]);
    store(to + kLanes, first ? sum[i][1] : load(to + kLanes) + sum[i][1]);
  });
}

template <class T, int... i>
void multiply(int64_t rows, const Rows<T>& x, const T* weight, int64_t steps, float* sums, bool first,
              std::integer_sequence<int, i...>) {
  using Multiply = void (*)(const Rows<T>&, const T*, int64_t, float*, bool);
  static constexpr Multiply by_rows[] = {multiply<T, i + 1>...};
  by_rows[rows - 1](x, weight, steps, sums, first);
}

template <class T, class Out>
void task(const ProductArgs<T, Out>& args, int64_t first_row, int64_t rows, int64_t first_strip, int64_t strips) {
  alignas(64) float sums[kTaskRows][kTaskStrips * kColumns];
  Rows<T> x;
  const int64_t strip_size = (args.inner + kTogether<T> - 1) / kTogether<T> * kTogether<T> * kColumns;
  const int64_t groups = (rows + kRows - 1) / kRows;
  const auto lay_run = [&](int64_t begin, int64_t count, int64_t run) {
    lay(x, args.x + (first_row + begin) * args.x_stride + run, args.x_stride, count,
        std::min(kRun<T>, args.inner - run));
  };
  const auto multiply_run = [&](int64_t begin, int64_t count, int64_t run, int64_t strip) {
    const T* weight = args.weight + (first_strip + strip) * strip_size + run * kColumns;
    const int64_t steps = (std::min(kRun<T>, args.inner - run) + kTogether<T> - 1) / kTogether<T>;
    float* to = sums[begin] + strip * kColumns;
    multiply(count, x, weight, steps, to, run == 0, std::make_integer_sequence<int, kRows>{});
    for (int64_t i = 0; run + kRun<T> >= args.inner && i < count; ++i) {
      finish(args, first_row + begin + i, (first_strip + strip) * kColumns, to + i * kTaskStrips * kColumns);
    }
  };
  for (int64_t strip = 0; rows <= kFewRows && strip < strips; ++strip) {
    for (int64_t run = 0; run < args.inner || run == 0; run += kRun<T>) {
      lay_run(0, rows, run);
      multiply_run(0, rows, run, strip);
    }
  }
  for (int64_t run = 0; rows > kFewRows && (run < args.inner || run == 0); run += kRun<T>) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t begin = group * rows / groups, count = (group + 1) * rows / groups - begin;
      lay_run(begin, count, run);
      for (int64_t strip = 0; strip < strips; ++strip) multiply_run(begin, count, run, strip);
    }
  }
}

}  // namespace

template <class T, class Out>
void product(const ProductArgs<T, Out>& args) {
  share_product(args, kTaskRows, [&](int64_t first_row, int64_t rows, int64_t first_strip, int64_t strips) {
    task(args, first_row, rows, first_strip, strips);
  });
}

template void product(const ProductArgs<float>&);
template void product(const ProductArgs<bf16>&);
template void product(const ProductArgs<fp16>&);
template void product(const ProductArgs<bf16, float>&);
template void product(const ProductArgs<fp16, float>&);

}  // namespace quire::cpu
