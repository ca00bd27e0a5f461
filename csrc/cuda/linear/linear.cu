#include "cuda/linear/linear.h"

#include <algorithm>

#include "cuda/linear/linear.cuh"
#include "cuda/linear/tensor_map.h"

namespace quire::cuda {
namespace {

using namespace linears;

template <class T>
constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;  // e4m3: bytes
template <>
constexpr CUtensorMapDataType kMapType<bf16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
constexpr CUtensorMapDataType kMapType<fp16> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// A matrix [rows, inner] of T seen as [slabs, rows, kSlab], in boxes of some slabs of some rows; outside it reads as zeros.
template <class T>
CUtensorMap map_slabs(int inner, const void* data, int64_t rows, int64_t stride, int box_rows, int depth) {
  const cuuint64_t sizes[3] = {kSlab<T>, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(inner / kSlab<T>)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(stride) * sizeof(T), kSlabBytes};
  const cuuint32_t box[3] = {kSlab<T>, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(depth)};
  return tensor_map(kMapType<T>, data, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

constexpr int kMostBlockInner = 1 << 17;  // else the table of scales takes the room of the stages

int tile_features(const LinearArgs& a) { return features_of_tile(a.features, a.silu_mul, 8); }

int tile_rows(const LinearArgs& a) { return tile_features(a) * (a.silu_mul ? 2 : 1); }

template <class T, class W, int kEights, bool kGrid = false>
void run(const LinearArgs& a, cudaStream_t stream) {
  constexpr int kXSlabs = sizeof(T) / sizeof(W);
  Params p;
  p.x = a.x;
  p.x_stride = a.x_stride;
  p.inner = a.inner;
  p.scale = a.scale;
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
  const int slabs = a.inner / kSlab<W>, bytes = slab_bytes<T, W>(p.rows, kEights);
  p.depth = std::clamp(kCopyBytes / bytes, 1, slabs);
  p.count = tiles_of(slabs, p.depth);
  p.stages = std::min({kMaxStages, p.count, (kRoom - (kGrid ? table_bytes(p) : 0)) / (bytes * p.depth)});
  const int weight_rows = a.silu_mul ? 2 * a.features : a.features;
  run<T, W, kEights, kGrid>(map_slabs<W>(a.inner, a.weight, weight_rows, a.inner, p.tile_features, p.depth),
                     map_slabs<T>(a.inner, a.x, a.tokens, a.x_stride, kEights * 8, p.depth * kXSlabs), p,
                     tiles_of(a.features, p.tile_features), stream);
}

template <class T>
void run(const LinearArgs& a, cudaStream_t stream) {
  if (a.tokens <= 8) return run<T, T, 1>(a, stream);
  if (a.tokens <= 16) return run<T, T, 2>(a, stream);
  run<T, T, 4>(a, stream);
}

}  // namespace

bool fits_linear(const LinearArgs& a) {
  const auto copies = [](const void* p, int64_t stride, int64_t number_bytes) {
    return in_16_bytes(p, stride, number_bytes);
  };
  const bool eight_bits = a.scale != nullptr;
  return a.tokens > 0 && a.features > 0 && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 &&
         (a.dtype == Dtype::bf16 || (a.dtype == Dtype::fp16 && !eight_bits)) && a.features % 8 == 0 &&
         a.inner % (eight_bits ? kSlab<e4m3> : kSlab<bf16>) == 0 && copies(a.x, a.x_stride, 2) &&
         (!a.blocks || (a.features % kBlock == 0 && a.inner <= kMostBlockInner)) &&
         copies(a.weight, a.inner, eight_bits ? 1 : 2) && copies(a.out, a.out_stride, 2) &&
         a.tokens <= (eight_bits ? kFewTokens : tile_rows(a) <= kManyTokensRows ? 32 : 16);
}

void linear(const LinearArgs& a, cudaStream_t stream) {
  if (a.blocks) return run<bf16, e4m3, 1, true>(a, stream);
  if (a.scale != nullptr) return run<bf16, e4m3, 1>(a, stream);
  a.dtype == Dtype::fp16 ? run<fp16>(a, stream) : run<bf16>(a, stream);
}

}  // namespace quire::cuda
