// Binding of set_threads; the other bindings get the number of threads here.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>

#include "torch_api/cpu/convert.h"

namespace quire::cpu::torch_api {

namespace {

std::atomic<int> chosen_threads{0};

void set_threads(int64_t threads) {
  TORCH_CHECK_VALUE(threads >= 0, "threads: ", threads, " is negative");
  chosen_threads = static_cast<int>(threads);
}

}  // namespace

int threads() {
  if (at::in_parallel_region()) return 1;
  const int chosen = chosen_threads.load(std::memory_order_relaxed);
  return chosen ? chosen : at::get_num_threads();
}

TORCH_LIBRARY_IMPL(quire, CompositeExplicitAutograd, m) { m.impl("set_threads", set_threads); }

}  // namespace quire::cpu::torch_api
