// The launches of `experts` for many pairs: sort.cu, then grouped.cuh twice.
#include "cuda/experts/grouped.h"

#include "cuda/common/launch.cuh"
#include "cuda/experts/parts.cuh"

namespace quire::cuda {

bool fits_experts_grouped(const ExpertsArgs& a) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 && fits_experts_sm90(a);
}

void experts_grouped(const ExpertsArgs& a, cudaStream_t stream) {
  using grouped::Gemm;
  using grouped::Kind;
  const int pairs = a.tokens * a.top;
  const PairOrder order = pair_order_at(a.order, pairs, a.experts);
  sort_pairs(a.chosen, order, stream);
  gather_rows(a.x, a.hidden * 2, a.top, order, a.gathered, stream);
  const Gemm gate_up{.x = a.gathered,
                     .weight = a.gate_up,
                     .bias = a.gate_up_bias,
                     .out = a.between,
                     .order = order,
                     .rows = a.inner,
                     .size = a.hidden,
                     .experts = a};
  const Gemm down{.x = a.between,
                  .weight = a.down,
                  .bias = a.down_bias,
                  .out = a.sums,
                  .order = order,
                  .rows = a.hidden / 2,
                  .size = a.inner,
                  .experts = a};
  by_half_dtype(a.dtype, [&](auto number) {
    using T = decltype(number);
    a.activation == Activation::clamped ? grouped::run<T, Kind::clamped>(gate_up, stream)
                                        : grouped::run<T, Kind::silu>(gate_up, stream);
    grouped::run<T, Kind::down>(down, stream);
  });
}

}  // namespace quire::cuda
