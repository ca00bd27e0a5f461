// A mixture of experts for any number of tokens.
//
//   logits [tokens, experts] ── route ──> chosen, weights [tokens, top]: a pair is a token and one of its experts
//
//   gate_up   x ──> between = silu(gate) * up     up to kFewPairs pairs: experts_sm90.cu or experts_mma.cu
//   down      between ──> sums, with biases       more pairs: sort.cu and grouped.cuh
//   combine   out = sum over a token's pairs of weight * sums       here: grid (parts of hidden, tokens)
//
// With few pairs the GEMMs are bound by reading the weights of the chosen experts, each of them once.  The kernels for
// few pairs split an expert's rows into small items, so that the experts of a single token keep all multiprocessors
// busy.
//
// GEMMs accumulate in float32, in an order that depends only on `hidden` and `inner`.  So a token's result does not
// depend on the other tokens, unless their number selects other kernels.
#include "cuda/experts/experts.h"

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/experts/parts.cuh"
#include "cuda/experts/sort.h"

namespace quire::cuda {
namespace {

constexpr int kWidth = 8;  // output elements per thread
constexpr int kThreads = 128;

// Above this number of pairs, `grouped` is faster than the kernels for few pairs.
constexpr int kFewPairs = 256;

template <class T, class Sum>
__global__ void combine_kernel(ExpertsArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth, token = blockIdx.y;
  if (at >= a.hidden) return;
  T* const out = static_cast<T*>(a.out) + static_cast<int64_t>(token) * a.hidden + at;
  float y[kWidth] = {}, total[kWidth] = {};
#pragma unroll 4
  for (int k = 0; k < a.top; ++k) {
    const int pair = token * a.top + k;
    const float weight = a.weights[pair];
    float of_pair[kWidth];
    widen(load_pack<kWidth>(static_cast<const Sum*>(a.sums) + static_cast<int64_t>(pair) * a.hidden + at), of_pair);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) total[i] += weight * of_pair[i];
  }
  if (a.add) widen(load_pack<kWidth>(out), y);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) y[i] += to_float(from_float<T>(total[i]));
  store_pack(out, narrow<T>(y));
}

}  // namespace

bool takes_packed(const ExpertsArgs& a) {
  const bool clamped = a.activation == Activation::clamped;
  return fits_experts_grouped(a) && a.dtype == Dtype::bf16 && clamped == (a.packed == experts_layout::Format::mxfp4);
}

ExpertsWay way_of(const ExpertsArgs& a) {
  if (a.packed) return ExpertsWay::grouped;
  if (!fits_experts_sm90(a)) return ExpertsWay::few;
  const bool many = static_cast<int64_t>(a.tokens) * a.top > kFewPairs;
  return many && fits_experts_grouped(a) ? ExpertsWay::grouped : ExpertsWay::few_sm90;
}

ExpertsMemory memory_of(const ExpertsArgs& a, ExpertsWay way) {
  const int64_t pairs = static_cast<int64_t>(a.tokens) * a.top, half = sizeof(uint16_t);
  const bool grouped = way == ExpertsWay::grouped;
  return {.between = pairs * a.inner * half,
          .sums = pairs * a.hidden * (grouped ? half : static_cast<int64_t>(sizeof(float))),
          .order = grouped ? pair_order_bytes(static_cast<int>(pairs), a.experts, tile_pairs(a)) : 0,
          .gathered = grouped ? pairs * a.hidden * half : 0};
}

void experts(const ExpertsArgs& a, ExpertsWay way, cudaStream_t stream) {
  if (a.tokens == 0) return;
  switch (way) {
    case ExpertsWay::few: experts_mma(a, stream); break;
    case ExpertsWay::few_sm90: experts_sm90(a, stream); break;
    case ExpertsWay::grouped: experts_grouped(a, stream); break;
  }
  by_half_dtype(a.dtype, [&](auto number) {
    using T = decltype(number);
    constexpr int kOfCta = kThreads * kWidth;
    launch(way == ExpertsWay::grouped ? combine_kernel<T, T> : combine_kernel<T, float>,
           dim3((a.hidden + kOfCta - 1) / kOfCta, a.tokens), dim3(kThreads), 0, stream, a);
  });
}

}  // namespace quire::cuda
