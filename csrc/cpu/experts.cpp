#include "cpu/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/pool.h"
#include "cpu/simd.h"

namespace quire::cpu {
namespace {

template <class T>
float number(const T* x, int64_t i) {
  return read(x + i, 1)[0];
}

template <class T>
void put(T* x, int64_t i, float value) {
  write(x + i, broadcast(value), 1);
}

template <class T>
float rounded(float x) {
  T to[1];
  put(to, 0, x);
  return number(to, 0);
}

template <class T>
float dot(const T* a, const T* b, int64_t size) {
  Floats products = {};
  over_lanes(size, [&](int64_t i, auto n) { products = fma(read(a + i, n), read(b + i, n), products); });
  return sum(products);
}

// Whether logit a ranks before logit b, where b has the higher index.  NaN is above or below all other values, by its sign.
bool at_least(float a, float b) {
  const auto key = [](float x) {
    const uint32_t bits = bit_cast<uint32_t>(x + 0.0f);  // -0 becomes 0
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
  };
  return key(a) >= key(b);
}

template <class T>
float activated(const ExpertsArgs<T>& a, float gate, float up) {
  if (!a.clamped) {
    gate = rounded<T>(gate), up = rounded<T>(up);
    return rounded<T>(gate / (1 + std::exp(-gate))) * up;
  }
  gate = gate > a.limit ? a.limit : gate;
  up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
  return (up + 1) * gate / (1 + std::exp(-a.alpha * gate));
}

float e2m1(int bits) {
  constexpr float kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return bits & 8 ? -kValues[bits & 7] : kValues[bits & 7];
}

// Value of an element of a tile (experts_layout.h).
float value_of(experts_layout::Format format, const uint8_t* tile, int row, int column) {
  using namespace experts_layout;
  const Place at = place_of(row, column);
  if (format == Format::fp8) {
    float scale;
    std::memcpy(&scale, tile + kFp8Values + row * sizeof(float), sizeof scale);
    const e4m3 value{tile[(at.k / 2 * kTileLanes + at.lane) * 16 + at.k % 2 * 8 + at.pair * 2 + at.e]};
    return number(&value, 0) * scale;
  }
  uint16_t half;
  std::memcpy(&half, tile + ((at.lane * 4 + at.k) * 2 + at.e) * sizeof half, sizeof half);
  const auto bit = [&](int i) { return half >> i & 1; };
  const Field& field = kFields[at.pair];
  const int bits = bit(field.sign) << 3 | bit(field.e1) << 2 | bit(field.e0) << 1 | bit(field.m);
  const uint8_t scale = tile[kMxfp4Values + at.lane / 4 * 4 + row % 16 / 8 * 2 + column / 32];
  return std::ldexp(e2m1(bits), scale - 253);
}

// The weight of all experts: low and high rows, as in experts_layout.h.
template <class T>
struct Rows {
  const void* weight;
  std::optional<experts_layout::Format> packed;
  int64_t all, size;  // low and high rows per expert; elements per row
  bool interleaved;   // without a packed layout: low and high rows alternate

  // Returns a row, widened to `buffer` if it is packed.
  const T* row(int64_t expert, int64_t row, bool high, std::vector<T>& buffer) const {
    if (!packed) {
      const int64_t at = interleaved ? 2 * row + high : high * (all / 2) + row;
      return static_cast<const T*>(weight) + (expert * all + at) * size;
    }
    using experts_layout::kColumns, experts_layout::kRows;
    const int64_t slabs = size / kColumns, tiles = (all / 2 + kRows - 1) / kRows, bytes = tile_bytes(*packed);
    buffer.resize(size);
    for (int64_t slab = 0; slab < slabs; ++slab) {
      const int64_t tile = ((expert * tiles + row / kRows) * slabs + slab) * 2 + high;
      const uint8_t* const at = static_cast<const uint8_t*>(weight) + tile * bytes;
      for (int c = 0; c < kColumns; ++c) {
        put(buffer.data(), slab * kColumns + c, value_of(*packed, at, static_cast<int>(row % kRows), c));
      }
    }
    return buffer.data();
  }
};

// Adds weight * expert(x) to the totals of a token.
template <class T>
void add_expert(const ExpertsArgs<T>& a, int64_t token, int64_t expert, float weight) {
  const T* const x = a.x + token * a.hidden;
  T* const between = a.between + token * a.inner;
  std::vector<T> buffer;
  const Rows<T> gate_up{a.gate_up, a.packed, 2 * a.inner, a.hidden, a.clamped};
  for (int64_t row = 0; row < a.inner; ++row) {
    const int64_t gate_row = a.clamped ? 2 * row : row, up_row = a.clamped ? 2 * row + 1 : a.inner + row;
    float gate = dot(gate_up.row(expert, row, false, buffer), x, a.hidden);
    float up = dot(gate_up.row(expert, row, true, buffer), x, a.hidden);
    if (a.gate_up_bias != nullptr) {
      gate += number(a.gate_up_bias, expert * 2 * a.inner + gate_row);
      up += number(a.gate_up_bias, expert * 2 * a.inner + up_row);
    }
    put(between, row, activated(a, gate, up));
  }
  const Rows<T> down{a.down, a.packed, a.hidden, a.inner, false};
  float* const totals = a.totals + token * a.hidden;
  const int64_t half = a.hidden / 2;
  for (int64_t row = 0; row < a.hidden; ++row) {
    float y = dot(down.row(expert, row < half ? row : row - half, row >= half, buffer), between, a.inner);
    if (a.down_bias != nullptr) y += number(a.down_bias, expert * a.hidden + row);
    totals[row] += weight * y;
  }
}

}  // namespace

template <class T>
void route(const RouteArgs<T>& a) {
  over_rows(a.tokens, a.experts, a.threads, [&](int64_t token) {
    const T* const logits = a.logits + token * a.experts;
    int32_t* const chosen = a.chosen + token * a.top;
    float* const weights = a.weights + token * a.top;
    float largest = -INFINITY, sum = 0, chosen_sum = 0;
    for (int64_t e = 0; e < a.experts; ++e) largest = std::fmax(largest, number(logits, e));
    for (int64_t e = 0; e < a.experts; ++e) sum += std::exp(number(logits, e) - largest);
    for (int64_t k = 0; k < a.top; ++k) {
      int64_t best = -1;
      for (int64_t e = 0; e < a.experts; ++e) {
        if (std::find(chosen, chosen + k, static_cast<int32_t>(e)) != chosen + k) continue;
        if (best < 0 || !at_least(number(logits, best), number(logits, e))) best = e;
      }
      chosen[k] = static_cast<int32_t>(best);
      weights[k] = std::exp(number(logits, best) - largest) / sum;
      chosen_sum += weights[k];
    }
    for (int64_t k = 0; k < a.top; ++k) {
      if (a.normalise) weights[k] /= chosen_sum;
      if (a.rounded) weights[k] = rounded<T>(weights[k]);
    }
  });
}

template <class T>
void experts(const ExpertsArgs<T>& a) {
  over_rows(a.tokens, a.top * a.hidden * a.inner, a.threads, [&](int64_t token) {
    float* const totals = a.totals + token * a.hidden;
    std::fill_n(totals, a.hidden, 0.0f);
    for (int64_t pair = token * a.top; pair < (token + 1) * a.top; ++pair) {
      add_expert(a, token, a.chosen[pair], a.weights[pair]);
    }
    T* const out = a.out + token * a.hidden;
    for (int64_t i = 0; i < a.hidden; ++i) put(out, i, (a.add ? number(out, i) : 0.0f) + rounded<T>(totals[i]));
  });
}

template void route(const RouteArgs<float>&);
template void route(const RouteArgs<bf16>&);
template void route(const RouteArgs<fp16>&);
template void experts(const ExpertsArgs<float>&);
template void experts(const ExpertsArgs<bf16>&);
template void experts(const ExpertsArgs<fp16>&);

}  // namespace quire::cpu
