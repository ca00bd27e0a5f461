#include "cuda/layers/layers.h"

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/warp.cuh"

namespace quire::cuda {
namespace {

constexpr int kWarp = 32, kMaxThreads = 1024, kManyRows = 512;

/* x, out [tokens, heads, size] · weight [size], all T.   RMSNorm (Zhang, Sennrich 2019)
 * blockDim.x threads keep a row (one head of one token) in registers: kPacks times kWidth elements each.
 * Short rows (heads) share a thread block, blockDim.y of them.  Grid: enough thread blocks for all rows.
 * Moves 2 * size elements per row.  No kernel writes weights, so if registers suffice, the weights are loaded while the
 * preceding kernel still runs. */
template <class T, int kWidth, int kPacks>
__global__ void __launch_bounds__(kMaxNorm / kWidth / kPacks < kMaxThreads ? kMaxNorm / kWidth / kPacks : kMaxThreads)
    rms_norm_kernel(RmsNormArgs a) {
  const T* weights = static_cast<const T*>(a.weight);
  Pack<T, kWidth> weight, row[kPacks];
  const auto element = [&](int i) { return static_cast<int>((i * blockDim.x + threadIdx.x) * kWidth); };
  const auto load_row = [&](Pack<T, kWidth>(&row)[kPacks], const T* from) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (element(i) < a.size) row[i] = load_pack<kWidth>(from + element(i));
    }
  };
  if (kPacks == 1 && element(0) < a.size) weight = load_pack<kWidth>(weights + element(0));
  let_next_kernel_start();
  wait_for_previous_kernels();

  const int64_t which = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool exists = which < a.tokens * a.heads;
  const int64_t token = a.heads == 1 ? which : which / a.heads, head = a.heads == 1 ? 0 : which % a.heads;
  const auto at = [&](const Heads& t) {
    return static_cast<T*>(t.data) + token * t.token_stride + head * t.head_stride;
  };
  float x[kWidth], squares = 0;
  if (exists) {
    load_row(row, at(a.x));
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (element(i) >= a.size) continue;
      widen(row[i], x);
      for (int j = 0; j < kWidth; ++j) squares += x[j] * x[j];
    }
  }
  const float scale = rsqrtf(sum_of_row(squares) / static_cast<float>(a.size) + a.eps);
  if (!exists) return;
  T* out = at(a.out);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (element(i) >= a.size) continue;
    if (kPacks > 1) weight = load_pack<kWidth>(weights + element(i));
    float w[kWidth];
    widen(row[i], x);
    widen(weight, w);
    for (int j = 0; j < kWidth; ++j) x[j] = x[j] * scale * w[j];
    store_pack(out + element(i), narrow<T>(x));
  }
}

template <class T, int kWidth, int kPacks>
void launch_rms_norm(const RmsNormArgs& a, dim3 block, cudaStream_t stream) {
  const dim3 grid((a.tokens * a.heads + block.y - 1) / block.y);
  launch(rms_norm_kernel<T, kWidth, kPacks>, grid, block, 0, stream, a);
}

template <class T, int kWidth>
void launch_rms_norm(const RmsNormArgs& a, cudaStream_t stream) {
  const int packs = (a.size + kWidth - 1) / kWidth;
  const auto with = [&](auto packs_a_thread) {
    constexpr int each = packs_a_thread;
    const int threads = (packs + each - 1) / each;
    if (threads > kWarp) {
      return launch_rms_norm<T, kWidth, each>(a, dim3((threads + kWarp - 1) / kWarp * kWarp), stream);
    }
    int lanes = 1;
    while (lanes < threads) lanes *= 2;
    launch_rms_norm<T, kWidth, each>(a, dim3(lanes, 128 / lanes), stream);
  };
  // With few rows the latency of a row matters, and one pack per thread is faster.  With many rows the bytes in flight
  // matter, and two packs per thread are faster.
  if (a.tokens * a.heads > kManyRows && packs > 4 * kWarp && packs <= 2 * kMaxThreads) {
    return with(std::integral_constant<int, 2>{});
  }
  if (packs <= kMaxThreads) return with(std::integral_constant<int, 1>{});
  with(std::integral_constant<int, kMaxNorm / (kMaxThreads * kWidth)>{});
}

/* gate_up [tokens, 2 * size] · out [tokens, size], all T.   SwiGLU (Shazeer 2020)
 * Grid (packs of a row / 256, tokens): a thread makes one pack.  Moves 3 * size elements per token. */
template <class T, int kWidth>
__global__ void silu_mul_kernel(SiluMulArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth, token = blockIdx.y;
  if (i >= a.size) return;
  const T* from = static_cast<const T*>(a.gate_up) + token * 2 * a.size + i;
  const Pack<T, kWidth> gates = load_pack<kWidth>(from), ups = load_pack<kWidth>(from + a.size);
  float gate[kWidth], up[kWidth];
  widen(gates, gate);
  widen(ups, up);
  for (int j = 0; j < kWidth; ++j) up[j] *= __fdividef(gate[j], 1.0f + expf(-gate[j]));
  store_pack(static_cast<T*>(a.out) + token * a.size + i, narrow<T>(up));
}

template <class T, int kWidth>
void launch_silu_mul(const SiluMulArgs& a, cudaStream_t stream) {
  constexpr int kThreads = 256, kMaxTokens = 65535;  // grid limit
  const int64_t packs = (a.size + kWidth - 1) / kWidth;
  for (int64_t first = 0; first < a.tokens; first += kMaxTokens) {
    SiluMulArgs part = a;
    part.tokens = std::min<int64_t>(kMaxTokens, a.tokens - first);
    part.gate_up = static_cast<const T*>(a.gate_up) + first * 2 * a.size;
    part.out = static_cast<T*>(a.out) + first * a.size;
    launch(silu_mul_kernel<T, kWidth>, dim3((packs + kThreads - 1) / kThreads, part.tokens), kThreads, 0, stream, part);
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& a, cudaStream_t stream) {
  if (a.tokens * a.heads == 0) return;
  by_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = 16 / sizeof(T);
    const auto aligned = [](const Heads& t) {
      return in_16_bytes(t.data, t.token_stride, sizeof(T)) && in_16_bytes(t.data, t.head_stride, sizeof(T));
    };
    if (a.size % kWidth == 0 && aligned(a.x) && aligned(a.out) && in_16_bytes(a.weight, 0, 0)) {
      launch_rms_norm<T, kWidth>(a, stream);
    } else {
      launch_rms_norm<T, 1>(a, stream);
    }
  });
}

void silu_mul(const SiluMulArgs& a, cudaStream_t stream) {
  by_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = 16 / sizeof(T);
    if (in_16_bytes(a.gate_up, a.size, sizeof(T)) && in_16_bytes(a.out, 0, 0)) {
      launch_silu_mul<T, kWidth>(a, stream);
    } else {
      launch_silu_mul<T, 1>(a, stream);
    }
  });
}

}  // namespace quire::cuda
