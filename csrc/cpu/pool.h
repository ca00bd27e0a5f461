// Thread pool of the CPU kernels.
//
// A call of an operator is a region.  Its work items have numbers 0, 1, ... (tickets), which the calling thread and the
// pool's threads take one by one.  The region ends once all tickets are done, even if some threads never joined.
//   caller   publish ── take, compute, take, compute, none left ── close ── wait for threads inside ── return
//   thread A    spin ── enter ── take, compute ── none left ── leave ── spin ── ... ── sleep
//   thread B    (its core runs another process)                             never enters; the caller does not wait
//
// OpenMP would wait for every thread at the end of each region.  If another process keeps one core busy, each region
// would then take as long as the operating system's time slice.
//
// After a region, threads spin for kSpin, because the next operator usually follows within microseconds, and then
// sleep. Torch's own operators keep their OpenMP threads; the engine limits these to one if the pool computes all
// layers.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

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

// Calls body(data) on this thread and, at the same time, on at most `threads` - 1 threads of the pool.  Returns when
// all calls have returned; possibly no thread of the pool made one.  If another region is running, only this thread
// calls `body`.  `body` must not throw, and must not call run_region.
void run_region(void (*body)(void*), void* data, int threads);

// Calls work(tickets) on up to `threads` threads.  Returns when all tickets are done.  `work` must not throw.
template <class Work>
void share(int64_t items, int threads, const Work& work) {
  struct Shared {
    Tickets tickets;
    const Work& work;
  } shared{Tickets(items), work};
  if (threads <= 1 || items <= 1) return work(shared.tickets);
  run_region([](void* data) { static_cast<Shared*>(data)->work(static_cast<Shared*>(data)->tickets); }, &shared,
             static_cast<int>(std::min<int64_t>(threads, items)));
}

// Elements below which waking a second thread takes longer than it saves.
constexpr int64_t kRowsWorthSharing = 16 << 10;

// Calls each(row) for all rows.  Threads take runs of consecutive rows.
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
