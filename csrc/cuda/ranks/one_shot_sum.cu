// Each rank writes its part into the inboxes of the others and adds up what arrives in its own.
//
//   rank 0  part ──────────────────────> inbox of rank 1   [2 calls in turn, from each rank, units]
//           sum <── part + own inbox <── rank 1
//
// A unit is 8 bytes of a part, sent as 16: 4 bytes and the number of the call, twice.  Each half is written and read as
// one access, so whoever finds the number finds the bytes, and no barrier between GPUs is needed: a sum takes one way
// over NVLink, where reading the others' parts takes a barrier before and one after it.  This is NCCL's protocol LL.
//
// Two calls use an inbox in turn.  That is enough: a rank sends its part of call n + 2 only after it has received every
// part of call n + 1, and a rank sends those only after its own call n has ended.
//
// A CTA counts its own calls and has its own share of every inbox, since a call of few bytes has fewer CTAs.  Numbers repeat
// after 2^32 calls of a CTA, days of work; a number would be mistaken only at a place that was used at both calls and at
// none of the 2^32 between them.
//
// Grid (up to kSumCtas).  Moves bytes * 2 to each other rank.
#include "cuda/ranks/one_shot_sum.h"

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"

namespace quire::cuda {
namespace {

constexpr int kThreads = 512, kUnit = 8, kSent = 16;  // bytes of a unit, and as it is sent
static_assert(kThreads * kUnit <= kSumLeast);

// Sends a unit, or reads one, as two accesses of 8 bytes that no other access divides.
__device__ void send(char* to, uint2 unit, uint32_t call) {
  const uint64_t mark = static_cast<uint64_t>(call) << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(mark | unit.x), "l"(mark | unit.y) : "memory");
}

__device__ uint2 receive(const char* from, uint32_t call) {
  uint64_t low, high;
  do {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
  } while (low >> 32 != call || high >> 32 != call);
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(high)};
}

template <class T>
__global__ void __launch_bounds__(kThreads) one_shot_sum_kernel(const __grid_constant__ OneShotSumArgs a) {
  constexpr int kNumbers = kUnit / sizeof(T);
  using Numbers = Pack<T, kNumbers>;
  let_next_kernel_start();
  wait_for_previous_kernels();
  uint32_t call = a.calls[blockIdx.x] + 1;
  if (call == 0) call = 2;  // 0 is in an inbox that was never used
  const int64_t units = a.bytes / kUnit, share = (units + gridDim.x - 1) / gridDim.x;
  const int64_t first = blockIdx.x * share, count = min(share, units - first);
  // From the start of an inbox to this CTA's share of what `rank` sends in this call.
  const auto at = [&](int rank) {
    return ((call % 2 * a.ranks + rank) * (a.most_bytes / kUnit) + blockIdx.x * (a.most_bytes / kUnit / kSumCtas)) * kSent;
  };
  uint2* const part = static_cast<uint2*>(a.part) + first;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const uint2 unit = part[i];
    for (int step = 1; step < a.ranks; ++step) {  // each rank begins with another one
      const int to = (a.rank + step) % a.ranks;
      send(static_cast<char*>(a.inboxes[to]) + at(a.rank) + i * kSent, unit, call);
    }
  }
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    float sum[kNumbers] = {};
    for (int rank = 0; rank < a.ranks; ++rank) {
      const bool own = rank == a.rank;
      const uint2 unit = own ? part[i] : receive(static_cast<const char*>(a.inboxes[a.rank]) + at(rank) + i * kSent, call);
      float numbers[kNumbers];
      widen(reinterpret_cast<const Numbers&>(unit), numbers);
#pragma unroll
      for (int k = 0; k < kNumbers; ++k) sum[k] += numbers[k];
    }
    reinterpret_cast<Numbers*>(part)[i] = narrow<T>(sum);
  }
  __syncthreads();  // all have read the number of the call
  if (threadIdx.x == 0) a.calls[blockIdx.x] = static_cast<int>(call);
}

}  // namespace

void one_shot_sum(const OneShotSumArgs& a, cudaStream_t stream) {
  if (a.bytes == 0) return;
  const int64_t ctas = std::min<int64_t>((a.bytes / kUnit + kThreads - 1) / kThreads, kSumCtas);
  by_dtype(a.dtype, [&](auto number) {
    launch(one_shot_sum_kernel<decltype(number)>, dim3(static_cast<unsigned>(ctas)), dim3(kThreads), 0, stream, a);
  });
}

}  // namespace quire::cuda
