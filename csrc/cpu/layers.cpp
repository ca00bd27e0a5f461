#include "cpu/layers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/pool.h"
#include "cpu/simd.h"

namespace quire::cpu {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

// e^x to 3 ulp, capped at 2^126. exp2(x * log2(e)) alone would round its argument: an error of many ulp for large x.
Floats exp(Floats x) {
  constexpr float kLow = 1.925963033500e-8f;  // log2(e) - kLog2e
  const Floats y = x * broadcast(kLog2e);
  const Floats rest = fma(x, broadcast(kLog2e), -y) + x * broadcast(kLow);
  const Floats power = exp2(-max(-y, broadcast(-126.0f)));
  return fma(power, rest * broadcast(0.6931472f), power);
}

// 1 / sqrt(mean(x^2) + eps) of a head or row, from its sum of squares.
Floats norm_scale(Floats squares, int64_t size, float eps) {
  return broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
}

template <class T>
Floats sum_of_squares(const T* x, int64_t size) {
  Floats squares = {};
  over_lanes(size, [&](int64_t i, auto n) {
    const Floats one = read(x + i, n);
    squares = fma(one, one, squares);
  });
  return squares;
}

// to = from * scale * (weight + offset).  `to` may equal `from`.
template <class T>
void apply_norm(T* to, const T* from, const T* weight, Floats scale, int64_t size, float offset = 0.0f) {
  over_lanes(size,
             [&](int64_t i, auto n) { write(to + i, read(from + i, n) * scale * (read(weight + i, n) + offset), n); });
}

// Returns x / scale for an e4m3 cache, and x for other caches.
template <class To>
Floats as_stored(Floats x, Floats scale) {
  return std::is_same_v<To, e4m3> ? x / scale : x;
}

// Rotates a head [size]: with halves (a, b) of `from`, to = (a cos - b sin, b cos + a sin).  `to` may equal `from`.
template <class To, class T>
void rotate(To* to, const T* from, const T* cos, const T* sin, int64_t size, Floats scale) {
  const int64_t half = size / 2;
  over_lanes(half, [&](int64_t i, auto n) {
    const Floats a = read(from + i, n), b = read(from + half + i, n);
    write(to + i, as_stored<To>(a * read(cos + i, n) - b * read(sin + i, n), scale), n);
    write(to + half + i, as_stored<To>(b * read(cos + half + i, n) + a * read(sin + half + i, n), scale), n);
  });
}

}  // namespace

template <class T>
void rms_norm(Heads<const T> x, const T* weight, float eps, Heads<T> out, int64_t tokens, int64_t heads, int64_t size,
              int threads) {
  over_rows(tokens * heads, size, threads, [&](int64_t row) {
    const int64_t token = row / heads, head = row % heads;
    const T* from = x.at(token, head);
    apply_norm(out.at(token, head), from, weight, norm_scale(sum_of_squares(from, size), size, eps), size);
  });
}

template <class T>
void silu_mul(const T* gate_up, T* out, int64_t tokens, int64_t size, int threads) {
  over_rows(tokens, size, threads, [&](int64_t t) {
    const T* gate = gate_up + t * 2 * size;
    over_lanes(size, [&](int64_t i, auto n) {
      const Floats g = read(gate + i, n);
      const Floats e = exp(-g);
      write(out + t * size + i, g / (1.0f + e) * read(gate + size + i, n), n);
    });
  });
}

template <class T, class Stored>
void rope_kv_write(const RopeArgs<T>& a) {
  const int64_t size = a.size, heads = a.heads, kv_heads = a.kv_heads;
  over_rows(a.tokens, (heads + 2 * kv_heads) * size, a.threads, [&](int64_t t) {
    const T *c = a.cos + t * a.cos_stride, *s = a.sin + t * a.sin_stride;
    for (int64_t h = 0; h < heads; ++h) {
      T* q = a.qkv.at(t, h);
      if (a.q_norm) apply_norm(q, q, a.q_norm, norm_scale(sum_of_squares(q, size), size, a.eps), size, a.norm_offset);
      rotate(q, q, c, s, size, broadcast(1.0f));
    }
    if (a.kv_indices[t] < 0) return;
    const int64_t block = a.kv_indices[t] / a.block_size, offset = a.kv_indices[t] % a.block_size;
    Stored* k = reinterpret_cast<Stored*>(a.k_cache.data + block * a.k_cache.block_stride) + offset * size;
    Stored* v = reinterpret_cast<Stored*>(a.v_cache.data + block * a.v_cache.block_stride) + offset * size;
    T normed[kMaxRope];
    for (int64_t h = 0; h < kv_heads; ++h) {
      const T* key = a.qkv.at(t, heads + h);
      const T* value = a.qkv.at(t, heads + kv_heads + h);
      if (a.k_norm) {
        apply_norm(normed, key, a.k_norm, norm_scale(sum_of_squares(key, size), size, a.eps), size, a.norm_offset);
        key = normed;
      }
      const int64_t at = h * a.block_size * size;
      rotate(k + at, key, c, s, size, broadcast(a.scales ? a.scales[h] : 1.0f));
      const Floats scale = broadcast(a.scales ? a.scales[kv_heads + h] : 1.0f);
      over_lanes(size, [&](int64_t i, auto n) { write(v + at + i, as_stored<Stored>(read(value + i, n), scale), n); });
    }
  });
}

template <class T>
void row_max(const T* x, int64_t row_stride, float* values, int64_t* places, int64_t rows, int64_t size, int threads) {
  over_rows(rows, size, threads, [&](int64_t row) {
    const T* from = x + row * row_stride;
    constexpr int kChains = 4;  // independent chains of max, because each max waits for the one before it
    Floats top[kChains];
    Ints nan[kChains] = {};
    unroll<kChains>([&](auto j) { top[j] = broadcast(-std::numeric_limits<float>::infinity()); });
    const auto look = [&](int j, Floats one) {
      nan[j] |= one != one;
      top[j] = max(one, top[j]);
    };
    int64_t i = 0;
    for (; i + kChains * kLanes <= size; i += kChains * kLanes) {
      unroll<kChains>([&](auto j) { look(j, load(from + i + j * kLanes)); });
    }
    for (; i < size; ++i) look(0, broadcast(read(from + i, 1)[0]));
    values[row] = max_lane(max(max(top[0], top[1]), max(top[2], top[3])));
    const Ints any_nan = nan[0] | nan[1] | nan[2] | nan[3];
    for (int lane = 0; lane < kLanes; ++lane) {
      if (any_nan[lane]) values[row] = std::numeric_limits<float>::quiet_NaN();
    }
    Ints first = lane_indices() * 0 + std::numeric_limits<int32_t>::max();
    over_lanes(size, [&](int64_t i, auto n) {
      const Ints place = lane_indices() + static_cast<int32_t>(i);
      const Ints matches = (read(from + i, n) == broadcast(values[row])) & (place < static_cast<int32_t>(size));
      first = (matches & (place < first)) ? place : first;
    });
    int32_t place = first[0];
    for (int lane = 1; lane < kLanes; ++lane) place = std::min<int32_t>(place, first[lane]);
    places[row] = place < size ? place : 0;
  });
}

#define QUIRE_INSTANTIATE(T)                                                                            \
  template void rms_norm<T>(Heads<const T>, const T*, float, Heads<T>, int64_t, int64_t, int64_t, int); \
  template void silu_mul<T>(const T*, T*, int64_t, int64_t, int);                                       \
  template void rope_kv_write<T, T>(const RopeArgs<T>&);                                                \
  template void rope_kv_write<T, e4m3>(const RopeArgs<T>&);                                             \
  template void row_max<T>(const T*, int64_t, float*, int64_t*, int64_t, int64_t, int);
QUIRE_INSTANTIATE(float)
QUIRE_INSTANTIATE(bf16)
QUIRE_INSTANTIATE(fp16)
#undef QUIRE_INSTANTIATE

}  // namespace quire::cpu
