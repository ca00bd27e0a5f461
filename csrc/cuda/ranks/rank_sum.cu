// All-reduce over NVLink: each rank writes its part into the inboxes of the others and sums what arrives in its own.
//
//   rank 0  part ──────────────────────> inbox of rank 1    [2 alternating calls, source ranks, CTAs, share]
//           sum <── part + own inbox <── rank 1
//
// Each rank pushes its part: that takes one NVLink latency and no barrier.  Pulling the parts of other ranks would take
// a barrier before and one after.
//
//   words   16 bytes of a part are sent as 32: each 4 bytes are followed by the call number. Each 8 bytes are written
//           and read by one access, so a rank that sees the number has the bytes, too (NCCL's LL protocol). Minimum
//           latency, twice the bytes.
//   blocks  a CTA sends all its rows, then its call number with a release at system scope.  The CTA of the same index
//           acquires that number before it reads.  For large parts, which are bound by bandwidth.
//
// Calls alternate between two halves of an inbox.  Two are enough: a CTA sends its part of call n + 2 only after it has
// received every part of call n + 1, and a rank sends its parts of call n + 1 only after its kernel of call n has
// ended. So a rank can be at most one call ahead.
//
// Each CTA counts its own calls on the device, so replayed graphs and eager calls share one count.  A CTA of index i
// waits only for CTAs of index i, and a call has the same grid on all ranks.  Counts wrap after 2^32 calls of a CTA.  A
// stale call number could be mistaken for a new one only in memory that none of the 2^32 calls between them used.  The
// next kernel may start once all CTAs of this kernel run, so it cannot take their multiprocessors.  It copies its
// weights while it waits for this kernel.
//
// Grid (rows, at most a.ctas): a CTA processes rows one after another, and a thread kPacks packs of 16 bytes per row.
// NVLink traffic: (ranks - 1) * 2 (words) or 1 (blocks) * bytes in each direction.
#include "cuda/ranks/rank_sum.h"

#include <algorithm>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/warp.cuh"

namespace quire::cuda {
namespace {

constexpr int kMaxThreads = 1024, kWarp = 32, kPackBytes = 16;

// Sends two words of 8 bytes: 4 bytes of data and the call number.  One instruction writes both words, each atomically.
__device__ void send_words(char* to, uint32_t first, uint32_t second, uint32_t call) {
  const uint64_t mark = static_cast<uint64_t>(call) << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(mark | first), "l"(mark | second)
               : "memory");
}

__device__ void load_words(const char* from, uint64_t (&words)[2]) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(from) : "memory");
}

__device__ uint4 receive_words(const char* from, uint32_t call) {
  uint64_t low[2], high[2];
  do {
    load_words(from, low);
    load_words(from + kPackBytes, high);
  } while (low[0] >> 32 != call || low[1] >> 32 != call || high[0] >> 32 != call || high[1] >> 32 != call);
  return {static_cast<uint32_t>(low[0]), static_cast<uint32_t>(low[1]), static_cast<uint32_t>(high[0]),
          static_cast<uint32_t>(high[1])};
}

// Reads 16 bytes past L1, which may hold stale bytes of the call before the last.
__device__ uint4 receive_block(const char* from) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

__device__ void set_mark(char* mark, uint32_t call) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(mark), "r"(call) : "memory");
}

__device__ void wait_for_mark(const char* mark, uint32_t call) {
  uint32_t seen;
  do {
    asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(seen) : "l"(mark) : "memory");
  } while (seen != call);
}

template <class T, int kPacks, bool kWords>
__global__ void __launch_bounds__(kMaxThreads) rank_sum_kernel(const __grid_constant__ RankSumArgs a) {
  constexpr int kWidth = kPackBytes / sizeof(T);
  using Values = Pack<T, kWidth>;
  const int packs = a.size / kWidth;  // packs per row
  const auto pack_of = [&](int i) { return static_cast<int>(i * blockDim.x + threadIdx.x); };
  const auto at = [&](const void* rows, int64_t row, int pack) {
    return static_cast<Values*>(const_cast<void*>(rows)) + row * packs + pack;
  };
  Values weight{};  // no kernel writes weights
  if (kPacks == 1 && a.norm != nullptr && pack_of(0) < packs) weight = *at(a.norm, 0, pack_of(0));
  let_next_kernel_start();
  wait_for_previous_kernels();

  uint32_t call = static_cast<uint32_t>(a.calls[blockIdx.x]) + 1;
  if (call == 0) call = 2;  // 0 marks an unused inbox
  const int64_t first = blockIdx.x * a.rows / gridDim.x, end = (blockIdx.x + 1) * a.rows / gridDim.x;
  // Memory in the inbox of `to` for the data that `from` sends to CTAs of this index in this call.
  const auto place = [&](int to, int from) {
    const int64_t places = int64_t{2} * a.ranks * kSumCtas;
    const int64_t own = (static_cast<int64_t>(call % 2) * a.ranks + from) * kSumCtas + blockIdx.x;
    const int64_t words = places * kMarkBytes, blocks = words + places * 2 * a.words_share;
    char* const inbox = static_cast<char*>(a.inboxes[to]);
    struct {
      char *mark, *packs;
    } areas{inbox + own * kMarkBytes,
            inbox + (kWords ? words + own * 2 * a.words_share : blocks + own * a.blocks_share)};
    return areas;
  };
  constexpr int kSent = kWords ? 2 * kPackBytes : kPackBytes;
  const auto offset = [&](int64_t row, int pack) { return ((row - first) * packs + pack) * kSent; };

  for (int64_t row = first; row < end; ++row) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (pack_of(i) >= packs) continue;
      const uint4 x = *reinterpret_cast<const uint4*>(at(a.part, row, pack_of(i)));
      for (int step = 1; step < a.ranks; ++step) {  // each rank starts with a different destination
        char* const to = place((a.rank + step) % a.ranks, a.rank).packs + offset(row, pack_of(i));
        if constexpr (kWords) {
          send_words(to, x.x, x.y, call);
          send_words(to + kPackBytes, x.z, x.w, call);
        } else {
          *reinterpret_cast<uint4*>(to) = x;
        }
      }
    }
  }
  if constexpr (!kWords) {
    __syncthreads();  // all threads have sent: the release below covers their writes
    const int other = threadIdx.x;
    if (other < a.ranks && other != a.rank) {
      set_mark(place(other, a.rank).mark, call);
      wait_for_mark(place(a.rank, other).mark, call);
    }
    __syncthreads();
  }

  for (int64_t row = first; row < end; ++row) {
    Values results[kPacks];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (pack_of(i) >= packs) continue;
      Values* const to = at(a.plus != nullptr ? a.plus : a.part, row, pack_of(i));
      const Values own = *at(a.part, row, pack_of(i)), old = *to;
      float sum[kWidth] = {}, x[kWidth];
      for (int rank = 0; rank < a.ranks; ++rank) {
        Values values = own;
        if (rank != a.rank) {
          const char* const from = place(a.rank, rank).packs + offset(row, pack_of(i));
          const uint4 received = kWords ? receive_words(from, call) : receive_block(from);
          values = reinterpret_cast<const Values&>(received);
        }
        widen(values, x);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sum[k] += x[k];
      }
      if (a.plus != nullptr) {
        widen(old, x);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sum[k] += x[k];
      }
      results[i] = narrow<T>(sum);
      *to = results[i];
      widen(results[i], x);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) squares += x[k] * x[k];
    }
    if (a.norm == nullptr) continue;
    const float scale = rsqrtf(sum_of_row(squares) / static_cast<float>(a.size) + a.eps);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (pack_of(i) >= packs) continue;
      if (kPacks > 1) weight = *at(a.norm, 0, pack_of(i));
      float x[kWidth], w[kWidth];
      widen(results[i], x);
      widen(weight, w);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x[k] = x[k] * scale * w[k];
      *at(a.normed, row, pack_of(i)) = narrow<T>(x);
    }
    __syncthreads();  // the next row's sums overwrite this row's
  }
  __syncthreads();  // all threads have read the call counter
  if (threadIdx.x == 0) a.calls[blockIdx.x] = static_cast<int>(call);
}

}  // namespace

void rank_sum(const RankSumArgs& a, cudaStream_t stream) {
  if (a.rows * a.size == 0) return;
  by_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = kPackBytes / sizeof(T), kMaxPacks = kMaxSummed / kWidth / kMaxThreads;
    const int packs = a.size / kWidth;
    const auto with = [&](auto packs_a_thread, auto words) {
      constexpr int each = packs_a_thread;
      const int threads = ((packs + each - 1) / each + kWarp - 1) / kWarp * kWarp;
      const dim3 grid(static_cast<unsigned>(std::min<int64_t>(a.rows, a.ctas)));
      launch(rank_sum_kernel<T, each, decltype(words)::value>, grid, dim3(threads), 0, stream, a);
    };
    const auto packs_with = [&](auto words) {
      if (packs <= kMaxThreads) return with(std::integral_constant<int, 1>{}, words);
      with(std::integral_constant<int, kMaxPacks>{}, words);
    };
    a.sending == Sending::words ? packs_with(std::true_type{}) : packs_with(std::false_type{});
  });
}

}  // namespace quire::cuda
