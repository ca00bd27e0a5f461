// Sums and maxima over the lanes of a warp.  All 32 lanes must call; every lane gets the result.
#pragma once

#include <cuda_runtime.h>

namespace quire::cuda {

constexpr unsigned kAllLanes = ~0u;

// Maximum and sum over the four lanes of a quad, which hold one row of an mma result.
__device__ inline float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

__device__ inline float sum_of_quad(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Sum over consecutive lanes; `lanes` is a power of two up to 32.
template <class T>
__device__ T sum_of_lanes(T x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

template <class T>
__device__ T sum_of_warp(T x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Sum over the blockDim.x threads of a row: a power of two of consecutive lanes in a warp, or all of a CTA's complete
// warps.  Every thread gets the sum.  The CTA must synchronise between two calls.
__device__ inline float sum_of_row(float x) {
  constexpr int kWarp = 32;
  const int threads = blockDim.x;
  x = sum_of_lanes(x, min(threads, kWarp));
  if (threads <= kWarp) return x;
  __shared__ float per_warp[kWarp];
  if (threadIdx.x % kWarp == 0) per_warp[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = 0;  // this loop is faster than shuffles, because its loads are independent
  for (int warp = 0; warp < threads / kWarp; ++warp) x += per_warp[warp];
  return x;
}

template <class T>
__device__ T max_of_warp(T x) {
  for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// Inclusive prefix sum over the lanes.
template <class T>
__device__ T sum_up_to_lane(T x) {
  for (int step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, x, step);
    if (threadIdx.x % 32 >= step) x += before;
  }
  return x;
}

}  // namespace quire::cuda
