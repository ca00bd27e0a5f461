#include "cuda/linear/fp8.h"

#include <algorithm>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/warp.cuh"

namespace quire::cuda {
namespace {

constexpr int kWarp = 32, kMaxThreads = 1024;
constexpr int kWidth = 16;  // elements per load
constexpr int kGroup = 128, kGroupLanes = kGroup / kWidth;
constexpr float kLargest = 448;  // maximum of e4m3
constexpr float kMinMagnitude =
    1e-30f;  // floor of a row's maximum magnitude: below it the inverse scale would overflow

// Block-wide reduction; every thread gets the result.  Each call in a kernel needs a separate buffer `per_warp`.
template <class Join>
__device__ float join_block(float x, float* per_warp, const Join& join) {
  for (int step = kWarp / 2; step > 0; step /= 2) x = join(x, __shfl_xor_sync(kAllLanes, x, step));
  if (threadIdx.x % kWarp == 0) per_warp[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = per_warp[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) x = join(x, per_warp[warp]);
  return x;
}

/* x [tokens, size] bf16 · values [tokens, size] e4m3 · scale [tokens], or with kGroups [size / 128, tokens]
 * A thread block keeps a row in registers: kPacks times kWidth elements per thread.  Grid (tokens).
 * Moves 3 bytes per element. */
template <int kPacks, bool kGroups>
__global__ void __launch_bounds__(kMaxThreads) quantise_rows_kernel(QuantiseArgs a) {
  __shared__ float sums[kWarp], maxima[kWarp];
  const auto element = [&](int i) { return static_cast<int>((i * blockDim.x + threadIdx.x) * kWidth); };
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t token = blockIdx.x;
  const bf16* const from = static_cast<const bf16*>(a.x) + token * a.x_stride;
  float x[kPacks][kWidth], squares = 0, largest = 0;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (element(i) >= a.size) continue;
    widen(load_pack<kWidth>(from + element(i)), x[i]);
    for (int j = 0; j < kWidth; ++j) squares += x[i][j] * x[i][j];
  }
  if (a.norm != nullptr) {
    const float by =
        rsqrtf(join_block(squares, sums, [](float p, float q) { return p + q; }) / static_cast<float>(a.size) + a.eps);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (element(i) >= a.size) continue;
      float w[kWidth];
      widen(load_pack<kWidth>(static_cast<const bf16*>(a.norm) + element(i)), w);
      for (int j = 0; j < kWidth; ++j) x[i][j] *= by * w[j];
    }
  }
  if constexpr (kGroups) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const bool exists = element(i) < a.size;  // uniform over the lanes of a group
      float max_magnitude = kMinMagnitude;
      for (int j = 0; j < kWidth; ++j) max_magnitude = fmaxf(max_magnitude, exists ? fabsf(x[i][j]) : 0);
      for (int step = kGroupLanes / 2; step > 0; step /= 2)
        max_magnitude = fmaxf(max_magnitude, __shfl_xor_sync(kAllLanes, max_magnitude, step));
      if (!exists) continue;
      float y[kWidth];
      for (int j = 0; j < kWidth; ++j) y[j] = x[i][j] * (kLargest / max_magnitude);
      store_pack(static_cast<e4m3*>(a.values) + token * a.size + element(i), narrow<e4m3>(y));
      if (threadIdx.x % kGroupLanes == 0)
        a.scale[element(i) / kGroup * a.group_stride + token] = max_magnitude / kLargest;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (element(i) >= a.size) continue;
      for (int j = 0; j < kWidth; ++j) largest = fmaxf(largest, fabsf(x[i][j]));
    }
    largest = join_block(largest, maxima, [](float p, float q) { return fmaxf(p, q); });
    largest = fmaxf(largest, kMinMagnitude);
    const float scale = largest / kLargest, by = kLargest / largest;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (element(i) >= a.size) continue;
      float y[kWidth];
      for (int j = 0; j < kWidth; ++j) y[j] = x[i][j] * by;
      store_pack(static_cast<e4m3*>(a.values) + token * a.size + element(i), narrow<e4m3>(y));
    }
    if (threadIdx.x == 0) a.scale[token] = scale;
    if (token == 0 && threadIdx.x == 0) *a.one = 1;
  }
}

/* gemm [tokens, columns] T · out [tokens, features] T
 * Grid (packs of a row / threads, tokens): a thread makes one pack of kPack elements.  Reads the GEMM's result, with `add`
 * also the residual, and writes out. */
template <class T, int kPack, bool kSiluMul>
__global__ void scale_gemm_kernel(ScaleArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack, token = blockIdx.y;
  if (at >= a.features) return;
  const float x_scale = a.x_scale != nullptr ? a.x_scale[token] : 1;
  const T* const row = static_cast<const T*>(a.gemm) + token * a.features * (kSiluMul ? 2 : 1);
  const auto scaled = [&](int64_t column, float(&y)[kPack]) {
    widen(load_pack<kPack>(row + column), y);
    for (int j = 0; j < kPack; ++j) {
      if (a.weight_scale != nullptr) y[j] *= x_scale * a.weight_scale[column + j];
      if (a.bias != nullptr) y[j] += to_float(static_cast<const bf16*>(a.bias)[column + j]);
    }
  };
  float y[kPack], more[kPack];
  scaled(at, y);
  if (kSiluMul) {
    scaled(a.features + at, more);
    for (int j = 0; j < kPack; ++j) y[j] = __fdividef(y[j], 1.0f + expf(-y[j])) * more[j];
  }
  T* const out = static_cast<T*>(a.out) + token * a.out_stride + at;
  if (a.add) {
    widen(load_pack<kPack>(out), more);
    for (int j = 0; j < kPack; ++j) y[j] += more[j];
  }
  store_pack(out, narrow<T>(y));
}

template <class T, int kPack>
void launch_scale_gemm(const ScaleArgs& a, cudaStream_t stream) {
  constexpr int kThreads = 256, kMaxTokens = 65535;  // grid limit
  const int64_t packs = (a.features + kPack - 1) / kPack;
  for (int64_t first = 0; first < a.tokens; first += kMaxTokens) {
    ScaleArgs part = a;
    part.tokens = std::min<int64_t>(kMaxTokens, a.tokens - first);
    part.gemm = static_cast<const T*>(a.gemm) + first * a.features * (a.silu_mul ? 2 : 1);
    part.x_scale = a.x_scale == nullptr ? nullptr : a.x_scale + first;
    part.out = static_cast<T*>(a.out) + first * a.out_stride;
    const dim3 grid((packs + kThreads - 1) / kThreads, part.tokens);
    const auto kernel = a.silu_mul ? scale_gemm_kernel<T, kPack, true> : scale_gemm_kernel<T, kPack, false>;
    launch(kernel, grid, kThreads, 0, stream, part);
  }
}

}  // namespace

void scale_gemm(const ScaleArgs& a, cudaStream_t stream) {
  const auto with = [&](auto type) {
    using T = decltype(type);
    constexpr int kPack = 16 / sizeof(T);
    if (a.features % kPack == 0 && in_16_bytes(a.out, a.out_stride, sizeof(T))) {
      return launch_scale_gemm<T, kPack>(a, stream);
    }
    launch_scale_gemm<T, 1>(a, stream);
  };
  a.float32_out ? with(float{}) : with(bf16{});
}

void quantise_rows(const QuantiseArgs& a, cudaStream_t stream) {
  if (a.tokens == 0) return;
  const int packs = a.size / kWidth;
  const auto with = [&](auto packs_a_thread) {
    constexpr int each = packs_a_thread;
    const int threads = (packs + each - 1) / each;
    const auto kernel = a.group_stride > 0 ? quantise_rows_kernel<each, true> : quantise_rows_kernel<each, false>;
    launch(kernel, dim3(a.tokens), dim3((threads + kWarp - 1) / kWarp * kWarp), 0, stream, a);
  };
  if (packs <= kMaxThreads) return with(std::integral_constant<int, 1>{});
  if (packs <= 2 * kMaxThreads) return with(std::integral_constant<int, 2>{});
  with(std::integral_constant<int, 4>{});
}

}  // namespace quire::cuda
