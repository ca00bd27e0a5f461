// Encoding of TMA descriptors (tensor maps).
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "cuda/common/launch.cuh"

namespace quire::cuda {

// The driver's function that encodes tensor maps, looked up at run time, so that the extension does not link libcuda.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static void* const encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    return function;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encoder);
}

// sizes, box: in elements, innermost dimension first.  strides: in bytes, for all dimensions but the innermost.  TMA
// fills zeros outside of the tensor.
template <int kDimensions>
CUtensorMap tensor_map(CUtensorMapDataType type, const void* data, const cuuint64_t (&sizes)[kDimensions],
                       const cuuint64_t (&strides)[kDimensions - 1], const cuuint32_t (&box)[kDimensions],
                       CUtensorMapSwizzle swizzle) {
  cuuint32_t steps[kDimensions];
  for (cuuint32_t& step : steps) step = 1;
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(&map, type, kDimensions, const_cast<void*>(data), sizes, strides, box,
                                               steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "linear: tensor map");
  return map;
}

}  // namespace quire::cuda
