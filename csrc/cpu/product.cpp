// Linear layer with unquantised weights.  A task is some rows times some strips of the weight.  Within a task, for each
// run (kRun consecutive elements) of `inner`:
//
//        run of inner          strip
//      +-------------+      +---------+      up to kRows rows at a time are packed together (`Rows`) and multiplied by
//  x   | kRows rows  |   w  | a run   |      a strip of weights, in as many accumulators as there are registers. Every
//      +-------------+      | of inner|      element of the result has its own lane, which sums the run from left to
//                           +---------+      right, so its neighbours cannot affect its sum.

#include "cpu/product.h"

#include <algorithm>

#include "cpu/product_rows.h"

namespace quire::cpu {
namespace {

constexpr int64_t kTaskRows = 8 * kRows;
// Up to this many rows, each strip is read completely before the next strip, because sequential reads are prefetched
// best; x is packed again for each strip.  With more rows, each packed run of x is used for all strips.
constexpr int64_t kFewRows = 2;

// Some rows of x over one run, padded so that equal positions of two rows fall into different cache sets.
template <class T>
struct alignas(64) Rows {
  static constexpr int64_t kStride = kRun<T> + 64 / sizeof(Met<T>);
  Met<T> values[kRows * kStride];
};

// Adds x times a strip, over one run, to sums [rows, kTaskStrips * kColumns], or sets them if `first`.  steps: number
// of kTogether elements in the run.
template <class T, int rows>
void multiply(const Rows<T>& x, const T* weight, int64_t steps, float* sums, bool first) {
  Floats sum[rows][2];
  multiply_rows<T, rows>(x.values, Rows<T>::kStride, weight, steps, sum);
  unroll<rows>([&](auto i) {
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
    const int64_t inner = std::min(kRun<T>, args.inner - run);
    const T* from = args.x + (first_row + begin) * args.x_stride + run;
    for (int64_t i = 0; i < count; ++i) lay_row(x.values + i * Rows<T>::kStride, from + i * args.x_stride, inner);
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
