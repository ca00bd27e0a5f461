// Shared parts of the linear layers: their arguments, the split into tasks, and the epilogue.

#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/pool.h"
#include "cpu/simd.h"

namespace quire::cpu {

// Strip: kColumns consecutive features of a packed weight.
constexpr int64_t kColumns = 2 * kLanes;
constexpr int64_t kTaskStrips = 4;  // strips per task
// Multiplications below which waking a second thread takes longer than it saves.
constexpr int64_t kWorthSharing = 1 << 17;

template <class T, class Out = T, class Weight = T>
struct ProductArgs {
  const T* x;  // [rows, inner]
  int64_t x_stride;
  const Weight* weight;  // packed weight
  const T* bias;         // [features], or null
  const Out* plus;       // [rows, features], added to the result, or null; may be out
  int64_t plus_stride;
  Out* out;  // [rows, features]
  int64_t out_stride;
  int64_t rows, inner, features;
  int threads;
};

// Calls task(first_row, rows, first_strip, strips) until all rows and strips are covered; at most `max_rows` per task.
template <class Args, class Task>
void share_product(const Args& args, int64_t max_rows, const Task& task) {
  const int64_t all_strips = (args.features + kColumns - 1) / kColumns;
  const int64_t row_tasks = (args.rows + max_rows - 1) / max_rows;
  const int threads = args.rows * args.inner * args.features < kWorthSharing ? 1 : args.threads;
  // Four tasks per thread or more, so that no thread waits long for the last one.
  const int64_t min_strip_tasks = (4 * threads + row_tasks - 1) / std::max<int64_t>(1, row_tasks);
  const int64_t strips = threads == 1 ? kTaskStrips : std::clamp<int64_t>(all_strips / min_strip_tasks, 1, kTaskStrips);
  const int64_t strip_tasks = (all_strips + strips - 1) / strips;
  share(row_tasks * strip_tasks, threads, [&](Tickets& tickets) {
    for (int64_t item; tickets.take(item);) {
      const int64_t row = item / strip_tasks, first = item % strip_tasks * strips;
      const int64_t begin = row * args.rows / row_tasks, end = (row + 1) * args.rows / row_tasks;
      task(begin, end - begin, first, std::min(strips, all_strips - first));
    }
  });
}

// Epilogue of one strip of one row.
template <class Args>
void finish(const Args& args, int64_t row, int64_t column, const float* sums) {
  using T = std::remove_cvref_t<decltype(*args.bias)>;
  using Out = std::remove_cvref_t<decltype(*args.out)>;
  const int64_t columns = std::min(kColumns, args.features - column);
  Out* out = args.out + row * args.out_stride + column;
  const T* bias = args.bias ? args.bias + column : nullptr;
  const Out* plus = args.plus ? args.plus + row * args.plus_stride + column : nullptr;
  for (int64_t j = 0; j < columns; j += kLanes) {
    const auto value = [&](const T* of_bias, const Out* of_plus) {
      Floats y = load(sums + j);
      if (of_bias) y += load(of_bias);
      if (of_plus) y += load(of_plus);
      return y;
    };
    if (j + kLanes <= columns) {
      store(out + j, value(bias ? bias + j : nullptr, plus ? plus + j : nullptr));
      continue;
    }
    T rest_of_bias[kLanes] = {};
    Out rest[2][kLanes] = {};
    if (bias) std::copy_n(bias + j, columns - j, rest_of_bias);
    if (plus) std::copy_n(plus + j, columns - j, rest[0]);
    store(rest[1], value(bias ? rest_of_bias : nullptr, plus ? rest[0] : nullptr));
    std::copy_n(rest[1], columns - j, out + j);
  }
}

}  // namespace quire::cpu
