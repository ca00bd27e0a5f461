// Work sharing on torch's own threads.
//
// Torch brings its own OpenMP runtime.  Code compiled with -fopenmp would also link the system's (clang: a different
// one), and two pools of spinning threads would compete for the same cores.  So nothing here is compiled with OpenMP.
// The one entry point needed is called by its ABI name, which libgomp, libomp and libiomp5 all export.  The loader
// finds it in the runtime that libtorch itself depends on.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);

namespace quire::cpu {

// Hands out the integers 0, 1, ... items - 1, each to exactly one thread.
class Tickets {
 public:
  explicit Tickets(int64_t items) : items_(items) {}

  bool take(int64_t& item) {
    item = next_.fetch_add(1, std::memory_order_relaxed);
    return item < items_;
  }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t items_;
};

// Calls work(tickets) on `threads` threads of the pool, or on this thread alone if `threads` is 1.  Returns when all
// calls have returned.  `work` must not throw.
template <class Work>
void share(int64_t items, int threads, const Work& work) {
  struct Shared {
    Tickets tickets;
    const Work& work;
  } shared{Tickets(items), work};
  if (threads <= 1 || items <= 1) return work(shared.tickets);
  GOMP_parallel([](void* data) { static_cast<Shared*>(data)->work(static_cast<Shared*>(data)->tickets); }, &shared,
                static_cast<unsigned>(threads), 0);
}

// Elements below which waking a second thread does not pay.
constexpr int64_t kRowsWorthSharing = 16 << 10;

// Calls each(row) for all rows, which threads take in runs.
template <class Each>
void over_rows(int64_t rows, int64_t row_size, int threads, const Each& each) {
  if (rows * row_size < kRowsWorthSharing) threads = 1;
  const int64_t run = std::max<int64_t>(1, rows / (4 * threads));
  share((rows + run - 1) / run, threads, [&](Tickets& tickets) {
    for (int64_t item; tickets.take(item);) {
      for (int64_t row = item * run; row < std::min(rows, (item + 1) * run); ++row) each(row);
    }
  });
}

}  // namespace quire::cpu
