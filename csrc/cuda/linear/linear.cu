#include "cuda/linear/linear.h"

#include <algorithm>

#include "cuda/linear/linear.cuh"
#include "cuda/linear/slabs.h"

namespace quire::cuda {
namespace {

using namespace linears;

constexpr int kUnit = 8;  // tile_features is a multiple of this

template <class T, int kNTiles>
void run(const LinearArgs& a, cudaStream_t stream) {
  Params p{epilogue_of(a, kUnit)};
  p.share_x = a.share_x;
  // Copies of about 32 KB: smaller ones cost more synchronisation, larger ones leave too few in flight.
  constexpr int kCopyBytes = 32 << 10;
  const int slabs = a.inner / kSlab<T>, bytes = slab_bytes(p.rows, kNTiles);
  p.depth = std::clamp(kCopyBytes / bytes, 1, slabs);
  p.count = tiles_of(slabs, p.depth);
  p.stages = std::min({kMaxStages, p.count, kSmemBytes / (bytes * p.depth)});
  const int weight_rows = a.silu_mul ? 2 * a.features : a.features;
  run<T, kNTiles>(map_slabs<T>(a.inner, a.weight, weight_rows, a.inner, p.tile_features, p.depth),
                  map_slabs<T>(a.inner, a.x, a.tokens, a.x_stride, kNTiles * 8, p.depth), p,
                  tiles_of(a.features, p.tile_features), stream);
}

template <class T>
void run(const LinearArgs& a, cudaStream_t stream) {
  if (a.tokens <= 8) return run<T, 1>(a, stream);
  if (a.tokens <= 16) return run<T, 2>(a, stream);
  run<T, 4>(a, stream);
}

}  // namespace

bool fits_linear(const LinearArgs& a) {
  const auto copies = [](const void* p, int64_t stride) { return in_16_bytes(p, stride, 2); };
  return a.tokens > 0 && a.features > 0 && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 &&
         (a.dtype == Dtype::bf16 || a.dtype == Dtype::fp16) && a.features % 8 == 0 && a.inner % kSlab<bf16> == 0 &&
         copies(a.x, a.x_stride) && copies(a.weight, a.inner) && copies(a.out, a.out_stride) &&
         a.tokens <= (epilogue_of(a, kUnit).rows <= kManyTokensRows ? 32 : 16);
}

void linear(const LinearArgs& a, cudaStream_t stream) {
  a.dtype == Dtype::fp16 ? run<fp16>(a, stream) : run<bf16>(a, stream);
}

}  // namespace quire::cuda
