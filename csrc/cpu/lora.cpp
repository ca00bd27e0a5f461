// A task is some rows of one adapter.  A thread computes up to kRows rows at once: h = A x into a buffer, then B h,
// strip by strip, into the rows of y.  If a call has fewer tasks than threads, the rows of x and y are gathered and all
// threads share each GEMM (`product`).  Both ways sum in the same order.

#include "cpu/lora.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/pool.h"
#include "cpu/product_rows.h"

namespace quire::cpu {
namespace {

constexpr int64_t kMaxRows = 64;     // rows per task: their buffers stay in the L2 cache
constexpr int64_t kMinRows = kRows;  // rows per read of A and B: smaller tasks would read them more often

template <class T>
struct LoraTask {
  const LoraGroup<T>* group;
  int64_t first, count;  // range of the group's rows
};

template <class T>
std::vector<LoraTask<T>> tasks_of(const LoraArgs<T>& args) {
  int64_t total = 0;
  for (int64_t g = 0; g < args.group_count; ++g) total += args.groups[g].count;
  const int64_t rows = std::clamp<int64_t>(total / (4 * std::max(1, args.threads)), kMinRows, kMaxRows);
  std::vector<LoraTask<T>> tasks;
  for (int64_t g = 0; g < args.group_count; ++g) {
    const LoraGroup<T>& group = args.groups[g];
    if (group.ranks == 0) continue;
    const int64_t parts = (group.count + rows - 1) / rows;
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t first = i * group.count / parts;
      tasks.push_back({&group, first, (i + 1) * group.count / parts - first});
    }
  }
  return tasks;
}

// Buffers of a thread: rows of x and of h = A x.  Padding puts equal positions of two rows into different cache sets.
template <class T>
struct LoraBuffers {
  LoraBuffers(int64_t inner, int64_t ranks)
      : x_stride((inner + 1) / 2 * 2 + 64 / sizeof(Met<T>)),
        h_stride((ranks + kColumns - 1) / kColumns * kColumns + 64 / sizeof(Met<T>)),
        values(new Met<T>[kRows * (x_stride + h_stride)]) {}

  Met<T>* x() { return values.get(); }
  Met<T>* h() { return values.get() + kRows * x_stride; }

  const int64_t x_stride, h_stride;
  const std::unique_ptr<Met<T>[]> values;
};

// Computes one strip of h = A x, rounded to T.  vectors: as in multiply_rows.
template <class T, int rows, int vectors>
void shrink(const LoraArgs<T>& args, const T* weight, LoraBuffers<T>& buffers, int64_t rank) {
  Floats sums[rows][2] = {};
  for (int64_t run = 0; run < args.inner; run += kRun<T>) {
    const int64_t steps = (std::min(kRun<T>, args.inner - run) + kTogether<T> - 1) / kTogether<T>;
    Floats of_run[rows][2];
    multiply_rows<T, rows, vectors>(buffers.x() + run, buffers.x_stride, weight + run * kColumns, steps, of_run);
    unroll<rows>([&](auto i) {
      for (int v = 0; v < vectors; ++v) sums[i][v] = run == 0 ? of_run[i][v] : sums[i][v] + of_run[i][v];
    });
  }
  unroll<rows>([&](auto i) {
    T rounded[kColumns];
    for (int v = 0; v < vectors; ++v) store(rounded + v * kLanes, sums[i][v]);
    lay_row<T>(buffers.h() + i * buffers.h_stride + rank, rounded, vectors * kLanes);
  });
}

// Adds B h of one part to the rows of y.
template <class T, int rows>
void expand(const LoraPart<T>& part, LoraBuffers<T>& buffers, T* const* y) {
  const int64_t steps = (part.rank + kTogether<T> - 1) / kTogether<T>;
  const T* weight = part.b;
  for (int64_t column = 0; column < part.features; column += kColumns, weight += steps * kTogether<T> * kColumns) {
    Floats sums[rows][2];
    multiply_rows<T, rows>(buffers.h() + part.first_rank, buffers.h_stride, weight, steps, sums);
    const int64_t columns = std::min(kColumns, part.features - column);
    unroll<rows>([&](auto i) {
      T* to = y[i] + part.first + column;
      T rest[kColumns] = {};
      T* both = columns == kColumns ? to : rest;
      if (both == rest) std::copy_n(to, columns, rest);
      store(both, sums[i][0] + load(both));
      store(both + kLanes, sums[i][1] + load(both + kLanes));
      if (both == rest) std::copy_n(rest, columns, to);
    });
  }
}

template <class T, int rows>
void add(const LoraArgs<T>& args, const LoraGroup<T>& group, const int32_t* row, LoraBuffers<T>& buffers) {
  T* y[rows];
  for (int i = 0; i < rows; ++i) {
    lay_row<T>(buffers.x() + i * buffers.x_stride, args.x + row[i] * args.x_stride, args.inner);
    y[i] = args.y + row[i] * args.y_stride;
  }
  const int64_t strip_size = (args.inner + kTogether<T> - 1) / kTogether<T> * kTogether<T> * kColumns;
  for (int64_t rank = 0; rank < group.ranks; rank += kColumns) {
    const T* weight = group.a + rank / kColumns * strip_size;
    if constexpr (kHalves<T>) {
      if (group.ranks - rank <= kLanes) {
        shrink<T, rows, 1>(args, weight, buffers, rank);
        continue;
      }
    }
    shrink<T, rows, 2>(args, weight, buffers, rank);
  }
  for (const LoraPart<T>& part : group.parts) {
    if (part.rank > 0) expand<T, rows>(part, buffers, y);
  }
}

template <class T, int... i>
void add(int64_t rows, const LoraArgs<T>& args, const LoraGroup<T>& group, const int32_t* row, LoraBuffers<T>& buffers,
         std::integer_sequence<int, i...>) {
  using Add = void (*)(const LoraArgs<T>&, const LoraGroup<T>&, const int32_t*, LoraBuffers<T>&);
  static constexpr Add by_rows[] = {add<T, i + 1>...};
  by_rows[rows - 1](args, group, row, buffers);
}

template <class T>
void run(const LoraArgs<T>& args, const LoraTask<T>& task, LoraBuffers<T>& buffers) {
  const int64_t parts = (task.count + kRows - 1) / kRows;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = part * task.count / parts, count = (part + 1) * task.count / parts - first;
    const int32_t* rows = task.group->rows + task.first + first;
    add(count, args, *task.group, rows, buffers, std::make_integer_sequence<int, kRows>{});
  }
}

template <class T>
void run_shared(const LoraArgs<T>& args, const LoraTask<T>& task, T* workspace) {
  const LoraGroup<T>& group = *task.group;
  const int32_t* rows = group.rows + task.first;
  const bool adjacent = rows[task.count - 1] - rows[0] + 1 == task.count;
  T *x = workspace, *h = x + task.count * args.inner, *y = h + task.count * group.ranks;
  for (int64_t i = 0; !adjacent && i < task.count; ++i) {
    std::memcpy(x + i * args.inner, args.x + rows[i] * args.x_stride, args.inner * sizeof(T));
  }
  product(ProductArgs<T>{
      .x = adjacent ? args.x + rows[0] * args.x_stride : x,
      .x_stride = adjacent ? args.x_stride : args.inner,
      .weight = group.a,
      .bias = nullptr,
      .plus = nullptr,
      .plus_stride = 0,
      .out = h,
      .out_stride = group.ranks,
      .rows = task.count,
      .inner = args.inner,
      .features = group.ranks,
      .threads = args.threads,
  });
  for (const LoraPart<T>& part : group.parts) {
    if (part.rank == 0) continue;
    T* to = adjacent ? args.y + rows[0] * args.y_stride + part.first : y;
    const int64_t stride = adjacent ? args.y_stride : part.features;
    for (int64_t i = 0; !adjacent && i < task.count; ++i) {
      std::memcpy(y + i * stride, args.y + rows[i] * args.y_stride + part.first, part.features * sizeof(T));
    }
    product(ProductArgs<T>{
        .x = h + part.first_rank,
        .x_stride = group.ranks,
        .weight = part.b,
        .bias = nullptr,
        .plus = to,
        .plus_stride = stride,
        .out = to,
        .out_stride = stride,
        .rows = task.count,
        .inner = part.rank,
        .features = part.features,
        .threads = args.threads,
    });
    for (int64_t i = 0; !adjacent && i < task.count; ++i) {
      std::memcpy(args.y + rows[i] * args.y_stride + part.first, y + i * stride, part.features * sizeof(T));
    }
  }
}

}  // namespace

template <class T>
void lora(const LoraArgs<T>& args) {
  const std::vector<LoraTask<T>> tasks = tasks_of(args);
  int64_t ranks = 0, rows = 0, work = 0;
  for (const LoraTask<T>& task : tasks) {
    ranks = std::max(ranks, task.group->ranks);
    rows = std::max(rows, task.count);
    work += task.count * task.group->ranks * (args.inner + args.widest);
  }
  const auto items = static_cast<int64_t>(tasks.size());
  const int threads = work < kWorthSharing ? 1 : args.threads;
  if (items < threads) {
    const std::unique_ptr<T[]> workspace(new T[rows * (args.inner + ranks + args.widest)]);
    for (const LoraTask<T>& task : tasks) run_shared(args, task, workspace.get());
    return;
  }
  share(items, threads, [&](Tickets& tickets) {
    LoraBuffers<T> buffers(args.inner, ranks);
    for (int64_t item; tickets.take(item);) run(args, tasks[item], buffers);
  });
}

template void lora(const LoraArgs<float>&);
template void lora(const LoraArgs<bf16>&);
template void lora(const LoraArgs<fp16>&);

}  // namespace quire::cpu
