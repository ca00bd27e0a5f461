// Rules of sampling, shared by all devices, so that equal logits give equal tokens on all of them.
//
//   x       a row's logits, float32, after penalties, bias and masks (`adjusted`)
//   w       2^((x - max x) * scale), scale = log2(e) / temperature: one polynomial, one order of operations (exp2 of
//           cpu/simd.h, exp2_as_cpu of cuda/sampling/sampling.cu)
//   weight  w in fixed point: an integer, round(w * 2^30); the most probable token has 2^30
//   floor   maximum of the floors of top_k, top_p and min_p: tokens with w >= floor are kept, ties included
//   token   the first in vocabulary order at which the running sum of kept weights exceeds goal(hash, their sum)
//
// Integer sums are exact in any order.  So a device may split rows and fill histograms in any way.  A token with less
// than 2^-31 of the maximum probability has weight 0 and is never drawn.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __CUDACC__
#define QUIRE_SHARED __host__ __device__ __forceinline__
#else
#define QUIRE_SHARED inline
#endif

namespace quire::sampling {

// Outcome of a row: one byte.  Written by both devices, read by engine/executor/sampling.py.
constexpr uint8_t kChosen = 0;          // a token was sampled
constexpr uint8_t kNotFinite = 1;       // the raw logits have NaN or +inf, or only -inf: the model is broken
constexpr uint8_t kNothingAllowed = 2;  // some raw logit is finite, but penalties, bias and masks leave no finite logit

// Marks per token of a row: a count of its occurrences in the output, and flags.
constexpr uint32_t kInPrompt = 1u << 31;
constexpr uint32_t kStop = 1u << 30;       // forbidden before min_tokens outputs
constexpr uint32_t kForbidden = 1u << 29;  // outside the request's allowed ids
constexpr uint32_t kCount = kForbidden - 1;

// A row of `table`: the sampling settings of one sequence.  Written by engine/executor/sampling.py (RECORD).
struct alignas(8) Settings {
  int64_t seed;
  uint32_t* marks;       // [V], 16-byte aligned; null: no penalties, allowed ids or stop ids
  const float* bias;     // [V] added to the logits, 16-byte aligned; null: none
  const uint32_t* mask;  // [ceil(V / 32)], bit t % 32 of word t / 32: a grammar allows token t; null: no grammar
  int32_t sibling;
  int32_t prompt_len;
  int32_t top_k;       // 0: off
  int32_t min_tokens;  // outputs before a token marked kStop is allowed
  float scale;         // log2(e) / temperature; 0: argmax, no draw
  float top_p;         // 1: off
  float min_p;         // 0: off
  float repetition, presence, frequency;
};
static_assert(sizeof(Settings) == 72);

// weight = int(w * kOne + kRounding).  The most probable token has weight kOne.  kRounding is the largest float below
// 1/2, so 2^-31 is the smallest w that gets weight 1, although the sum itself rounds.
constexpr float kOne = 1 << 30;
constexpr float kRounding = 0x1.fffffep-2f;

// Applies penalties, bias and masks to a logit, in that order.  Never returns -0, so that equal logits have equal bits.
// Each operation is rounded separately, because fused operations would round differently from device to device.
QUIRE_SHARED float adjusted(float x, uint32_t mark, float bias, const Settings& settings, bool early) {
#ifdef __CUDA_ARCH__
  const auto mul = [](float a, float b) { return __fmul_rn(a, b); };
  const auto div = [](float a, float b) { return __fdiv_rn(a, b); };
  const auto sub = [](float a, float b) { return __fsub_rn(a, b); };
  const auto add = [](float a, float b) { return __fadd_rn(a, b); };
#else
  const auto mul = [](float a, float b) { return a * b; };
  const auto div = [](float a, float b) { return a / b; };
  const auto sub = [](float a, float b) { return a - b; };
  const auto add = [](float a, float b) { return a + b; };
#endif
  if (mark != 0) {
    const uint32_t count = mark & kCount;
    if (count != 0 || (mark & kInPrompt)) x = x > 0 ? div(x, settings.repetition) : mul(x, settings.repetition);
    if (count != 0) x = sub(sub(x, mul(settings.frequency, static_cast<float>(count))), settings.presence);
    if ((mark & kForbidden) || (early && (mark & kStop))) return -std::numeric_limits<float>::infinity();
  }
  return add(x, bias);
}

// Packs a value and its index into one integer key.  A larger value has a larger key; of equal values, the lower index
// has the larger key.  NaN has the largest key.  No value maps to 0.
QUIRE_SHARED uint64_t key_of(float x, int64_t place) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t ordered = x != x ? ~0u : (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(place);
}
QUIRE_SHARED int64_t place_of(uint64_t key) { return static_cast<int64_t>(~static_cast<uint32_t>(key)); }
QUIRE_SHARED float value_of(uint64_t key) {
  const uint32_t ordered = key >> 32, bits = (ordered & 0x80000000u) ? ordered & 0x7fffffffu : ~ordered;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Keys as signed integers in the same order, for all-reduces that have only signed types.
QUIRE_SHARED int64_t to_signed(uint64_t key) { return static_cast<int64_t>(key ^ (uint64_t{1} << 63)); }
QUIRE_SHARED uint64_t from_signed(int64_t key) { return static_cast<uint64_t>(key) ^ (uint64_t{1} << 63); }

// Hash of a row's seed, sibling and output position: stateless, so any position can be drawn at any time.  Three rounds
// of the SplitMix64 finaliser (Steele, Lea, Flood, OOPSLA 2014).
QUIRE_SHARED uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
QUIRE_SHARED uint64_t hash(int64_t seed, int64_t sibling, int64_t position) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15ull;
  uint64_t h = mix(static_cast<uint64_t>(seed) + golden);
  h = mix(h ^ (static_cast<uint64_t>(sibling) + golden));
  return mix(h ^ (static_cast<uint64_t>(position) * golden));
}

// total * hash / 2^64, rounded down: always less than total.
QUIRE_SHARED uint64_t goal(uint64_t hash, uint64_t total) {
#ifdef __CUDA_ARCH__
  return __umul64hi(hash, total);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * total) >> 64);
#endif
}

// Returns the sum of weights that the top-p set must reach.  `total`: sum over all tokens, below 2^53.  The set always
// contains the most probable token.
QUIRE_SHARED uint64_t share(float p, uint64_t total) {
#ifdef __CUDA_ARCH__
  const double part = __dmul_rn(static_cast<double>(p), static_cast<double>(total));
#else
  const double part = static_cast<double>(p) * static_cast<double>(total);
#endif
  const uint64_t truncated = static_cast<uint64_t>(part);
  const uint64_t up = static_cast<double>(truncated) < part ? truncated + 1 : truncated;
  return up > 0 ? up : 1;
}

// Floors are found by histograms over the leading bits of w: its exponent and five bits of its fraction, whose order is
// that of w.  Bucket 0 holds tokens without weight (w < 2^-31), and w = 1 falls near the last bucket.
constexpr int kBuckets = 1024;
constexpr int kBucketShift = 23 - 5;
constexpr int32_t kBucketBase = ((127 - 31) << 5) - 1;
QUIRE_SHARED int32_t bucket(uint32_t bits_of_w) {
  const int32_t code = static_cast<int32_t>(bits_of_w >> kBucketShift) - kBucketBase;
  return code > 0 ? code : 0;
}

}  // namespace quire::sampling
