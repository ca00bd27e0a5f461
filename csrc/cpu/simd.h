// Vectors of float for any CPU: the compiler's own vector types (GCC and clang), as wide as the machine's registers,
// with intrinsics only where C++ cannot express the instruction.
//
// Multiplications and additions are fused only by explicit fma() (-ffp-contract=off).  Fusing changes the result, and
// results must not depend on how a loop was unrolled.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace quire::cpu {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
struct e4m3 {  // 1 sign bit, 4 exponent bits, 3 mantissa bits; no infinity, maximum 448, NaN is 0x7f and 0xff
  uint8_t bits;
};

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <int... i>
inline Floats broadcast(float x, std::integer_sequence<int, i...>) {
  return Floats{((void)i, x)...};
}
inline Floats broadcast(float x) { return broadcast(x, std::make_integer_sequence<int, kLanes>{}); }

template <int... i>
inline Ints lane_indices(std::integer_sequence<int, i...>) {
  return Ints{i...};
}
inline Ints lane_indices() { return lane_indices(std::make_integer_sequence<int, kLanes>{}); }

template <class Do, int... i>
inline void unroll(const Do& run, std::integer_sequence<int, i...>) {
  (run(std::integral_constant<int, i>{}), ...);
}
// Calls run(0), run(1), ... run(n - 1), unrolled: an array indexed by these constants lives in registers.
template <int n, class Do>
inline void unroll(const Do& run) {
  unroll(run, std::make_integer_sequence<int, n>{});
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Loads and stores: kLanes elements at p, any alignment.

inline Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline Floats load(const bf16* p) {
#if defined(__AVX512F__)  // GCC 12 compiles the conversion below to four instructions
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
#elif defined(__AVX2__)
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
#else
  Halves x;
  std::memcpy(&x, p, sizeof x);
  return bit_cast<Floats>(__builtin_convertvector(x, Words) << 16);
#endif
}

inline Floats load(const fp16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(bit_cast<_Float16>(p[i]));
  return x;
#endif
}

inline Floats load(const e4m3* p) {
  Bytes x;
  std::memcpy(&x, p, sizeof x);
  const Words bits = __builtin_convertvector(x, Words), size = bits & 0x7f;
  const Floats normal = bit_cast<Floats>((size << 20) + (120u << 23));  // exponent biases are 7 and 127
  const Floats subnormal = __builtin_convertvector(bit_cast<Ints>(size), Floats) * 0x1p-9f;
  Words result = size < 8 ? bit_cast<Words>(subnormal) : bit_cast<Words>(normal);
  result = size == 0x7f ? Words{} + 0x7fc00000 : result;
  return bit_cast<Floats>(result | (bits & 0x80) << 24);
}

inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

// Rounds to nearest, ties to even; NaN stays NaN.
inline void store(bf16* p, Floats x) {
  Words bits = bit_cast<Words>(x);
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Halves half = __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0, Halves);
  std::memcpy(p, &half, sizeof half);
}

// Returns even[0], odd[0], even[1], odd[1], ... as bfloat16, a pair per lane, rounded to nearest, ties to even.  Values
// must be finite.
template <int... i>
inline Words bf16_pairs(Floats even, Floats odd, std::integer_sequence<int, i...>) {
#if defined(__AVX512BF16__)
  typedef uint16_t Order __attribute__((vector_size(64)));
  const Order order{(i / 2 + i % 2 * kLanes)...};
  const auto apart = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  return bit_cast<Words>(_mm512_permutexvar_epi16(bit_cast<__m512i>(order), apart));
#else
  const auto rounded = [](Words bits) { return bits + 0x7fff + ((bits >> 16) & 1); };
  return rounded(bit_cast<Words>(even)) >> 16 | (rounded(bit_cast<Words>(odd)) & 0xffff0000);
#endif
}
inline Words bf16_pairs(Floats even, Floats odd) {
  return bf16_pairs(even, odd, std::make_integer_sequence<int, 2 * kLanes>{});
}

inline void store(fp16* p, Floats x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = bit_cast<fp16>(static_cast<_Float16>(x[i]));
#endif
}

// Rounds to nearest, ties to even, saturates at +-448; NaN stays NaN.
inline void store(e4m3* p, Floats x) {
  const Words sign = (bit_cast<Words>(x) >> 24) & 0x80;
  const Floats size = bit_cast<Floats>(bit_cast<Words>(x) & 0x7fffffff);
  const Floats capped = size > broadcast(448.0f) ? broadcast(448.0f) : size;
  const Words bits = bit_cast<Words>(capped);
  const Words normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
  // Subnormals, below 2^-6, are 2^-9 apart; this addition leaves the nearest multiple of 2^-9 in the low bits.
  const Words subnormal = bit_cast<Words>(capped + broadcast(0x1.8p14f)) & 0xf;
  const Words result = size < broadcast(0x1p-6f) ? subnormal : normal;
  const Bytes byte = __builtin_convertvector((size == size ? result : Words{} + 0x7f) | sign, Bytes);
  std::memcpy(p, &byte, sizeof byte);
}

// Calls use(i, n) for each n = kLanes elements from i on, then for the n < kLanes elements that remain.
template <class Use>
inline void over_lanes(int64_t size, const Use& use) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) use(i, std::integral_constant<int, kLanes>{});
  if (i < size) use(i, static_cast<int>(size - i));
}

// Reads the first n lanes; the others are zero.
template <class T, int n>
inline Floats read(const T* p, std::integral_constant<int, n>) {
  return load(p);
}
template <class T>
inline Floats read(const T* p, int n) {
  T rest[kLanes] = {};
  std::copy_n(p, n, rest);
  return load(rest);
}
template <class T, int n>
inline void write(T* p, Floats x, std::integral_constant<int, n>) {
  store(p, x);
}
template <class T>
inline void write(T* p, Floats x, int n) {
  T rest[kLanes];
  store(rest, x);
  std::copy_n(rest, n, p);
}

// Sums across lanes.

// Lane i of the result is a[i] + a[i ^ h] if bit h of i is clear, else b[i] + b[i ^ h].
template <int h, int... i>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, ((i & h) ? kLanes + i : i)...) +
         __builtin_shufflevector(a, b, ((i & h) ? kLanes + (i ^ h) : (i ^ h))...);
}

// Lane i of the result is the sum of the lanes of v[i].  Each of log2(kLanes) rounds halves the number of vectors:
// about 3 instructions per vector, fewer than a horizontal sum of each vector.  Overwrites v.
template <int h = kLanes / 2>
inline Floats sum_each(Floats (&v)[kLanes]) {
  unroll<h>([&](auto j) { v[j] = fold<h>(v[j], v[j + h], std::make_integer_sequence<int, kLanes>{}); });
  if constexpr (h > 1) return sum_each<h / 2>(v);
  return v[0];
}

// x with lanes i and i ^ h swapped.
template <int h, int... i>
inline Floats swap(Floats x, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(x, x, (i ^ h)...);
}

template <int h = kLanes / 2>
inline float sum(Floats x) {
  x += swap<h>(x, std::make_integer_sequence<int, kLanes>{});
  if constexpr (h > 1) return sum<h / 2>(x);
  return x[0];
}

template <int h = kLanes / 2>
inline float max_lane(Floats x) {
  x = max(x, swap<h>(x, std::make_integer_sequence<int, kLanes>{}));
  if constexpr (h > 1) return max_lane<h / 2>(x);
  return x[0];
}

// Returns 2^x for x <= 126, to 2 ulp; 0 below 2^-126; NaN stays NaN.  It splits x = n + f with |f| <= 1/2.
// The polynomial of Cephes' exp2f (Moshier) gives 2^f, and 2^n is set in the exponent bits.
inline Floats exp2(Floats x) {
  const Floats rounder = broadcast(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  const Floats y = max(x, broadcast(-126.0f));
  const Floats shifted = y + rounder;
  const Floats f = y - (shifted - rounder);
  Floats p = broadcast(1.535336188319500e-4f);
  p = fma(p, f, broadcast(1.339887440266574e-3f));
  p = fma(p, f, broadcast(9.618437357674640e-3f));
  p = fma(p, f, broadcast(5.550332471162809e-2f));
  p = fma(p, f, broadcast(2.402264791363012e-1f));
  p = fma(p, f, broadcast(6.931472028550421e-1f));
  p = fma(p, f, broadcast(1.0f));
  const Floats two_n = bit_cast<Floats>((bit_cast<Ints>(shifted) + 127) << 23);
  const Floats result = x == x ? p * two_n : x;
  return x < broadcast(-126.0f) ? Floats{} : result;
}

// Returns tanh to 2 ulp.  Small arguments use Cephes' tanhf polynomial (Moshier), because 1 - 2 / (e^2x + 1) would lose
// precision there.
inline Floats tanh(Floats x) {
  const Floats size = max(x, -x);
  const Floats z = x * x;
  Floats p = broadcast(-5.70498872745e-3f);
  p = fma(p, z, broadcast(2.06390887954e-2f));
  p = fma(p, z, broadcast(-5.37397155531e-2f));
  p = fma(p, z, broadcast(1.33314422036e-1f));
  p = fma(p, z, broadcast(-3.33332819422e-1f));
  const Floats small = fma(p * z, x, x);
  const Floats e = exp2(size * broadcast(-2.885390081777927f));  // e^(-2|x|)
  const Floats large = (1.0f - e) / (1.0f + e);
  return size < broadcast(0.625f) ? small : (x < Floats{} ? -large : large);
}

}  // namespace quire::cpu
