// Routing: the top-k experts of each token.
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/experts/experts.h"
#include "cuda/experts/parts.cuh"

namespace quire::cuda {
namespace {

constexpr int kWarp = 32;

// Packs a value and its index into one key.  A larger value has a larger key; of equal values the lower index has the
// larger key.  The order of NaN is arbitrary.  All keys differ, and none is 0.
__device__ uint64_t order_of(float x, int place) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  const uint32_t ordered = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~place);
}

/* Grid (tokens), one warp per token, kPerLane experts per lane.  Memory traffic: the logits. */
template <class T, int kPerLane>
__global__ void route_kernel(RouteArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int token = blockIdx.x, lane = threadIdx.x;
  const T* const row = static_cast<const T*>(a.logits) + static_cast<int64_t>(token) * a.experts;
  float x[kPerLane], largest = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * kWarp + lane;
    x[i] = expert < a.experts ? to_float(row[expert]) : -INFINITY;
    largest = fmaxf(largest, x[i]);
  }
  largest = max_of_warp(largest);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum += i * kWarp + lane < a.experts ? expf(x[i] - largest) : 0;
  sum = sum_of_warp(sum);

  uint32_t taken = 0;  // bit i: the expert of x[i] is chosen
  float mine = 0, chosen_sum = 0;
  int expert_of_mine = 0;
  for (int k = 0; k < a.top; ++k) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = i * kWarp + lane;
      if (expert < a.experts && !(taken >> i & 1)) best = max(best, order_of(x[i], expert));
    }
    for (int step = kWarp / 2; step > 0; step /= 2) best = max(best, __shfl_xor_sync(kAllLanes, best, step));
    const int expert = static_cast<int>(~static_cast<uint32_t>(best));
    float weight = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * kWarp + lane != expert) continue;
      taken |= 1u << i;
      weight = expf(x[i] - largest) / sum;
    }
    weight = __shfl_sync(kAllLanes, weight, expert % kWarp);
    chosen_sum += weight;
    if (lane == k) mine = weight, expert_of_mine = expert;
  }
  if (lane >= a.top) return;
  if (a.normalise) mine /= chosen_sum;
  if (a.rounded) mine = to_float(from_float<T>(mine));
  a.chosen[token * a.top + lane] = expert_of_mine;
  a.weights[token * a.top + lane] = mine;
}

}  // namespace

void route(const RouteArgs& a, cudaStream_t stream) {
  if (a.tokens == 0) return;
  by_half_dtype(a.dtype, [&](auto number) {
    using T = decltype(number);
    const auto kernel = a.experts <= 2 * kWarp   ? route_kernel<T, 2>
                        : a.experts <= 4 * kWarp ? route_kernel<T, 4>
                        : a.experts <= 8 * kWarp ? route_kernel<T, 8>
                                                 : route_kernel<T, kMaxExperts / kWarp>;
    launch(kernel, dim3(a.tokens), dim3(kWarp), 0, stream, a);
  });
}

}  // namespace quire::cuda
