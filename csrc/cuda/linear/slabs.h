// TMA descriptor of a matrix that is copied in slabs: kSlabBytes of each row.
#pragma once

#include <type_traits>

#include "cuda/linear/linear.cuh"
#include "cuda/linear/tensor_map.h"

namespace quire::cuda::linears {

template <class T>
constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;  // e4m3: bytes
template <>
constexpr CUtensorMapDataType kMapType<bf16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
constexpr CUtensorMapDataType kMapType<fp16> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// Maps a matrix [rows, inner] of T as [slabs, rows, kSlab].  A box has `depth` slabs of `box_rows` rows; TMA fills
// zeros outside of the matrix.
template <class T>
CUtensorMap map_slabs(int inner, const void* data, int64_t rows, int64_t stride, int box_rows, int depth) {
  const cuuint64_t sizes[3] = {kSlab<T>, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(inner / kSlab<T>)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(stride) * sizeof(T), kSlabBytes};
  const cuuint32_t box[3] = {kSlab<T>, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(depth)};
  return tensor_map(kMapType<T>, data, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace quire::cuda::linears
