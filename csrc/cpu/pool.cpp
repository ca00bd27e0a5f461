// The thread pool of the CPU kernels.
//
// One 64-bit word describes the running region, so that a thread enters it, or finds it closed, by one atomic
// operation:
//
//   | generation: 32 bits | wanted: 15 bits | inside: 15 bits | open |       wanted: threads that may still enter
// The caller publishes a region by writing the word, and closes it by clearing `open` once no ticket is left.  It then
// waits for `inside` to become 0.  A thread that comes late finds the region closed and does not access it.

#include "cpu/pool.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <thread>
#include <vector>

namespace quire::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// Time for which a thread spins until the next region: longer than Python takes between two operators of a step.
constexpr auto kSpin = std::chrono::microseconds(50);
// Time for which the caller spins until the other threads have computed their last tickets.  A thread that takes longer
// may have lost its core.  The caller then sleeps, so that the operating system moves that thread to the caller's core.
constexpr auto kLastTickets = std::chrono::microseconds(100);
constexpr int kLooks = 32;  // polls of the word between two reads of the clock

constexpr uint64_t kOpen = 1, kInside = 2, kWanted = uint64_t{1} << 16, kGeneration = uint64_t{1} << 32;
constexpr uint64_t kInsideMask = kWanted - kInside, kWantedMask = kGeneration - kWanted;
constexpr int kMaxThreads = 1 << 15;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls ready() until it returns true, for at most `time`.  Returns whether it did.
template <class Ready>
bool spin(std::chrono::microseconds time, const Ready& ready) {
  for (const auto end = Clock::now() + time;;) {
    for (int look = 0; look < kLooks; ++look) {
      if (ready()) return true;
      relax();
    }
    if (Clock::now() > end) return false;
  }
}

class Pool {
 public:
  void run(void (*body)(void*), void* data, int threads) {
    if (busy_.exchange(true, std::memory_order_acquire)) return body(data);
    const int helpers = std::min(threads, kMaxThreads) - 1;
    grow(helpers);
    body_ = body;
    data_ = data;
    const uint64_t generation = (region_.load(std::memory_order_relaxed) / kGeneration + 1) * kGeneration;
    region_.store(generation + kWanted * helpers + kOpen);
    published_.fetch_add(1);
    if (asleep_.load() > 0) published_.notify_all();
    body(data);
    region_.fetch_and(~(kOpen | kWantedMask), std::memory_order_acq_rel);
    const auto left = [&] { return !(region_.load() & kInsideMask); };
    if (!spin(kLastTickets, left)) {
      waiting_ = true;
      for (uint32_t seen = left_; !left(); seen = left_) left_.wait(seen);
      waiting_ = false;
    }
    busy_.store(false, std::memory_order_release);
  }

 private:
  void grow(int count) {
    if (count <= count_) return;
    // The pool's threads block all signals, so that the application's own threads handle them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; count_ < count; ++count_) std::thread([this] { serve(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void serve() {
    pthread_setname_np(pthread_self(), "quire-cpu");
    uint64_t done = 0;  // generation of the region that this thread entered last
    for (;;) {
      const uint32_t seen = published_.load();
      if (enter(done)) continue;
      if (spin(kSpin, [&] { return published_.load(std::memory_order_acquire) != seen; })) continue;
      asleep_.fetch_add(1);
      published_.wait(seen);
      asleep_.fetch_sub(1);
    }
  }

  // Joins the open region if that needs more threads.  Returns whether this thread has joined.
  bool enter(uint64_t& done) {
    uint64_t now = region_.load(std::memory_order_acquire);
    do {
      if (!(now & kOpen) || !(now & kWantedMask) || now / kGeneration == done) return false;
    } while (!region_.compare_exchange_weak(now, now - kWanted + kInside, std::memory_order_acq_rel));
    done = now / kGeneration;
    body_(data_);
    region_.fetch_sub(kInside);
    if (waiting_) {
      ++left_;
      left_.notify_one();
    }
    return true;
  }

  std::atomic<bool> busy_{false};  // a region is running
  int count_ = 0;                  // threads of the pool
  void (*body_)(void*) = nullptr;
  void* data_ = nullptr;
  alignas(64) std::atomic<uint64_t> region_{0};
  alignas(64) std::atomic<uint32_t> published_{0};  // number of regions so far; idle threads wait on it
  std::atomic<int> asleep_{0};                      // threads that wait on published_
  std::atomic<uint32_t> left_{0};                   // changes when a thread leaves a region while `waiting_`
  std::atomic<bool> waiting_{false};                // the caller waits on left_
};

// Never destroyed: its threads use it until the process ends.
Pool* pool = new Pool;

// A fork has none of the pool's threads.
[[maybe_unused]] const int after_fork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

}  // namespace

void run_region(void (*body)(void*), void* data, int threads) { pool->run(body, data, threads); }

}  // namespace quire::cpu
