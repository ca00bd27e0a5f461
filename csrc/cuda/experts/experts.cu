// A step of few tokens is as fast as the weights of its experts can be read, each of them once.
//
//   logits [tokens, experts] ── route ──> chosen, weights [tokens, top]: a pair is a token and one of its experts
//
//   gate_up   x ──> between [pairs, inner] = silu(gate) * up        experts_sm90.cu, or elsewhere experts_mma.cu
//   down      between ──> sums [pairs, hidden], with biases          the same
//   combine   out += sum over a token's pairs of weight * sums       here: grid (parts of hidden, tokens)
//
// Sums are float32, in one order that `hidden` and `inner` decide: results do not depend on the other tokens.
#include "cuda/experts/experts.h"

#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"
#include "cuda/experts/parts.cuh"

namespace quire::cuda {
namespace {

constexpr int kWidth = 8;  // numbers that a thread makes
constexpr int kThreads = 128;

template <class T>
__global__ void combine_kernel(ExpertsArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth, token = blockIdx.y;
  if (at >= a.hidden) return;
  T* const out = static_cast<T*>(a.out) + static_cast<int64_t>(token) * a.hidden + at;
  float y[kWidth], total[kWidth] = {};
#pragma unroll 4
  for (int k = 0; k < a.top; ++k) {
    const int pair = token * a.top + k;
    const float weight = a.weights[pair];
    const float4* const sums = reinterpret_cast<const float4*>(a.sums + static_cast<int64_t>(pair) * a.hidden + at);
    const float4 first = sums[0], second = sums[1];
    const float of_pair[kWidth] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < kWidth; ++i) total[i] += weight * of_pair[i];
  }
  widen(load_pack<kWidth>(out), y);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) y[i] += to_float(from_float<T>(total[i]));
  store_pack(out, narrow<T>(y));
}

}  // namespace

void experts(const ExpertsArgs& a, cudaStream_t stream) {
  if (a.tokens == 0) return;
  fits_experts_sm90(a) ? experts_sm90(a, stream) : experts_mma(a, stream);
  by_half_dtype(a.dtype, [&](auto number) {
    constexpr int kOfCta = kThreads * kWidth;
    launch(combine_kernel<decltype(number)>, dim3((a.hidden + kOfCta - 1) / kOfCta, a.tokens), dim3(kThreads), 0,
           stream, a);
  });
}

}  // namespace quire::cuda
