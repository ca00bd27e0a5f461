// mma.sync and the instructions that load its operands, for any GPU since Ampere.
//
// mma16816 multiplies A [16, 16] by B [16, 8] into C [16, 8] (float32).  With g = lane / 4 and t = lane % 4 a lane
// holds:
//   A  a[0] row g, columns 2t and 2t + 1;  a[1] row g + 8;  a[2], a[3] the same rows, columns 2t + 8 and 2t + 9
//   B  b[0] rows 2t and 2t + 1, column g;  b[1] rows 2t + 8 and 2t + 9
//   C  c[0], c[1] row g, columns 2t and 2t + 1;  c[2], c[3] row g + 8
// (PTX ISA, "Matrix Fragments for mma.m16n8k16").

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/common/async_copy.cuh"

namespace quire::cuda {

// Loads matrices of 8 rows of 16 bytes (ldmatrix).  Lane 8 m + i passes the address of row i of matrix m.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void load_matrices(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

__device__ inline void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void load_transposed(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

// Transposes an 8x8 matrix of 2-byte elements, two per lane (row lane / 4).
__device__ inline uint32_t transpose(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Transposes within a quad: the four lanes that share one row of an mma result.  Before the call, each lane holds 2
// columns of each of 4 column blocks (8 columns each).  The result of lane t of the quad is all 8 columns of block t.
__device__ inline uint4 gather_block(uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3, int lane) {
  const bool high = lane & 2, odd = lane & 1;
  const uint32_t a0 = __shfl_xor_sync(~0u, high ? x0 : x2, 2), a1 = __shfl_xor_sync(~0u, high ? x1 : x3, 2);
  // First step, between lanes 2 apart: low lanes keep blocks 0 and 1, high lanes 2 and 3.
  const uint32_t own0 = high ? x2 : x0, own1 = high ? x3 : x1;
  const uint32_t b0 = __shfl_xor_sync(~0u, odd ? own0 : own1, 1), b1 = __shfl_xor_sync(~0u, odd ? a0 : a1, 1);
  const uint32_t own = odd ? own1 : own0, far = odd ? a1 : a0;
  // own: columns of this lane; b0: columns of lane ^ 1; far: lane ^ 2; b1: lane ^ 3
  const uint32_t even_pair = odd ? b0 : own, odd_pair = odd ? own : b0;
  const uint32_t far_even = odd ? b1 : far, far_odd = odd ? far : b1;
  return high ? make_uint4(far_even, far_odd, even_pair, odd_pair) : make_uint4(even_pair, odd_pair, far_even, far_odd);
}

template <class T>
__device__ inline void mma16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ inline void mma16816<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ inline void mma16816<__half>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Packs two floats into one operand register, `low` in the lower half.
template <class T>
__device__ inline uint32_t pack(float low, float high);

template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

template <>
__device__ inline uint32_t pack<__half>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// Widens two e4m3 values in the lower half of `pair` to fp16, exactly.
__device__ inline uint32_t widen_e4m3(uint32_t pair) {
  const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return wide.x | static_cast<uint32_t>(wide.y) << 16;
}

// Widens four e4m3 values to fp16, into two registers; two calls of widen_e4m3 would need a shift for the upper two
// values.
__device__ inline void widen_four(uint32_t four, uint32_t& first, uint32_t& second) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(four));
}

}  // namespace quire::cuda
