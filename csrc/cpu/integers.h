// Integer GEMM helpers: quantisation of activations to 16 bits, and the multiply-add of a lane.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/simd.h"

namespace quire::cpu {

// Integer to which a row's maximum magnitude is mapped: the maximum of 256 * high + low for signed bytes high and low.
constexpr float kLargestInteger = 127 * 256 + 127;

// Quantises x [inner]: calls use(k, q) with kLanes integers q: round(x[k] / s), round(x[k + 1] / s), ..., and zeros
// past the end.  Returns the scale s; NaN if a value is not finite.
template <class T, class Use>
float round_row(const T* x, int64_t inner, const Use& use) {
  Words sizes{};  // magnitudes compared as integers: infinities and NaN are the largest
  over_lanes(inner, [&](int64_t k, auto n) {
    const Words size = bit_cast<Words>(read(x + k, n)) & 0x7fffffff;
    sizes = size > sizes ? size : sizes;
  });
  uint32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = std::max<uint32_t>(largest, sizes[i]);
  const bool finite = largest < 0x7f800000;
  const float inverse = finite ? std::min(kLargestInteger / bit_cast<float>(largest), 0x1p126f) : 0.0f;
  const Floats rounder = broadcast(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  over_lanes(inner, [&](int64_t k, auto n) {
    use(k, bit_cast<Ints>(read(x + k, n) * inverse + rounder) - bit_cast<Ints>(rounder));
  });
  return finite ? 1 / inverse : std::numeric_limits<float>::quiet_NaN();
}

// Returns sum + w[0] x[0] + w[1] x[1] + ... in every lane.  w is the lane's part of `weights`: four unsigned bytes with
// VNNI, otherwise two 16-bit integers from 0 to 32,767.  x has as many signed integers of that width, equal for all
// lanes.
inline Words multiply_add(Words sum, Words weights, int32_t x) {
#if defined(__AVX512VNNI__)
  return bit_cast<Words>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(weights), _mm512_set1_epi32(x)));
#elif defined(__AVX512BW__)
  return sum + bit_cast<Words>(_mm512_madd_epi16(bit_cast<__m512i>(weights), _mm512_set1_epi32(x)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + bit_cast<Words>(_mm256_madd_epi16(bit_cast<__m256i>(weights), _mm256_set1_epi32(x)));
#else
  sum += (weights & 0xffff) * static_cast<uint32_t>(static_cast<int16_t>(x));
  return sum + (weights >> 16) * static_cast<uint32_t>(x >> 16);
#endif
}

#if defined(__AVX512VNNI__)
// Stores kLanes 16-bit integers as signed bytes: of every four integers the high bytes, then the low bytes.
inline void store_bytes(uint8_t* to, Ints q) {
  typedef int8_t Chars __attribute__((vector_size(16)));
  typedef int32_t Quads __attribute__((vector_size(16)));  // four bytes per lane
  const Chars low_bytes = __builtin_convertvector(q, Chars);
  const Chars high_bytes = __builtin_convertvector((q - __builtin_convertvector(low_bytes, Ints)) >> 8, Chars);
  const Quads low = bit_cast<Quads>(low_bytes), high = bit_cast<Quads>(high_bytes);
  const Quads steps[2] = {__builtin_shufflevector(high, low, 0, 4, 1, 5),
                          __builtin_shufflevector(high, low, 2, 6, 3, 7)};
  std::memcpy(to, steps, sizeof steps);
}
#endif

}  // namespace quire::cpu
