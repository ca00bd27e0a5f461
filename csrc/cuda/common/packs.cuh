// Element types of a model, and packs: vectors of elements that a thread loads and stores in one access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/dtype.h"

namespace quire::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;
struct e4m3 {
  uint8_t bits;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__device__ inline float to_float(fp16 x) { return __half2float(x); }

// Rounds to nearest; e4m3, which has no infinity, saturates at 448.
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline fp16 from_float<fp16>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline e4m3 from_float<e4m3>(float x) {
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
}

// n consecutive elements, loaded or stored in one access; the address must be aligned to the pack's size.
template <class T, int n>
struct alignas(sizeof(T) * n) Pack {
  T at[n];
};

template <int n, class T>
__device__ Pack<T, n> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, n>*>(p);
}

template <class T, int n>
__device__ void store_pack(T* p, const Pack<T, n>& pack) {
  *reinterpret_cast<Pack<T, n>*>(p) = pack;
}

// Conversions of a pack to and from float.  16-bit elements are converted in pairs: widening takes 1 instruction per
// element instead of 2, narrowing 1/2 instead of 3.
template <class T, int n>
__device__ void widen(const Pack<T, n>& pack, float (&x)[n]) {
  if constexpr (sizeof(T) == 2 && n % 2 == 0) {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      const uint32_t two = reinterpret_cast<const uint32_t*>(pack.at)[i / 2];
      if constexpr (std::is_same_v<T, bf16>) {
        x[i] = __uint_as_float(two << 16);
        x[i + 1] = __uint_as_float(two & 0xffff0000);
      } else {
        const float2 wide = __half22float2(reinterpret_cast<const __half2&>(two));
        x[i] = wide.x, x[i + 1] = wide.y;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = to_float(pack.at[i]);
  }
}

template <class T, int n>
__device__ Pack<T, n> narrow(const float (&x)[n]) {
  Pack<T, n> pack;
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    if constexpr (n % 2 != 0 || std::is_same_v<T, float>) {
      pack.at[i] = from_float<T>(x[i]);
      if (i + 1 < n) pack.at[i + 1] = from_float<T>(x[i + 1]);
    } else if constexpr (std::is_same_v<T, bf16>) {
      reinterpret_cast<__nv_bfloat162*>(pack.at)[i / 2] = __floats2bfloat162_rn(x[i], x[i + 1]);
    } else if constexpr (std::is_same_v<T, fp16>) {
      reinterpret_cast<__half2*>(pack.at)[i / 2] = __floats2half2_rn(x[i], x[i + 1]);
    } else {
      reinterpret_cast<uint16_t*>(pack.at)[i / 2] =
          __nv_cvt_float2_to_fp8x2(make_float2(x[i], x[i + 1]), __NV_SATFINITE, __NV_E4M3);
    }
  }
  return pack;
}

// Calls run(T{}) with the type of `dtype`: f32, bf16 or fp16.  The bindings reject other dtypes.
template <class Run>
void by_dtype(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::f32: return run(float{});
    case Dtype::bf16: return run(bf16{});
    default: return run(fp16{});
  }
}

}  // namespace quire::cuda
