// Shared by the kernels for any GPU and those for Hopper: dispatch on the dtype, and an expert's activation.
#pragma once

#include "cuda/common/packs.cuh"
#include "cuda/experts/experts.h"

namespace quire::cuda {

// Calls run(T{}) with the type of `dtype`: bf16 or fp16.
template <class Run>
void by_half_dtype(Dtype dtype, const Run& run) {
  dtype == Dtype::fp16 ? run(fp16{}) : run(bf16{});
}

// An expert's activation.  `silu` rounds to T after every operation, as separate operators would; `clamped` rounds
// once, at the end.
template <class T, Activation kActivation>
__device__ T activated(float gate, float up, const ExpertsArgs& a) {
  if constexpr (kActivation == Activation::silu) {
    gate = to_float(from_float<T>(gate)), up = to_float(from_float<T>(up));
    return from_float<T>(to_float(from_float<T>(__fdividef(gate, 1 + __expf(-gate)))) * up);
  }
  // Comparisons instead of fminf and fmaxf, which would hide NaN.
  gate = gate > a.limit ? a.limit : gate;
  up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
  return from_float<T>(__fdividef((up + 1) * gate, 1 + __expf(-a.alpha * gate)));
}

// The two GEMMs of `experts`: x -> between, and between -> sums.
void experts_mma(const ExpertsArgs& args, cudaStream_t stream);  // any GPU since Ampere, any sizes
bool fits_experts_sm90(const ExpertsArgs& args);                 // the GPU has TMA, and the sizes are multiples of 64
void experts_sm90(const ExpertsArgs& args, cudaStream_t stream);
bool fits_experts_grouped(
    const ExpertsArgs& args);             // the GPU has wgmma (Hopper only), and the sizes are multiples of 64
int tile_pairs(const ExpertsArgs& args);  // maximum pairs per tile of the grouped GEMM
void experts_grouped(const ExpertsArgs& args, cudaStream_t stream);  // sums have args.dtype

}  // namespace quire::cuda
