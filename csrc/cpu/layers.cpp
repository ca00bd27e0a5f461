#include "layers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "pool.h"
#include "simd.h"

namespace quire::cpu {
namespace {

// Below this many numbers one thread is done before a second one has woken up.
constexpr int64_t kWorthSharing = 16 << 10;
constexpr float kLog2e = 1.4426950408889634f;

// each(row) for all rows, in runs handed to threads.
template <class Each>
void over_rows(int64_t rows, int64_t row_size, int threads, const Each& each) {
  if (rows * row_size < kWorthSharing) threads = 1;
  const int64_t run = std::max<int64_t>(1, rows / (4 * threads));
  share((rows + run - 1) / run, threads, [&](Tickets& tickets) {
    for (int64_t item; tickets.take(item);) {
      for (int64_t row = item * run; row < std::min(rows, (item + 1) * run); ++row) each(row);
    }
  });
}

// use(i, n) for n = kLanes numbers from i on, again and again; at last for the n < kLanes that remain.
template <class Use>
void over_lanes(int64_t size, const Use& use) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) use(i, std::integral_constant<int, kLanes>{});
  if (i < size) use(i, static_cast<int>(size - i));
}

// The first n lanes; the others are zero.
template <class T, int n>
Floats read(const T* p, std::integral_constant<int, n>) {
  return load(p);
}
template <class T>
Floats read(const T* p, int n) {
  T rest[kLanes] = {};
  std::copy_n(p, n, rest);
  return load(rest);
}
template <class T, int n>
void write(T* p, Floats x, std::integral_constant<int, n>) {
  store(p, x);
}
template <class T>
void write(T* p, Floats x, int n) {
  T rest[kLanes];
  store(rest, x);
  std::copy_n(rest, n, p);
}

// e^x to 3 ulp, capped at 2^126.  exp2(x * log2(e)) alone would be off by the rounding of its argument: many ulp for large x.
Floats exp(Floats x) {
  constexpr float kLow = 1.925963033500e-8f;  // log2(e) - kLog2e
  const Floats y = x * broadcast(kLog2e);
  const Floats rest = fma(x, broadcast(kLog2e), -y) + x * broadcast(kLow);
  const Floats whole = exp2(-max(-y, broadcast(-126.0f)));
  return fma(whole, rest * broadcast(0.6931472f), whole);
}

// to = from * cos + (the other half of from, negated for the first half) * sin.  to may be from.
template <class T>
void rotate(T* to, const T* from, const T* cos, const T* sin, int64_t size) {
  const int64_t half = size / 2;
  over_lanes(half, [&](int64_t i, auto n) {
    const Floats a = read(from + i, n), b = read(from + half + i, n);
    write(to + i, a * read(cos + i, n) - b * read(sin + i, n), n);
    write(to + half + i, b * read(cos + half + i, n) + a * read(sin + half + i, n), n);
  });
}

}  // namespace

template <class T>
void rms_norm(Heads<T> x, Heads<const T> delta, const T* weight, float eps, Heads<T> out, int64_t tokens, int64_t heads,
              int64_t size, int threads) {
  over_rows(tokens * heads, size, threads, [&](int64_t row) {
    const int64_t token = row / heads, head = row % heads;
    T* from = x.at(token, head);
    T* to = out.at(token, head);
    Floats squares = {};
    if (delta.data) {
      const T* add = delta.at(token, head);
      over_lanes(size, [&](int64_t i, auto n) {
        write(from + i, read(from + i, n) + read(add + i, n), n);
        const Floats sum = read(from + i, n);
        squares = fma(sum, sum, squares);
      });
    } else {
      over_lanes(size, [&](int64_t i, auto n) {
        const Floats one = read(from + i, n);
        squares = fma(one, one, squares);
      });
    }
    const Floats scale = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
    over_lanes(size, [&](int64_t i, auto n) { write(to + i, read(from + i, n) * scale * read(weight + i, n), n); });
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

template <class T>
void rope_kv_write(Heads<T> qkv, const T* cos, const T* sin, Cache k_cache, Cache v_cache, const int64_t* slots,
                   int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, int64_t block_size, int threads) {
  over_rows(tokens, (heads + 2 * kv_heads) * size, threads, [&](int64_t t) {
    const T *c = cos + t * size, *s = sin + t * size;
    for (int64_t h = 0; h < heads; ++h) rotate(qkv.at(t, h), qkv.at(t, h), c, s, size);
    if (slots[t] < 0) return;
    const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
    T* k = reinterpret_cast<T*>(k_cache.data + block * k_cache.block_stride) + offset * size;
    T* v = reinterpret_cast<T*>(v_cache.data + block * v_cache.block_stride) + offset * size;
    for (int64_t h = 0; h < kv_heads; ++h) {
      rotate(k + h * block_size * size, qkv.at(t, heads + h), c, s, size);
      std::memcpy(v + h * block_size * size, qkv.at(t, heads + kv_heads + h), size * sizeof(T));
    }
  });
}

template <class T>
void row_max(const T* x, int64_t row_stride, float* values, int64_t* places, int64_t rows, int64_t size, int threads) {
  over_rows(rows, size, threads, [&](int64_t row) {
    const T* from = x + row * row_stride;
    constexpr int kChains = 4;  // a maximum waits for the one before it: four at a time do not wait for each other
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
    Ints first = lane_numbers() * 0 + std::numeric_limits<int32_t>::max();
    over_lanes(size, [&](int64_t i, auto n) {
      const Ints place = lane_numbers() + static_cast<int32_t>(i);
      const Ints found = (read(from + i, n) == broadcast(values[row])) & (place < static_cast<int32_t>(size));
      first = (found & (place < first)) ? place : first;
    });
    int32_t place = first[0];
    for (int lane = 1; lane < kLanes; ++lane) place = std::min<int32_t>(place, first[lane]);
    places[row] = place < size ? place : 0;
  });
}

#define QUIRE_INSTANTIATE(T)                                                                                          \
  template void rms_norm<T>(Heads<T>, Heads<const T>, const T*, float, Heads<T>, int64_t, int64_t, int64_t, int);      \
  template void silu_mul<T>(const T*, T*, int64_t, int64_t, int);                                                     \
  template void rope_kv_write<T>(Heads<T>, const T*, const T*, Cache, Cache, const int64_t*, int64_t, int64_t,        \
                                 int64_t, int64_t, int64_t, int);                                                     \
  template void row_max<T>(const T*, int64_t, float*, int64_t*, int64_t, int64_t, int);
QUIRE_INSTANTIATE(float)
QUIRE_INSTANTIATE(bf16)
QUIRE_INSTANTIATE(fp16)
#undef QUIRE_INSTANTIATE

}  // namespace quire::cpu
