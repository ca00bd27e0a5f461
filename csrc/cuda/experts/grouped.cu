// The launches of `experts` for many pairs: sort.cu, then grouped.cuh twice.
#include "cuda/experts/grouped.h"

#include "cuda/common/launch.cuh"
#include "cuda/experts/parts.cuh"

namespace quire::cuda {

bool fits_experts_grouped(const ExpertsArgs& a) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 && fits_experts_sm90(a);
}

namespace {

// Maximum mean pairs per expert for which packed weights use two parts (kParts) and small tiles.
constexpr int kFewPerExpert = 16;

bool has_few_per_expert(const ExpertsArgs& a) {
  return static_cast<int64_t>(a.tokens) * a.top <= static_cast<int64_t>(kFewPerExpert) * a.experts;
}

template <class Format, grouped::Kind kGateUp>
void run_packed(const grouped::Gemm& gate_up, const grouped::Gemm& down, bool few, cudaStream_t stream) {
  using Many = grouped::PackedRows<Format, 1>;
  using Few = grouped::PackedRows<Format, 2>;
  few ? grouped::run<Few, kGateUp>(gate_up, stream) : grouped::run<Many, kGateUp>(gate_up, stream);
  few ? grouped::run<Few, grouped::Kind::down>(down, stream) : grouped::run<Many, grouped::Kind::down>(down, stream);
}

}  // namespace

int tile_pairs(const ExpertsArgs& a) {
  if (!a.packed) return grouped::kPlainTilePairs;
  return has_few_per_expert(a) ? grouped::kFewTilePairs : grouped::kPackedTilePairs;
}

void experts_grouped(const ExpertsArgs& a, cudaStream_t stream) {
  using grouped::Gemm;
  using grouped::Kind;
  const int pairs = a.tokens * a.top;
  const PairOrder order = pair_order_at(a.order, pairs, a.experts, tile_pairs(a));
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
  using experts_layout::Format;
  const bool few = has_few_per_expert(a);
  if (a.packed == Format::mxfp4) return run_packed<grouped::Mxfp4, Kind::clamped>(gate_up, down, few, stream);
  if (a.packed == Format::fp8) return run_packed<grouped::Fp8, Kind::silu>(gate_up, down, few, stream);
  by_half_dtype(a.dtype, [&](auto number) {
    using Rows = grouped::PlainRows<decltype(number)>;
    a.activation == Activation::clamped ? grouped::run<Rows, Kind::clamped>(gate_up, stream)
                                        : grouped::run<Rows, Kind::silu>(gate_up, stream);
    grouped::run<Rows, Kind::down>(down, stream);
  });
}

}  // namespace quire::cuda
