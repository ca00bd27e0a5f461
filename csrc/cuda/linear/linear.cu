#include "cuda/linear/linear.h"

#include <cudaTypedefs.h>

#include <algorithm>

#include "cuda/linear/linear.cuh"

namespace quire::cuda {
namespace {

using namespace linears;

// The driver's encoder of tensor maps; asked for at run time, so that nothing links to the driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static void* const found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    return function;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

// A matrix [rows, inner] seen as [slabs, rows, kSlab], in boxes of some slabs of some rows; outside it reads as zeros.
CUtensorMap map_slabs(const LinearArgs& a, const void* data, int64_t rows, int64_t stride, int box_rows, int depth) {
  const auto slabs = static_cast<cuuint64_t>((a.inner + kSlab - 1) / kSlab);
  const cuuint64_t sizes[3] = {kSlab, static_cast<cuuint64_t>(rows), slabs};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(stride) * 2, kSlab * 2};
  const cuuint32_t box[3] = {kSlab, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(depth)};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, a.dtype == Dtype::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "linear: tensor map");
  return map;
}

int tiles_of(int n, int size) { return (n + size - 1) / size; }

// Features of a tile: as few as will do to get by with one CTA on each multiprocessor, or with two, or ...
int tile_features(const LinearArgs& a) {
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int rounds = tiles_of(tiles_of(a.features, a.silu_mul ? kMaxRows / 2 : kMaxRows), multiprocessors);
  return tiles_of(tiles_of(a.features, rounds * multiprocessors), 8) * 8;
}

int tile_rows(const LinearArgs& a) { return tile_features(a) * (a.silu_mul ? 2 : 1); }

template <class T, int kEights>
void run(const LinearArgs& a, cudaStream_t stream) {
  Params p;
  p.bias = a.bias;
  p.out = a.out;
  p.out_stride = a.out_stride;
  p.tokens = a.tokens;
  p.features = a.features;
  p.add = a.add;
  p.silu_mul = a.silu_mul;
  p.tile_features = tile_features(a);
  p.rows = tile_rows(a);
  // Copies of some 32 KB: smaller ones cost more waiting for each other, larger ones leave too few on their way.
  constexpr int kCopyBytes = 32 << 10;
  const int slabs = tiles_of(a.inner, kSlab), slab_bytes = (p.rows + kEights * 8) * 128;
  p.depth = std::clamp(kCopyBytes / slab_bytes, 1, slabs);
  p.count = tiles_of(slabs, p.depth);
  p.stages = std::min({kMaxStages, p.count, kRoom / (slab_bytes * p.depth)});
  const int weight_rows = a.silu_mul ? 2 * a.features : a.features;
  run<T, kEights>(map_slabs(a, a.weight, weight_rows, a.inner, p.tile_features, p.depth),
                  map_slabs(a, a.x, a.tokens, a.x_stride, kEights * 8, p.depth), p,
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
         (a.dtype == Dtype::bf16 || a.dtype == Dtype::fp16) && a.features % 8 == 0 && a.inner % kSlab == 0 &&
         copies(a.x, a.x_stride) && copies(a.weight, a.inner) && copies(a.out, a.out_stride) &&
         a.tokens <= (tile_rows(a) <= kManyTokensRows ? 32 : 16);
}

void linear(const LinearArgs& a, cudaStream_t stream) {
  a.dtype == Dtype::fp16 ? run<fp16>(a, stream) : run<bf16>(a, stream);
}

}  // namespace quire::cuda
