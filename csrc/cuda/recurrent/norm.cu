#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/recurrent/recurrent.h"

namespace quire::cuda {
namespace {

constexpr int kWarp = 32, kMostThreads = 512, kRowThreads = 256;  // threads per row; per CTA of short rows

/* x [tokens, heads, size] In · gate, out T · weight [size] f32.  blockDim.x threads compute a row, blockDim.y rows share
 * a CTA.  The second pass over a row comes from the L1 cache. */
template <class In, class T, int kWidth>
__global__ void __launch_bounds__(kMostThreads) gated_norm_kernel(GatedNormArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t which = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool exists = which < a.tokens * a.heads;
  const int64_t token = which / a.heads, head = which % a.heads;
  const In* row = static_cast<const In*>(a.x.data) + token * a.x.token_stride + head * a.x.head_stride;
  const int step = blockDim.x * kWidth;
  float squares = 0;
  for (int at = threadIdx.x * kWidth; exists && at < a.size; at += step) {
    float x[kWidth];
    widen(load_pack<kWidth>(row + at), x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) squares = fmaf(x[i], x[i], squares);
  }
  const float scale = rsqrtf(sum_of_row(squares) / static_cast<float>(a.size) + a.eps);
  if (!exists) return;
  const T* gate = static_cast<const T*>(a.gate.data) + token * a.gate.token_stride + head * a.gate.head_stride;
  T* out = static_cast<T*>(a.out) + which * a.size;
  for (int at = threadIdx.x * kWidth; at < a.size; at += step) {
    float x[kWidth], z[kWidth], weight[kWidth];
    widen(load_pack<kWidth>(row + at), x);
    widen(load_pack<kWidth>(a.weight + at), weight);
    if (a.gate.data) widen(load_pack<kWidth>(gate + at), z);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x[i] *= scale * weight[i];
      if (a.gate.data) x[i] *= z[i] / (1.0f + __expf(-z[i]));
    }
    store_pack(out + at, narrow<T>(x));
  }
}

template <class In, class T>
void launch_norm(const GatedNormArgs& a, cudaStream_t stream) {
  constexpr int kWide = 4;
  const auto aligned = [](const HeadRows& rows, int bytes) {
    return reinterpret_cast<uintptr_t>(rows.data) % (kWide * bytes) == 0 && rows.token_stride % kWide == 0 &&
           rows.head_stride % kWide == 0;
  };
  const bool wide = a.size % kWide == 0 && aligned(a.x, sizeof(In)) && aligned(a.gate, sizeof(T));
  const int packs = a.size / (wide ? kWide : 1);
  const int threads = packs <= 2 * kWarp ? kWarp : std::min(kMostThreads, (packs + kWarp - 1) / kWarp * kWarp);
  const dim3 block(threads, threads == kWarp ? kRowThreads / kWarp : 1);
  const dim3 grid((a.tokens * a.heads + block.y - 1) / block.y);
  launch(wide ? gated_norm_kernel<In, T, kWide> : gated_norm_kernel<In, T, 1>, grid, block, 0, stream, a);
}

/* a, b [tokens, heads] T · rate, dt_bias [heads] f32 · decay, beta [tokens, heads] f32.  One thread per element. */
template <class T>
__global__ void __launch_bounds__(kRowThreads) delta_gates_kernel(DeltaGatesArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (at >= a.tokens * a.heads) return;
  const int64_t token = at / a.heads, head = at % a.heads;
  const float x = to_float(static_cast<const T*>(a.a)[token * a.a_stride + head]) + a.dt_bias[head];
  const float y = to_float(static_cast<const T*>(a.b)[token * a.b_stride + head]);
  constexpr float kLinear = 20.0f;  // softplus(x) = x in float from here on
  a.decay[at] = a.rate[head] * (x > kLinear ? x : log1pf(expf(x)));
  a.beta[at] = a.beta_scale * to_float(from_float<T>(1.0f / (1.0f + expf(-y))));
}

}  // namespace

void gated_norm(const GatedNormArgs& a, cudaStream_t stream) {
  if (a.tokens * a.heads == 0 || a.size == 0) return;
  by_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    a.wide_x ? launch_norm<float, T>(a, stream) : launch_norm<T, T>(a, stream);
  });
}

void delta_gates(const DeltaGatesArgs& a, cudaStream_t stream) {
  const int64_t count = a.tokens * a.heads;
  if (count == 0) return;
  by_dtype(a.dtype, [&](auto type) {
    launch(delta_gates_kernel<decltype(type)>, dim3((count + kRowThreads - 1) / kRowThreads), dim3(kRowThreads), 0,
           stream, a);
  });
}

}  // namespace quire::cuda
