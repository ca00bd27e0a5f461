// A task is some rows of one adapter.  Its rows of x and y are gathered, because `product` needs a constant row stride.

#include "cpu/lora.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/pool.h"
#include "cpu/product.h"

namespace quire::cpu {
namespace {

constexpr int64_t kMaxRows = 64;  // rows per task: their buffers stay in the L2 cache
constexpr int64_t kMinRows = 12;  // `product` computes 12 rows per read of A and B, so smaller tasks read more

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

template <class T>
void run(const LoraArgs<T>& args, const LoraTask<T>& task, int threads, T* workspace) {
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
      .threads = threads,
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
        .threads = threads,
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
  // With fewer tasks than threads, the threads share each GEMM instead.
  const auto items = static_cast<int64_t>(tasks.size());
  const int outer = items < args.threads || work < kWorthSharing ? 1 : args.threads;
  const int64_t words = rows * (args.inner + ranks + args.widest);
  share(items, outer, [&](Tickets& tickets) {
    const std::unique_ptr<T[]> workspace(new T[words]);
    for (int64_t item; tickets.take(item);) run(args, tasks[item], outer == 1 ? args.threads : 1, workspace.get());
  });
}

template void lora(const LoraArgs<float>&);
template void lora(const LoraArgs<bf16>&);
template void lora(const LoraArgs<fp16>&);

}  // namespace quire::cpu
